"""Shrink: multiply all weights by one factor when data is new.

Paper: "Recovering Plasticity of Neural Networks via Soft Weight Rescaling", §3.2 and figure 1. A network with smaller
weights learns new data better. If the biases follow (theorem 1), the outputs are only multiplied by a constant. Each
weight is multiplied by 1 − λ. Where layers join, the factor is the nearest one to 1 − λ that keeps the function.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pliant._validation import check_number
from pliant.anatomy.export import GraphError
from pliant.anatomy.plan import BlockTensors
from pliant.anatomy.rescaling import analyze
from pliant.methods._core.filters import Filter, check_not_frozen
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer, Steps


def rescaling_factors(matrix: Tensor, chosen: Tensor, lam: float) -> Tensor:
    """Return exp(M·c·log(1 − λ)), the factor of each tensor that a rescaling plan writes.

    Args:
        matrix: M, the plan's map from log factors of weights to log factors of all tensors that must follow.
        chosen: c, 1 for each weight to shrink and 0 for the others.
        lam: λ.

    Example:
        >>> matrix = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # two weights, and the bias of the second
        >>> rescaling_factors(matrix, torch.tensor([1.0, 1.0]), 0.5)
        tensor([0.5000, 0.5000, 0.2500])
    """
    return (matrix @ (chosen * math.log1p(-lam))).exp()


class Shrink(Reinitializer):
    """Multiply the weights by 1 − λ, on `apply()`.

    Args:
        model: The model.
        example: An example input on which the model is analyzed: a tensor, a tuple of arguments or a dictionary of
            keyword arguments.
        lam: λ in [0, 1), the share of each weight to give up.
        proportional: Whether the other parameters follow, so that the outputs are only multiplied by a constant. If
            not, only the weights shrink and the function changes.
        optimizer_state: "keep" or "reset" the moments of the parameters.
        where: Which weights to shrink; all if None. Parameters that must follow them are rescaled in any case.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "shrink"

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        lam: float = 0.5,
        proportional: bool = True,
        optimizer_state: OptimizerState = "keep",
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        super().__init__(model, optimizer_state=optimizer_state, at=at, every=every)
        self.lam = check_number("lam", lam, high=1.0, below=True)  # 1 would erase the weights
        if example is None:
            raise ValueError(f"example: None, but {self.name} analyzes the model on one; pass an example input")
        try:
            scales = analyze(model, example)
        except GraphError as error:
            raise GraphError(f"{error} Shrink & perturb needs no graph.") from error
        plan = scales.plan()
        if proportional and not plan.wishes:
            raise ValueError(
                "model: no weight can be rescaled without changing the function; see pliant.anatomy.analyze"
            )
        weights = [scales.blocks[number] for number in sorted(scales.system.weights)]
        learnable = [block for block in weights if model.get_parameter(block.name).requires_grad]
        names = [block.name for block in (plan.wishes if proportional else learnable)]
        self._weights = [model.get_parameter(name) for name in names]
        self._chosen = [where is None or where(name, p) for name, p in zip(names, self._weights, strict=True)]
        self._matrix = plan.matrix if proportional else torch.eye(len(learnable), dtype=torch.float64)
        self._blocks = plan.targets if proportional else learnable
        self._tensors = BlockTensors(model, self._blocks)
        self._shrunk: list[nn.Parameter] = []

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        # Weights that were frozen after construction do not shrink.
        chosen = [c and weight.requires_grad for c, weight in zip(self._chosen, self._weights, strict=True)]
        factors = rescaling_factors(self._matrix, torch.tensor(chosen, dtype=torch.float64), self.lam).tolist()
        followers = [(str(self._blocks[row]), p) for row, p in self._tensors.parameters() if factors[row] != 1]
        check_not_frozen(self.name, followers)
        for tensor, factor in zip(self._tensors.get(), factors, strict=True):
            tensor.mul_(factor)
        self._shrunk = [parameter for _, parameter in followers]
        return {}

    def _rewritten(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(self._shrunk))
