"""Load weights and optimizer state from a file without running code from the file."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._files import is_regular, open_regular
from pliant._importing import naming_extra
from pliant._optimizer_state import load_optimizer_state
from pliant._torch_files import RefusedError, load_torch_file
from pliant.distributed import unwrap_model

_PLACES = ("model", "state_dict", "model_state_dict", "module", "state")
"""The keys under which training loops store a model's state dict; `pliant run` uses "state"."""

_WRAPPERS = ("_orig_mod", "module")
"""What `torch.compile` and data parallelism add to the names of tensors."""


def load_weights(path: str | Path, key: str = "") -> dict[str, Any]:
    """Read a state dict from a safetensors file or a file written by `torch.save`, with its names unchanged.

    A checkpoint that also holds other things, such as an optimizer, may store the state dict under `model`,
    `state_dict`, `model_state_dict`, `module` or `state`. `pliant run` stores it under `state` and then `model`.

    Args:
        path: The file.
        key: The place of the state dict in the file, with dots between keys. By default, the places above are searched.

    Raises:
        ValueError: If the file does not exist, holds other objects than tensors and plain types, or has no state dict.
        ImportError: If the file is a safetensors file and safetensors is not installed.
    """
    content = read_checkpoint(path)
    path = Path(path)
    held = dict(_state_dicts(content))
    found = held.get(key) if key else _find(content)
    if found is None:
        where = f"under {key!r}" if key else f"at the top or under one of {', '.join(_PLACES)}"
        others = f"; choose one of these (--key): {', '.join(held)}" if held else ""
        raise ValueError(f"{str(path)!r} holds no state dict {where}{others}")
    return dict(found)


def read_checkpoint(path: str | Path) -> Mapping[str, Any]:
    """Read all that a checkpoint holds, without running code from it.

    Raises:
        ValueError: If the file does not exist, or holds other objects than tensors and plain types.
        ImportError: If the file is a safetensors file and safetensors is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    if not is_regular(path):
        raise ValueError(f"{str(path)!r} is not a regular file")
    content = _read(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"{str(path)!r} must hold a state dict, got {type(content).__name__}")
    return content


def _state_dicts(
    content: Mapping[Any, Any], path: tuple[str, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all state dicts in a checkpoint with their keys, joined by dots; a table under several keys is walked once.

    A pickle can hold a table within itself, or twice at each of many levels.
    """
    seen = set() if seen is None else seen
    if path and _is_state_dict(content):
        yield ".".join(path), content
        return
    if id(content) in seen:
        return
    seen.add(id(content))
    for key, value in content.items():
        if isinstance(key, str) and isinstance(value, Mapping):  # an optimizer numbers its parameters
            yield from _state_dicts(value, (*path, key), seen)


def _find(content: Mapping[Any, Any], seen: set[int] | None = None) -> Mapping[str, Any] | None:
    """Return the first state dict at one of `_PLACES`, in their order."""
    seen = set() if seen is None else seen
    if _is_state_dict(content):
        return content
    if id(content) in seen:
        return None
    seen.add(id(content))
    inside = (content[place] for place in _PLACES if isinstance(content.get(place), Mapping))
    return next((found for each in inside if (found := _find(each, seen)) is not None), None)


def load_into(model: nn.Module, path: str | Path, key: str = "") -> nn.Module:
    """Load the weights of a file into a model and return the model.

    Wrappers of `torch.compile` and data parallelism do not matter, on either side. A tensor that the model holds under
    several names may be stored under one of them, as safetensors does.

    Raises:
        ValueError: If the weights cannot be read, or do not fit the model.
    """
    weights = load_weights(path, key)
    bare = unwrap_model(model)
    try:
        bare.load_state_dict(_named_alike(weights, bare.state_dict(keep_vars=True)))
    except RuntimeError as error:
        reason = textwrap.shorten(str(error), 500, placeholder=" …")
        raise ValueError(f"{str(path)!r} does not fit the model: {reason}") from None
    return model


def load_optimizer_into(optimizer: Optimizer, path: str | Path, key: str) -> Optimizer:
    """Load the state of a checkpoint's optimizer into an optimizer, which keeps its own learning rate and settings.

    Args:
        optimizer: The optimizer, with the same parameters in the same order.
        path: The file, written by `torch.save`.
        key: The place of the optimizer's `state_dict()` in the file, with dots between keys.

    Raises:
        ValueError: If the file has no such state, or it does not fit the optimizer.
    """
    content = _read(Path(path))
    for step in key.split("."):
        content = content.get(step) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not {"state", "param_groups"} <= content.keys():
        raise ValueError(f"{str(path)!r} holds no optimizer state under {key!r}; save optimizer.state_dict() there")
    load_optimizer_state(optimizer, content, f"the optimizer state under {key!r} of {str(path)!r}")
    return optimizer


def _named_alike(weights: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights under a model's names if the names differ only by wrappers; else unchanged."""
    theirs = {_without_wrappers(name): name for name in own}
    found = {_without_wrappers(name): tensor for name, tensor in weights.items()}
    if len(theirs) < len(own) or len(found) < len(weights):  # a child of the model has the name of a wrapper
        return _without_first_wrappers(weights, own)
    stored = {id(own[name]): found[bare] for bare, name in theirs.items() if bare in found}
    found = {bare: stored[id(own[name])] for bare, name in theirs.items() if id(own[name]) in stored} | found
    return {theirs[name]: tensor for name, tensor in found.items()} if found.keys() == theirs.keys() else weights


def _without_first_wrappers(weights: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights without the wrappers at the start of all names, if the names then match; else unchanged."""
    found = weights
    while found.keys() != own.keys() and all(name.partition(".")[0] in _WRAPPERS for name in found):
        found = {name.partition(".")[2]: tensor for name, tensor in found.items()}
    return found if found.keys() == own.keys() else weights


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        with naming_extra("a safetensors file", "cli"):
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{str(path)!r} cannot be read as a safetensors file ({error})") from None
    with open_regular(path) as file:
        start = file.read(16)
    if not start.startswith((b"PK", b"\x80")):
        begins = f"it begins with {start!r}" if start else "it is empty"
        raise ValueError(
            f"{str(path)!r} is not a checkpoint: {begins}. Pass a file written by torch.save or safetensors"
        )
    try:
        return load_torch_file(path)
    except RefusedError as error:
        raise ValueError(f"{str(path)!r} {str(error).removeprefix('it ')}") from None
    except Exception as error:  # a damaged file can raise any error: KeyError, UnicodeDecodeError, …
        reason = re.split(r"\n|\. ", str(error))[0] or "it is cut off"
        raise ValueError(f"{str(path)!r} is damaged and cannot be read as a checkpoint ({reason})") from None


def _is_state_dict(content: Mapping[Any, Any]) -> bool:
    """Return whether a mapping holds tensors by name, apart from the `_extra_state` of modules."""
    rest = {k: v for k, v in content.items() if not (isinstance(k, str) and k.endswith("_extra_state"))}
    return bool(rest) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in rest.items())
