"""Weight rescaling: set the standard deviation of every weight back to its initial one (Niehaus et al. 2024).

Paper: "Weight Rescaling: Applying Initialization Strategies During Training". Every n steps, W ← W·std(W₀)/std(W).
Biases are not rescaled, so the function of the network changes. SWR with λ = 1 rescales norms and keeps the function.

Where we deviate. The paper uses the standard deviation of the initializer's distribution. Here it is the standard
deviation of the weight at construction, which also works for weights that were initialized in other ways.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import widen
from pliant._warnings import warn_user
from pliant.anatomy.parameters import stack_dims
from pliant.distributed import held, is_shard, sum_shards
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.attachment import Attachment, check_timing, count_step, found_inf_of
from pliant.methods._core.filters import Filter, having_role, warn_of_computed
from pliant.methods._core.method import Receipt
from pliant.methods._core.on_ranks import Sharding


def standard_deviation(weight: Tensor, stacked: int = 0) -> Tensor:
    """Return the standard deviation of a tensor's entries about their mean, in float32 at least.

    Args:
        weight: The tensor.
        stacked: The number of leading dimensions that count the members of a stack, each with a deviation of its own.

    Example:
        >>> standard_deviation(torch.tensor([[1.0, 3.0]]))
        tensor(1.)
    """
    wide = widen(weight)
    if stacked:
        inner = tuple(range(stacked, weight.ndim))
        return wide.std(inner, correction=0, keepdim=True)
    deviation: Tensor = (wide - wide.mean()).norm() / wide.numel() ** 0.5
    return deviation


def rescaling_factor(goal: Tensor, now: Tensor) -> Tensor:
    """Return the factor that gives a weight a size, goal/now; 1 if it has none now, or if the goal is zero.

    Args:
        goal: The size to reach: a standard deviation or a norm.
        now: The size of the weight now.

    Example:
        >>> rescaling_factor(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0]))
        tensor([0.5000, 1.0000])
    """
    factor = goal / now
    return torch.where((factor > 0) & factor.isfinite(), factor, 1)


def deviations_of_shards(shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the standard deviations of whole weights, of which this rank holds shards, by one collective.

    Each shard adds its Σx and its Σx², the latter from the deviations about its own mean, which float32 holds well.
    """
    wide = [widen(shard) for shard in shards]
    moments = []
    for each in wide:
        count, total = max(each.numel(), 1), each.sum().double()
        squares = (each - (total / count).to(each)).norm().double() ** 2 + total**2 / count
        moments.append(torch.stack([total, squares]))
    deviations = []
    for each, shard, (total, squares) in zip(wide, shards, sum_shards(moments, shards), strict=True):
        count = held(shard).numel()
        deviations.append((squares / count - (total / count) ** 2).clamp_min(0).sqrt().to(each))
    return deviations


class WeightRescaling(AfterStep):
    """Scale every weight to its initial standard deviation, every n steps.

    Args:
        model: The model; its weights' present standard deviations are kept.
        every: Act only on every n-th step.
        first: The step of the first action, counted from 1; `every` if None. If tasks last a multiple of `every`
            steps, `first` shifts the actions away from the ends of tasks.
        where: Which weights to rescale; all learnable ones if None. Biases and norm layers are left alone.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 3.0]]))
        >>> method = WeightRescaling(model)
        >>> _ = model.weight.data.copy_(torch.tensor([[0.0, 4.0]]))
        >>> method.step()
        >>> model.weight.data
        tensor([[0., 2.]])
    """

    name = "weight_rescaling"
    sharding: Sharding = "norms"
    saved: ClassVar[tuple[str, ...]] = ("initial",)
    _unsized: ClassVar[str] = "constant"

    def __init__(
        self, model: nn.Module, *, every: int = 1, first: int | None = None, where: Filter | None = None
    ) -> None:
        super().__init__(model, where=having_role(model, where, "matrix"))
        warn_of_computed(self.name, model, self.parameters)
        self.every, self.first = check_timing(every, first)
        self._stacked = {name: stack_dims(model, name, p) for name, p in self.parameters.items()}
        if any(self._stacked.values()):
            self.sharding = "whole"  # a shard may cut through the members of a stack
        self.initial = dict(zip(self.parameters, self._sizes(list(self.parameters)), strict=True))
        self._last: dict[str, Tensor] = {}
        constant = [name for name, deviation in self.initial.items() if not deviation.any()]
        if constant:
            warn_user(f"{self.name} leaves these weights alone, they start {self._unsized}: {', '.join(constant)}")

    def _sizes(self, names: Sequence[str]) -> list[Tensor]:
        """Return the present sizes of weights, which are to become the initial ones again."""
        weights: list[Tensor] = [self.parameters[name].detach() for name in names]
        if any(is_shard(self.parameters[name]) for name in names):
            return deviations_of_shards([self.parameters[name] for name in names])
        return [standard_deviation(weight, self._stacked[name]) for name, weight in zip(names, weights, strict=True)]

    def step(self) -> None:
        """Rescale once, all weights."""
        count_step(self.steps)
        self._rescale(tuple(self.parameters), None)

    @property
    def receipt(self) -> Receipt | None:
        """The factors of the last rescaling, and the number of steps."""
        if not self._last:
            return None
        factors = {
            name: factor.flatten().tolist() if factor.ndim else float(factor) for name, factor in self._last.items()
        }
        entries = sum(self.parameters[name].numel() for name in factors)
        details = {"factors": factors, "steps": sum(self.steps)}
        return Receipt(self.name, "rescale", len(factors), entries, details)

    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        self._rescale(attachment.names, found_inf_of(optimizer))

    @torch.no_grad()
    def _rescale(self, names: Sequence[str], found_inf: Tensor | None) -> None:
        names = [name for name in names if self.parameters[name].requires_grad]  # the others were frozen
        if not names:
            return
        sizes = zip(names, self._sizes(names), strict=True)
        factors = [rescaling_factor(self.initial[name], size) for name, size in sizes]
        if found_inf is not None:
            factors = [torch.where(found_inf == 0, factor, 1) for factor in factors]
        torch._foreach_mul_([self.parameters[name] for name in names], factors)
        self._last = dict(zip(names, factors, strict=True))
