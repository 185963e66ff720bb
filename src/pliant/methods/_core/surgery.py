"""Write slices of weights and of optimizer state; no other module does."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils._pytree import tree_leaves

from pliant.distributed import gather_whole, held, is_sharded, local, own_part


def keeper_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state: the inner `optim` of a ZeroRedundancyOptimizer, else itself."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def forget_state_(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> int:
    """Drop the optimizers' state of these parameters, so that the next step starts with fresh state.

    L-BFGS has one state for all its parameters, so it drops all or none of it. A fused SGD needs the momentum of all
    its parameters or of none, so there the momentum is set to zero instead; only dampening sees a difference.

    Args:
        optimizers: The optimizers. Optimizers that do not hold a parameter are left alone.
        parameters: The parameters.

    Returns:
        The number of state tensors that were dropped.
    """
    chosen = [held(parameter) for parameter in parameters]
    dropped = 0
    for optimizer in map(keeper_of, optimizers):
        concerned = chosen
        fused = isinstance(optimizer, SGD) and any(group.get("fused") for group in optimizer.param_groups)
        if isinstance(optimizer, LBFGS):
            trained = optimizer.param_groups[0]["params"]
            concerned = trained if {id(p) for p in chosen} & {id(p) for p in trained} else []
        for parameter in concerned:
            # `state` is a defaultdict, which would create an entry.
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
"""The moments of torch's optimizers, averages or sums of gradients (1) or of squared gradients (2)."""

_OTHER_AVERAGES = ("exp_inf", "acc_delta")
"""Other state that starts at zero (Adamax, Adadelta). It can be cleared, but not mapped linearly."""


def map_moments_(optimizers: Iterable[Optimizer], parameter: Tensor, map_: Callable[[Tensor, int], object]) -> int:
    """Let a function rewrite in place each moment of a parameter in the optimizers' state.

    Args:
        optimizers: The optimizers. Optimizers that do not hold the parameter are left alone.
        parameter: The parameter.
        map_: Takes a moment, shaped as the parameter, and its power: 1 for gradients, 2 for squared gradients.

    Returns:
        The number of state tensors that were rewritten.

    Raises:
        ValueError: If an optimizer keeps other state of the parameter.
    """
    moments = _averages(optimizers, parameter, tuple(_MOMENT_POWERS))
    for _, key, moment in moments:
        (whole,) = gather_whole([moment]) if is_sharded(moment) else (moment,)
        map_(whole, _MOMENT_POWERS[key])
        if whole is not moment:
            local(moment).copy_(own_part(whole, moment))
    return len(moments)


def zero_moments_(optimizers: Iterable[Optimizer], parameter: Tensor, mask: Tensor) -> int:
    """Reset the optimizers' state of masked entries of a parameter; step counts are kept.

    Moments start at zero, Adagrad's sum at its `initial_accumulator_value`.

    Args:
        optimizers: The optimizers. Optimizers that do not hold the parameter are left alone.
        parameter: The parameter.
        mask: True at the entries to reset; it broadcasts to the parameter's shape.

    Returns:
        The number of state tensors that were written.

    Raises:
        ValueError: If an optimizer keeps state whose initial value is unknown.
    """
    moments = _averages(optimizers, parameter, (*_MOMENT_POWERS, *_OTHER_AVERAGES))
    for optimizer, key, moment in moments:
        start = optimizer.defaults.get("initial_accumulator_value", 0.0) if key == "sum" else 0.0
        local(moment).masked_fill_(own_part(mask, moment), start)
    return len(moments)


_STEP_STARTS = {"step": 0.0, "mu_product": 1.0}
"""The scalars that count steps: all of torch's optimizers keep `step`, NAdam also a product over the steps."""


def reset_steps_(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> int:
    """Let the optimizers' step counts of these parameters start again; moments are kept.

    Args:
        optimizers: The optimizers. Optimizers that do not hold a parameter are left alone.
        parameters: The parameters.

    Returns:
        The number of counts that were written.
    """
    chosen, written = [held(parameter) for parameter in parameters], 0
    for optimizer in map(keeper_of, optimizers):
        for state in (optimizer.state[parameter] for parameter in chosen if parameter in optimizer.state):
            for key, start in _STEP_STARTS.items():
                if key in state:
                    state[key] = state[key].fill_(start) if isinstance(state[key], Tensor) else type(state[key])(start)
                    written += 1
    return written


def state_tensors(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return all tensors that the optimizers keep for these parameters."""
    chosen = [held(parameter) for parameter in parameters]
    states = [keeper.state[p] for keeper in map(keeper_of, optimizers) for p in chosen if p in keeper.state]
    return [leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)]


def slice_mask(chosen: Tensor, units: Tensor, dim: int, ndim: int) -> Tensor:
    """Return a mask of the slices of a tensor that belong to chosen units.

    Args:
        chosen: For each unit, whether it is chosen.
        units: For each index along the dimension, the unit that it belongs to, or −1.
        dim: The dimension that is sliced.
        ndim: The number of dimensions of the tensor.

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
    """Write a value, or the entries of a tensor of the same shape, to the masked entries of a tensor.

    Writing to `tensor[mask]` with advanced indexing may write to a copy; this always writes to the tensor.
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
        for key, value in optimizer.state.get(held(parameter), {}).items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if key not in known or value.shape != held(parameter).shape:
                raise ValueError(
                    f"optimizers: {type(optimizer).__name__} keeps {key!r}, which cannot be rewritten in part; "
                    f"known are {', '.join(known)}"
                )
            found.append((optimizer, key, value))
    return found


def check_targets(targets: Iterable[tuple[nn.Module, nn.Module]]) -> None:
    """Raise a ValueError if a target network cannot become a copy of its network."""
    for network, target in targets:
        ours, theirs = network.state_dict(), target.state_dict()
        different = [name for name in {**ours, **theirs} if _shape(ours, name) != _shape(theirs, name)]
        if different:
            raise ValueError(
                f"targets: {different[0]!r} is {_shape(ours, different[0])} in the network and "
                f"{_shape(theirs, different[0])} in its target; each pair is (network, target)"
            )


def _shape(state: Mapping[str, Tensor], name: str) -> str:
    return f"of shape {tuple(state[name].shape)}" if name in state else "missing"


def copy_targets_(targets: Iterable[tuple[nn.Module, nn.Module]]) -> int:
    """Copy each network into its target, buffers included; return how many tensors that were."""
    copied = 0
    for network, target in targets:
        state = network.state_dict()
        target.load_state_dict(state)
        copied += len(state)
    return copied
