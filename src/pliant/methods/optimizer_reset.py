"""Optimizer reset: forget the optimizer's state when data is new; the weights stay.

Adam's averages describe the gradients of the old data. Asadi et al. 2023, "Resetting the Optimizer in Deep RL", start
them again whenever the target changes: m ← 0, v ← 0, t ← 0. Ellis et al. 2024, "Adam on Local Time" (Adam-Rel), set
only the step count to zero, t ← 0, and keep the averages: the bias correction then shrinks the first steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._validation import check_choice
from pliant._warnings import warn_user
from pliant.methods._core.filters import Filter
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.reinitializer import Reinitializer, Steps
from pliant.methods._core.surgery import forget_state_, reset_steps_, state_tensors, zero_moments_

Fate = Literal["zero", "keep"]


def reset_state_(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], moments: Fate, step: Fate) -> None:
    """Reset the optimizers' moments or step counts of these parameters, or both.

    Args:
        optimizers: The optimizers.
        parameters: The parameters.
        moments: "zero" or "keep".
        step: "zero" or "keep".

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> optimizer = torch.optim.Adam([weight])
        >>> optimizer.step()
        >>> reset_state_([optimizer], [weight], moments="keep", step="zero")
        >>> optimizer.state[weight]["step"], optimizer.state[weight]["exp_avg"]
        (tensor(0.), tensor([0.1000, 0.1000]))
    """
    if moments == step == "zero":
        forget_state_(optimizers, parameters)
    elif step == "zero":
        reset_steps_(optimizers, parameters)
    else:
        for parameter in parameters:
            zero_moments_(optimizers, parameter, torch.ones((), dtype=torch.bool, device=parameter.device))


class OptimizerReset(Reinitializer):
    """Reset the optimizer's state, on `apply()`.

    Args:
        model: The model, whose weights stay.
        moments: "zero" or "keep" the averages of gradients.
        step: "zero" or "keep" the step counts. With moments="keep" this is Adam-Rel.
        where: The parameters whose state to reset; all learnable ones if None.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "optimizer_reset"
    action: ClassVar[str] = "reset optimizer state"
    sharding: Sharding = "entries"

    def __init__(
        self,
        model: nn.Module,
        *,
        moments: Fate = "zero",
        step: Fate = "zero",
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        check_choice("moments", moments, get_args(Fate))
        check_choice("step", step, get_args(Fate))
        if moments == step == "keep":
            raise ValueError("moments and step: both are 'keep', so there is nothing to reset; set one to 'zero'")
        super().__init__(model, optimizer_state="reset", where=where, at=at, every=every)
        self.moments: Fate = moments
        self.step_count: Fate = step

    def _act(
        self, optimizers: Sequence[Optimizer], batches: Batches | None, loss_fn: LossFunction | None
    ) -> tuple[int, int, dict[str, Any]]:
        parameters = list(self._free().values())
        zeroed = {True: self.moments == "zero", False: self.step_count == "zero"}  # step counts have no dimension
        reset = [tensor for tensor in state_tensors(optimizers, parameters) if zeroed[tensor.ndim > 0]]
        if optimizers and not reset:
            warn_user(f"{self.name}.apply() reset nothing: the optimizer keeps no such state of the parameters yet")
        reset_state_(optimizers, parameters, self.moments, self.step_count)
        return len(reset), sum(tensor.numel() for tensor in reset), {}

    def _check_state(self, optimizers: Sequence[Optimizer]) -> None:
        if self.step_count == "keep":
            for parameter in self._free().values():
                zero_moments_(optimizers, parameter, torch.zeros((), dtype=torch.bool, device=parameter.device))

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        raise AssertionError("the weights stay")
