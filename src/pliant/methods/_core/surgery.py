"""The only place that writes the entries of some units, in weights and in optimizer state, or forgets such state."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils._pytree import tree_leaves


def keeper_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that remembers: ZeroRedundancyOptimizer has one of its own, `optim`, that steps for it."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def forget_state_(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> int:
    """Drop all that the optimizers remember of these parameters, so that the next step starts them anew.

    What L-BFGS remembers is of all its parameters together: it forgets them all, or none. A fused SGD steps only if it
    has the momentum of all of its parameters or of none, so that it is set to zero there: the same but for dampening.

    Args:
        optimizers: The optimizers; ones that do not hold a parameter are not concerned.
        parameters: The parameters.

    Returns:
        How many state tensors were dropped.
    """
    chosen = list(parameters)
    dropped = 0
    for optimizer in map(keeper_of, optimizers):
        concerned = chosen
        fused = isinstance(optimizer, SGD) and any(group.get("fused") for group in optimizer.param_groups)
        if isinstance(optimizer, LBFGS):
            held = optimizer.param_groups[0]["params"]
            concerned = held if {id(parameter) for parameter in chosen} & {id(parameter) for parameter in held} else []
        for parameter in concerned:
            # `state` makes an entry for whatever it is asked for, so ask whether it is there first.
            if parameter in optimizer.state:
                state = [v for v in tree_leaves(optimizer.state[parameter]) if isinstance(v, Tensor)]
                dropped += len(state)
                if fused:
                    torch._foreach_zero_(state)
                else:
                    del optimizer.state[parameter]
    return dropped


_MOMENT_POWERS = {
    "exp_avg": 1,
    "momentum_buffer": 1,
    "grad_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "square_avg": 2,
    "sum": 2,
}
"""The moments that torch's optimizers keep: averages or sums of gradients, or of their squares."""

_OTHER_AVERAGES = ("exp_inf", "acc_delta")
"""What else starts at zero (Adamax, Adadelta), so that zero is a fresh start; but no linear map carries it over."""


def map_moments_(optimizers: Iterable[Optimizer], parameter: Tensor, map_: Callable[[Tensor, int], object]) -> int:
    """Let a function rewrite in place each moment that the optimizers keep of a parameter.

    Args:
        optimizers: The optimizers; ones that do not hold the parameter are not concerned.
        parameter: The parameter.
        map_: Takes a moment, shaped as the parameter, and its power: 1 for one of gradients, 2 for one of squares.

    Returns:
        How many state tensors were rewritten.

    Raises:
        ValueError: If an optimizer keeps something of the parameter that is no such moment.
    """
    moments = _averages(optimizers, parameter, tuple(_MOMENT_POWERS))
    for _, key, moment in moments:
        map_(moment, _MOMENT_POWERS[key])
    return len(moments)


def zero_moments_(optimizers: Iterable[Optimizer], parameter: Tensor, mask: Tensor) -> int:
    """Set back, where the mask says so, all that the optimizers keep of a parameter but the step count.

    A moment starts at zero, Adagrad's sum at the value that it was given.

    Args:
        optimizers: The optimizers; ones that do not hold the parameter are not concerned.
        parameter: The parameter.
        mask: True at the entries to clear, of the parameter's shape or one that broadcasts to it.

    Returns:
        How many state tensors were written to.

    Raises:
        ValueError: If an optimizer keeps something of the parameter for which zero may be no fresh start.
    """
    moments = _averages(optimizers, parameter, (*_MOMENT_POWERS, *_OTHER_AVERAGES))
    for optimizer, key, moment in moments:
        start = optimizer.defaults.get("initial_accumulator_value", 0.0) if key == "sum" else 0.0
        moment.masked_fill_(mask, start)
    return len(moments)


def slice_mask(chosen: Tensor, units: Tensor, dim: int, ndim: int) -> Tensor:
    """Return a mask of the slices of a tensor that belong to chosen units.

    Args:
        chosen: For each unit, whether it is chosen.
        units: For each index along the dimension the unit that it belongs to, or −1.
        dim: The dimension that is sliced.
        ndim: How many dimensions the tensor has.

    Returns:
        A mask that broadcasts to the tensor.

    Example:
        >>> import torch
        >>> slice_mask(torch.tensor([False, True]), torch.tensor([0, 0, 1, -1]), dim=1, ndim=2)
        tensor([[False, False,  True, False]])
    """
    mask = chosen[units.clamp(min=0)] & (units >= 0)
    return mask.view([-1 if d == dim else 1 for d in range(ndim)])


def write_(tensor: Tensor, mask: Tensor, value: Tensor | float) -> None:
    """Write a value, or the entries of a tensor of the same shape, to the entries that a mask chooses.

    Indexing a tensor with a mask makes a copy, and what is written to the copy is lost; this writes to the tensor.
    """
    if isinstance(value, Tensor):
        tensor.copy_(torch.where(mask, value.to(tensor), tensor))
    else:
        tensor.masked_fill_(mask, value)


def _averages(
    optimizers: Iterable[Optimizer], parameter: Tensor, known: Sequence[str]
) -> list[tuple[Optimizer, str, Tensor]]:
    found = []
    for optimizer in map(keeper_of, optimizers):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if key not in known or value.shape != parameter.shape:
                raise ValueError(
                    f"optimizers: {type(optimizer).__name__} keeps {key!r}, which cannot be rewritten in part; "
                    f"known are {', '.join(known)}"
                )
            found.append((optimizer, key, value))
    return found
