"""What a method acts on: the parameters and units of a model, and the strength for each name."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from pliant._validation import check_number
from pliant._warnings import warn_user
from pliant.anatomy.parameters import Role, find_computed, is_linear, role_of
from pliant.anatomy.unit_tracker import find_units
from pliant.anatomy.units import UNREACHED, UnitGroup
from pliant.distributed import held

Filter = Callable[[str, nn.Parameter], bool]
"""A predicate on the name of a parameter and the parameter itself."""
Strength = float | Mapping[str, float]
"""One strength for all parameters, or strengths by name pattern."""


def learnable_parameters(model: nn.Module, where: Filter | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, have entries and pass the filter, by name, tied ones once.

    Args:
        model: The model.
        where: A predicate on name and parameter; all pass if None. It sees the DTensor of a sharded parameter, whose
            shape is the whole one on every rank.

    Raises:
        ValueError: If a parameter has no values yet, if no parameter is left, or if the model is a loss of TorchRL.
    """
    if "remove_duplicate" not in inspect.signature(model.named_parameters).parameters:
        parts = [name for name, part in model.named_children() if any(p.requires_grad for p in part.parameters())]
        raise ValueError(
            f"model: {type(model).__name__} is not a network but holds networks; pass one of them: {', '.join(parts)}"
        )
    chosen = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"model: parameter {name!r} is not initialized yet; run one batch through the model first")
        if parameter.is_meta:
            raise ValueError(f"model: parameter {name!r} is on the meta device; materialize the model first (to_empty)")
        if parameter.requires_grad and held(parameter).numel() and (where is None or where(name, held(parameter))):
            chosen[name] = parameter
    if not chosen:
        raise ValueError(
            "model: no parameter that requires a gradient" + (" passes the filter `where`" if where else "")
        )
    return chosen


def match_names(model: nn.Module, patterns: str | Sequence[str]) -> Filter:
    """Return a filter for the parameters whose names match one of these shell patterns, such as `head.*`.

    Args:
        model: The model.
        patterns: One pattern or several.

    Raises:
        ValueError: If a pattern matches no parameter of the model.

    Example:
        >>> chosen = match_names(nn.Linear(2, 2), "w*")
        >>> [name for name, p in nn.Linear(2, 2).named_parameters() if chosen(name, p)]
        ['weight']
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"where: the pattern {pattern!r} matches no parameter; there are {', '.join(names)}")
    return lambda name, p: any(fnmatchcase(name, pattern) for pattern in patterns)


def check_not_replaced(
    method: str, model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None = None
) -> None:
    """Raise a ValueError if the model no longer holds one of a method's parameters.

    Args:
        method: The method's name.
        model: The model.
        parameters: The parameters that the method acts on.
        optimizer: If given, check only parameters that it trains, and parameters in whose place it trains another.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    present_ids = {id(parameter) for parameter in present.values()}
    trained = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if present_ids & {id(parameter), id(held(parameter))}:
            continue
        if trained is None or trained & {id(held(parameter)), id(present.get(name))}:
            raise ValueError(
                f"model: parameter {name!r} was replaced since {method} was made (by a new module, or "
                f"load_state_dict(assign=True)); construct {method} again"
            )


def check_not_frozen(method: str, followers: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise a ValueError if a parameter was frozen that must be scaled along with others.

    Args:
        method: The method's name.
        followers: The parameters, each with the name of the block that follows.
    """
    for name, parameter in followers:
        if not parameter.requires_grad:
            raise ValueError(
                f"model: {name!r} was frozen since {method} was made, but must follow the weights that are scaled; "
                f"unfreeze it, or construct {method} again and copy its `initial_norms`"
            )


def warn_of_unknown(
    method: str, model: nn.Module, known: Mapping[str, nn.Parameter], optimizer: Optimizer, told: set[str]
) -> list[nn.Parameter]:
    """Warn of parameters that the optimizer trains but the method did not find at construction.

    Args:
        method: The method's name.
        model: The model.
        known: The learnable parameters at construction.
        optimizer: The optimizer.
        told: The names that were warned of already; new ones are added.

    Returns:
        Unknown parameters of the optimizer that are still frozen, to warn of once they are learnable.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for p in known.values()}
    # A parameter in the place of a known one is either excluded by the user or reported as replaced.
    others = [(name, p) for name, p in model.named_parameters() if name not in known and id(p) not in ours]
    unknown = [(name, p) for name, p in others if id(p) in trained and name not in told]
    learned = [name for name, p in unknown if p.requires_grad]
    told.update(learned)
    if learned:
        warn_user(f"{method} does not act on {', '.join(learned)}: frozen, or not there, when it was made")
    return [p for _, p in unknown if not p.requires_grad]


def having_role(model: nn.Module, where: Filter | None, *roles: Role) -> Filter:
    """Return a filter for the parameters that have one of these roles and pass `where`."""
    return lambda name, p: role_of(model, name, p) in roles and (where is None or where(name, p))


def warn_of_computed(method: str, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Warn if a method acts on tensors that a weight is computed from, such as the directions of a weight norm.

    Args:
        method: The method's name.
        model: The model.
        parameters: The parameters that the method acts on.
    """
    matrices = [name for name, p in parameters.items() if role_of(model, name, p) == "matrix"]
    layers = [path for path in find_computed(model) if any(name.startswith(path and f"{path}.") for name in matrices)]
    if layers:
        warn_user(
            f"{method} acts on the tensors from which the weights of these layers are computed, not on the weights: "
            f"{', '.join(layers)} (exclude them with where=)"
        )


def resolve_strengths(
    lam: Strength, names: Iterable[str], *, high: float = float("inf"), wholes: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the strength of each name; a name that matches no pattern is left out.

    Args:
        lam: One strength for all, or strengths by shell pattern (`{"head.*": 1e-2, "*": 1e-4}`). The first pattern that
            matches a name counts.
        names: The names of the parameters, or of parts of them.
        high: The largest strength that is allowed.
        wholes: For names of parts, the names of their parameters. A pattern for a parameter matches all its parts.

    Raises:
        ValueError: If a strength is out of range or a pattern matches no name.

    Example:
        >>> resolve_strengths({"head.*": 1e-2}, ["body.weight", "head.weight"])
        {'head.weight': 0.01}
    """
    names = list(names)

    def matches(name: str, pattern: str) -> bool:
        # The name of a part has brackets, which are special in a pattern, so compare it literally too.
        candidates = (name, (wholes or {}).get(name, name))
        return any(each == pattern or fnmatchcase(each, pattern) for each in candidates)

    if not isinstance(lam, Mapping):
        return dict.fromkeys(names, check_number("lam", lam, high=high))
    if not lam:
        raise ValueError("lam: {} is empty; it must be a number or have at least one pattern")
    for pattern, strength in lam.items():
        check_number(f"lam[{pattern!r}]", strength, high=high)
        if not any(matches(name, pattern) for name in names):
            raise ValueError(f"lam: the pattern {pattern!r} matches no parameter; there are {', '.join(names)}")
    found = {name: next((float(s) for p, s in lam.items() if matches(name, p)), None) for name in names}
    return {name: strength for name, strength in found.items() if strength is not None}


def choose_units(
    method: str,
    model: nn.Module,
    example: Any,
    where: Filter | None,
    reason_against: Callable[[UnitGroup], str | None],
    failure: str,
) -> tuple[list[UnitGroup], dict[str, str]]:
    """Return the layers whose units a method acts on, and the skipped layers by name with the reason.

    Args:
        method: The method's name.
        model: The model.
        example: An example input, on which the units are found.
        where: Which layers, as a predicate on name and value of their weight; all if None.
        reason_against: Returns why the method cannot act on the units of a layer, or None if it can.
        failure: The error if no layer is left, as a sentence about the model.

    Raises:
        ValueError: If there is no example, or no layer is left.
    """
    if example is None:
        raise ValueError(f"example: None, but {method} finds the units by tracing one; pass an example input")
    found = find_units(model, example)
    chosen, skipped = [], dict(found.skipped)
    for group in found.groups:
        names = [slices.tensor for slices in group.weights]
        if where is not None and not all(where(name, model.get_parameter(name)) for name in names):
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
            f"{method}: the example does not reach {', '.join(unreached)}, so it cannot know whose units they "
            "read; pass an example, or a module around the model, that calls every layer"
        )
    return chosen, skipped


def _learns(model: nn.Module, path: str) -> bool:
    return any(p.requires_grad and p.numel() for p in model.get_submodule(path).parameters())


def is_linear_or_convolution(module: nn.Module) -> bool:
    """Return whether a module is a linear or convolution layer."""
    return is_linear(module) or isinstance(module, _ConvNd)
