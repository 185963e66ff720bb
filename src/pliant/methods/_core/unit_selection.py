"""Whose units a method acts on: those that can be acted on one by one, and that its user asks for."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from pliant._warnings import warn_user
from pliant.anatomy.parameters import is_linear
from pliant.anatomy.unit_tracker import find_units
from pliant.anatomy.units import UNREACHED, UnitGroup
from pliant.methods._core.method import Filter


def choose_units(
    method: str,
    model: nn.Module,
    example: Any,
    where: Filter | None,
    reason_against: Callable[[UnitGroup], str | None],
    failure: str,
) -> tuple[list[UnitGroup], dict[str, str]]:
    """Find the layers whose units a method is to act on.

    Args:
        method: The method's name.
        model: The model.
        example: An example input, from which the units are found.
        where: Which layers, as a predicate on name and value of their weight; all if None.
        reason_against: Says why the method cannot act on the units of a layer, None if it can.
        failure: What it means that no layer is left, as a sentence about the model.

    Returns:
        The layers, and by name those that cannot be acted on, with the reason.

    Raises:
        ValueError: If there is no example, or no layer is left.
    """
    if example is None:
        raise ValueError(f"example: None, but {method} finds the units by tracing one; pass an example input")
    found = find_units(model, example)
    chosen, skipped = [], dict(found.skipped)
    for group in found.groups:
        name = group.weight.tensor
        if where is not None and not where(name, model.get_parameter(name)):
            continue
        reason = reason_against(group)
        if reason is None:
            chosen.append(group)
        else:
            skipped[group.name] = reason
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        nothing = "`where` passes none" if found.groups else "no linear or convolution layer makes units"
        raise ValueError(f"model: {failure} ({reasons or nothing})")
    unreached = [name for name, reason in found.skipped.items() if reason == UNREACHED and _learns(model, name)]
    if unreached:
        warn_user(
            f"{method}: the example does not reach {', '.join(unreached)}, so it is not known whose units are read "
            "there; pass an example, or a module around the model, that calls every layer"
        )
    return chosen, skipped


def _learns(model: nn.Module, path: str) -> bool:
    return any(p.requires_grad and p.numel() for p in model.get_submodule(path).parameters())


def is_linear_or_convolution(module: nn.Module) -> bool:
    """Say whether a module is a layer that multiplies its input by a weight, one dimension by one of the other."""
    return is_linear(module) or isinstance(module, _ConvNd)
