"""The parameters of a model that a method acts on, and whether they are still the model's."""

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from pliant._warnings import warn_user
from pliant.anatomy.parameters import Role, find_computed, is_stack, role_of

Filter = Callable[[str, nn.Parameter], bool]
"""A predicate on the name of a parameter and the parameter itself."""


def learnable_parameters(model: nn.Module, where: Filter | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, have entries and pass the filter, by name, tied ones once.

    Args:
        model: The model.
        where: A predicate on name and parameter; all pass if None.

    Raises:
        ValueError: If a parameter has no values yet, or is spread over devices, or none is left.
    """
    chosen = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"model: parameter {name!r} is not initialized yet; run one batch through the model first")
        if parameter.is_meta:
            raise ValueError(f"model: parameter {name!r} is on the meta device; materialize the model first (to_empty)")
        if hasattr(parameter, "full_tensor"):  # a DTensor, whose module is slow to import
            raise ValueError(
                f"model: parameter {name!r} is a {type(parameter).__name__}, spread over devices (fully_shard, tensor "
                "parallel); methods are for parameters that are whole"
            )
        if parameter.requires_grad and parameter.numel() and (where is None or where(name, parameter)):
            chosen[name] = parameter
    if not chosen:
        raise ValueError(
            "model: no parameter that requires a gradient" + (" passes the filter `where`" if where else "")
        )
    return chosen


def check_not_replaced(
    method: str, model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None = None
) -> None:
    """Raise a ValueError that names the first of a method's parameters that the model holds no longer.

    What is done to it would be done in vain, and in silence.

    Args:
        method: The method's name.
        model: The model.
        parameters: The parameters that the method acts on.
        optimizer: If given, only what it trains matters: the parameter that is gone, or the one in its place.
    """
    present = dict(model.named_parameters(remove_duplicate=False))
    held = {id(parameter) for parameter in present.values()}
    trained = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) in held:
            continue
        if trained is None or trained & {id(parameter), id(present.get(name))}:
            raise ValueError(
                f"model: parameter {name!r} was replaced since {method} was made (by a new module, or "
                f"load_state_dict(assign=True)); make {method} anew"
            )


def check_not_frozen(method: str, followers: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise a ValueError if a parameter that must be scaled along with others was frozen since the method was made.

    Args:
        method: The method's name.
        followers: The parameters, each with the name of the part of it that follows.
    """
    for name, parameter in followers:
        if not parameter.requires_grad:
            raise ValueError(
                f"model: {name!r} was frozen since {method} was made, but must follow the weights that are scaled; "
                f"unfreeze it, or make {method} anew (and copy what it remembers, such as `initial_norms`)"
            )


def warn_of_unknown(
    method: str, model: nn.Module, known: Mapping[str, nn.Parameter], optimizer: Optimizer, told: set[str]
) -> list[nn.Parameter]:
    """Warn of parameters of the model that the optimizer trains, but that the method did not find when it was made.

    Args:
        method: The method's name.
        model: The model.
        known: The parameters that could be learned when the method was made.
        optimizer: The optimizer.
        told: The names that were warned of already; those that are now join them.

    Returns:
        Those that the optimizer holds and the method does not know, but that are frozen: to be warned of when they are
        no longer.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    ours = {id(p) for p in known.values()}
    # One that stands in the place of another that was known has been left out by the method's user, or is an error.
    others = [(name, p) for name, p in model.named_parameters() if name not in known and id(p) not in ours]
    unknown = [(name, p) for name, p in others if id(p) in held and name not in told]
    learned = [name for name, p in unknown if p.requires_grad]
    told.update(learned)
    if learned:
        warn_user(f"{method} does not act on {', '.join(learned)}: frozen, or not there, when it was made")
    return [p for _, p in unknown if not p.requires_grad]


def having_role(model: nn.Module, where: Filter | None, *roles: Role) -> Filter:
    """Return a filter for the parameters that have one of these roles and pass `where`."""
    return lambda name, p: role_of(model, name, p) in roles and (where is None or where(name, p))


def without_stacks(method: str, model: nn.Module, where: Filter | None) -> Filter:
    """Return a filter for the parameters that pass `where` and are not stacks of matrices (see `is_stack`).

    Warns of the stacks: a bound on the whole stack would not be a bound on any of its matrices.

    Args:
        method: The name of the method, whose `__init__` calls this.
        model: The model.
        where: The filter; all pass if None.
    """
    stacks = [
        name
        for name, p in learnable_parameters(model).items()
        if is_stack(model, name, p) and role_of(model, name, p) == "matrix" and (where is None or where(name, p))
    ]
    if stacks:
        warn_user(
            f"{method} leaves these weights alone, because each may hold several matrices: {', '.join(stacks)} (they "
            "have three or more dimensions and are not kernels of a convolution). Give each matrix its own parameter "
            "to act on it, or exclude these weights with where="
        )
    return lambda name, p: name not in stacks and (where is None or where(name, p))


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
