"""The only place that writes slices of weights and of optimizer state."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer


def forget_state_(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> int:
    """Drop all that the optimizers remember of these parameters, so that the next step starts them anew.

    Args:
        optimizers: The optimizers; ones that do not hold a parameter are not concerned.
        parameters: The parameters.

    Returns:
        How many state tensors were dropped.
    """
    chosen = list(parameters)
    dropped = 0
    for optimizer in optimizers:
        for parameter in chosen:
            # `state` makes an entry for whatever it is asked for, so ask whether it is there first.
            if parameter in optimizer.state:
                dropped += sum(isinstance(value, Tensor) for value in optimizer.state.pop(parameter).values())
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
    for key, moment in moments:
        map_(moment, _MOMENT_POWERS[key])
    return len(moments)


def zero_moments_(
    optimizers: Iterable[Optimizer], parameter: Tensor, views: Sequence[Callable[[Tensor], Tensor]]
) -> int:
    """Set parts of all that the optimizers keep of a parameter to zero, the step count excepted.

    Args:
        optimizers: The optimizers; ones that do not hold the parameter are not concerned.
        parameter: The parameter.
        views: Functions that return the parts of a tensor shaped as the parameter, as views of it.

    Returns:
        How many state tensors were written to.

    Raises:
        ValueError: If an optimizer keeps something of the parameter for which zero may be no fresh start.
    """
    moments = _averages(optimizers, parameter, (*_MOMENT_POWERS, *_OTHER_AVERAGES))
    for _, moment in moments:
        for view in views:
            view(moment).zero_()
    return len(moments)


def _averages(optimizers: Iterable[Optimizer], parameter: Tensor, known: Sequence[str]) -> list[tuple[str, Tensor]]:
    found = []
    for optimizer in optimizers:
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or value.ndim == 0:
                continue
            if key not in known or value.shape != parameter.shape:
                raise ValueError(
                    f"optimizers: {type(optimizer).__name__} keeps {key!r}, which cannot be rewritten in part; "
                    f"known are {', '.join(known)}"
                )
            found.append((key, value))
    return found
