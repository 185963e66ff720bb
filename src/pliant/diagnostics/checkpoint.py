"""Weights from a file, without ever running code that the file holds."""

import textwrap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Where training loops (`pliant run`: "state") put a model's state dict among other things, and what `torch.compile`
# and data parallelism put into its names.
_PLACES = ("model", "state_dict", "model_state_dict", "module", "state")
_COMPILED, _PARALLEL = "_orig_mod.", "module."


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file or from one that `torch.save` wrote, its names as they are.

    A checkpoint that holds more (an optimizer, a step) may keep the model's under `model`, `state_dict`,
    `model_state_dict`, `module` or `state`, and that of `pliant run` under `state` and then `model`.

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
    return dict(found)


def load_into(model: nn.Module, path: str | Path) -> nn.Module:
    """Load the weights of a file into a model and return it, whichever of them was compiled or run in parallel.

    Raises:
        ValueError: If the weights cannot be read, or are not those of the model.
    """
    weights = load_weights(path)
    try:
        model.load_state_dict(_named_alike(weights, model.state_dict()))
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 500, placeholder=" …")
        raise ValueError(f"{str(path)!r} does not fit the model: {reason}") from None
    return model


def _named_alike(weights: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Return weights under a model's names if they differ in what wrappers put into names; else as they are."""
    theirs = {name.replace(_COMPILED, ""): name for name in names}
    found = {name.replace(_COMPILED, ""): tensor for name, tensor in weights.items()}
    # A model may have a child that is called `module`, so that only names that do not fit lose it.
    while found.keys() != theirs.keys() and all(name.startswith(_PARALLEL) for name in found):
        found = {name.removeprefix(_PARALLEL): tensor for name, tensor in found.items()}
    return {theirs[name]: tensor for name, tensor in found.items()} if found.keys() == theirs.keys() else weights


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise ImportError("safetensors files need that package: pip install safetensors") from error
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as a safetensors file ({error})") from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises nearly anything: KeyError, UnicodeDecodeError, …
        reason = str(error).partition("\n")[0] or "it is empty or cut off"
        raise ValueError(
            f"{str(path)!r} cannot be read as tensors and plain types ({reason}). A file that needs code to be read is "
            "never opened: save model.state_dict()"
        ) from None


def _is_state_dict(found: Mapping[Any, Any]) -> bool:
    return bool(found) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())
