"""Weights from a file, without ever running code that the file holds."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Where training loops put a model's state dict among other things, and what wrappers put before its names.
_PLACES = ("model", "state_dict", "model_state_dict", "module")
_PREFIXES = ("_orig_mod.", "module.")


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file or from one that `torch.save` wrote.

    A checkpoint that holds more (an optimizer, a step) may keep the model's under `model`, `state_dict`,
    `model_state_dict` or `module`. What `torch.compile` and data parallelism put before names is taken off.

    Args:
        path: The file.

    Raises:
        ValueError: If there is no such file, it holds anything but tensors and plain types, or no state dict.
        ImportError: If it is a safetensors file and that package is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    found = _read(path)
    while isinstance(found, Mapping) and not _is_state_dict(found):
        place = next((place for place in _PLACES if isinstance(found.get(place), Mapping)), None)
        if place is None:
            raise ValueError(f"{str(path)!r} holds no state dict, at the top or under one of {', '.join(_PLACES)}")
        found = found[place]
    if not isinstance(found, Mapping):
        raise ValueError(f"{str(path)!r} must hold a state dict, got {type(found).__name__}")
    weights = dict(found)
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def load_into(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a file into a model and return it.

    Raises:
        ValueError: If the weights cannot be read, or are not those of the model.
    """
    try:
        model.load_state_dict(load_weights(path))
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} does not fit the model: {error}") from None
    return model


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError("safetensors files need that package: pip install safetensors") from error
        return load_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{str(path)!r} cannot be read as tensors and plain types ({reason}). A file that needs code to be read is "
            "never opened: save model.state_dict()"
        ) from None


def _is_state_dict(found: Mapping[Any, Any]) -> bool:
    return bool(found) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())
