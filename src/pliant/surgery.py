"""The only place that writes slices of weights and of optimizer state."""

from collections.abc import Iterable

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
