"""Load an optimizer's state that comes from a file, if it fits the parameters.

Torch takes whatever a file holds. A fused optimizer then reads and writes beyond the end of a moment of another shape.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from pliant._validation import check_number


def load_optimizer_state(
    optimizer: Optimizer, content: Mapping[str, Any], what: str, *, with_rate: bool = False
) -> None:
    """Load a state dict into an optimizer, by the order of its parameters; the optimizer keeps its settings.

    Args:
        optimizer: The optimizer.
        content: The state dict.
        what: Names it in errors.
        with_rate: Whether the learning rates are loaded too.

    Raises:
        ValueError: If it does not fit the optimizer. Nothing is changed then.
    """
    try:
        optimizer.load_state_dict(_fit(optimizer, content, what, with_rate))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{what} is malformed ({type(error).__name__}: {error})") from error


def _fit(optimizer: Optimizer, content: Mapping[str, Any], what: str, with_rate: bool) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    # An optimizer numbers its parameters in their order; the file may have numbered them in another way.
    state = {numbers.index(number): dict(entries) for number, entries in content["state"].items()}
    if len(numbers) != len(parameters):
        raise ValueError(f"{what} belongs to another network")
    groups = optimizer.state_dict()["param_groups"]
    expected = _names(optimizer)
    for place, entries in state.items():
        if expected is None or not entries:  # Methods may have dropped what is remembered of a parameter.
            continue
        if set(entries) != expected:
            raise ValueError(
                f"{what} holds {', '.join(sorted(entries))}: it is not the state of {type(optimizer).__name__}"
            )
        for name, value in entries.items():
            shape = () if name == "step" else parameters[place].shape
            if name == "momentum_buffer" and value is None:
                continue
            if not isinstance(value, Tensor) or not _is_plain(value) or value.shape != shape:
                raise ValueError(f"{what} belongs to another network: {name} does not fit parameter {place}")
            if name == "step" and not 0 <= float(value) < math.inf:
                raise ValueError(f"{what} counts {float(value)} steps")
    if with_rate:
        for group, saved in zip(groups, content["param_groups"], strict=True):
            group["lr"] = check_number("lr", saved["lr"])
    return {"state": state, "param_groups": groups}


def _is_plain(value: Tensor) -> bool:
    """Return whether a tensor holds a real number of its own for each element."""
    if value.layout != torch.strided or value.is_complex():
        return False
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


def _names(optimizer: Optimizer) -> set[str] | None:
    """Return what an optimizer remembers of each parameter; None if we do not know."""
    if type(optimizer) in (Adam, AdamW):
        largest = {"max_exp_avg_sq"} if any(group["amsgrad"] for group in optimizer.param_groups) else set()
        return {"step", "exp_avg", "exp_avg_sq"} | largest
    return {"momentum_buffer"} if type(optimizer) is SGD else None
