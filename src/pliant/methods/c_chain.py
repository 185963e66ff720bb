"""C-CHAIN: reduce churn, the change of outputs that a step causes on other inputs (Tang et al. 2025).

Paper: "Mitigating plasticity loss in continual reinforcement learning by reducing churn". The term is

    λ·mean (f_θ(x) − f_θ′(x))²,

where θ′ are the parameters before the last step, and x are inputs that neither that step nor the present one learns
from. Its gradient pulls the outputs on x back to where they were.

Where we deviate. The authors draw x from the replay buffer or the rollout. Here `reference` may give x; by default x
are the inputs of two steps ago. The model computes f in eval mode.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pliant._validation import check_number, check_positive_int
from pliant.distributed import rank_count, sum_over_ranks
from pliant.methods._core.filters import Filter
from pliant.methods._core.function_penalty import FunctionPenalty, Pass, call_on
from pliant.running import split_example


def mean_square(output: Any, before: Any) -> Tensor:
    """Return the mean squared difference of two outputs, over all their floating-point entries.

    Example:
        >>> mean_square(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        tensor(2.)
    """
    pairs = [
        (new, old)
        for new, old in zip(tree_leaves(output), tree_leaves(before), strict=True)
        if isinstance(new, Tensor) and new.is_floating_point()
    ]
    total = torch.stack([(new - old).square().sum() for new, old in pairs]).sum()
    mean: Tensor = total / sum(new.numel() for new, _ in pairs)
    return mean


class CChain(FunctionPenalty):
    """Pull the outputs on other inputs back to what they were before the last step.

    Args:
        model: The model.
        lam: λ; with `ratio`, the first λ.
        reference: Returns the inputs x at each step: a tensor, a tuple of arguments or a dictionary of keyword
            arguments. By default, x are the inputs of two steps ago.
        ratio: If given, λ becomes ratio·mean|loss|/mean(churn) over the last `window` steps. The loop must tell the
            loss of every step: `method.see_loss(loss)`.
        window: The number of steps for `ratio`.
        where: Which parameters get the term's gradient; all learnable ones if None.
    """

    name = "c_chain"
    lag: ClassVar[int] = 2
    pins_placement: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ("current", "previous", "lam", "losses", "churns")

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: float = 1.0,
        reference: Callable[[], Any] | None = None,
        ratio: float | None = None,
        window: int = 100,
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, lam=lam, where=where)
        self.reference = reference
        self.ratio = None if ratio is None else check_number("ratio", ratio)
        self.window = check_positive_int("window", window)
        self.current = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.previous = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.losses: list[float] = []
        self.churns: list[float] = []

    def see_loss(self, loss: Tensor | float) -> None:
        """Tell the loss of a step, for `ratio`; before the optimizer's step. Synchronizes the device."""
        self.losses = [*self.losses, self._mean_over_ranks(abs(float(loss)))][-self.window :]

    def penalty(self, passes: Sequence[Pass]) -> Tensor:
        """Return the mean squared change of the outputs since the step before, the mean over the passes."""
        terms = []
        for inputs in passes:
            with torch.no_grad():
                before = call_on(self.model, self.previous, inputs)
            terms.append(mean_square(call_on(self.model, {}, inputs), before))
        return torch.stack(terms).mean()

    def _inputs(self) -> list[Pass]:
        return super()._inputs() if self.reference is None else (self._history or [[]])[-1]

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        if found_inf is not None and bool(found_inf):
            self._passes = []
            return
        if self.reference is not None:
            self._passes, self._observed = [split_example(self.reference())], False
        super()._observe(gradients, scale, found_inf)
        names = list(gradients)
        torch._foreach_copy_([self.previous[name] for name in names], [self.current[name] for name in names])
        torch._foreach_copy_([self.current[name] for name in names], [self.parameters[name].detach() for name in names])
        if self.ratio is not None and self.losses and self._inputs():
            with torch.no_grad():
                churn = self._mean_over_ranks(float(self._evaluate(self._inputs())))
            self.churns = [*self.churns, churn][-self.window :]
            self.lam = self.ratio * _mean(self.losses) / (_mean(self.churns) + 1e-8)

    def _mean_over_ranks(self, value: float) -> float:
        (total,) = sum_over_ranks([torch.tensor(value, dtype=torch.float64)], self.group)
        return float(total) / rank_count(self.group)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
