"""Shrink all weights by one factor when data is new, with or without care for the function.

Paper: "Recovering Plasticity of Neural Networks via Soft Weight Rescaling", §3.2 and figure 1: a network whose weights
are scaled down learns on better than one left alone, and if its biases follow (theorem 1), it loses nothing at that
moment. Each weight is multiplied by 1 − λ, or comes as near to it as the function allows where layers join.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pliant._validation import check_number
from pliant.anatomy.export import GraphError
from pliant.anatomy.plan import BlockTensors
from pliant.anatomy.rescaling import analyze
from pliant.methods._core.method import Batches, Filter, LossFunction
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer
from pliant.methods._core.selection import check_not_frozen


class Shrink(Reinitializer):
    """Multiply the weights by 1 − λ, on `apply()`.

    Args:
        model: The model.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), on which the model is
            analyzed.
        lam: λ in [0, 1), how much of each weight to give up.
        proportional: Whether the other parameters follow, so that the output is only multiplied by a constant. If
            not, the weights shrink alone, and the function changes with them.
        optimizer_state: "keep" or "reset" the moments of the parameters.
        where: Which weights to shrink; all if None. What must follow them is written all the same.
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
    ) -> None:
        super().__init__(model, optimizer_state=optimizer_state)
        self.lam = check_number("lam", lam, high=1.0, below=True)  # with 1 nothing would be left of the weights
        if example is None:
            raise ValueError(f"example: None, but {self.name} analyses the model on one; pass an example input")
        try:
            scales = analyze(model, example)
        except GraphError as error:
            raise GraphError(f"{error} Shrink & perturb needs no graph.") from error
        plan = scales.plan()
        if proportional and not plan.wishes:
            raise ValueError(
                "model: no weight can be rescaled without changing the function; see pliant.anatomy.analyze"
            )
        everything = [scales.blocks[number] for number in sorted(scales.system.weights)]
        free = [block for block in everything if model.get_parameter(block.name).requires_grad]
        owners = [block.name for block in (plan.wishes if proportional else free)]
        chosen = [where is None or where(name, model.get_parameter(name)) for name in owners]
        self._wish = torch.tensor([math.log1p(-lam) if one else 0.0 for one in chosen], dtype=torch.float64)
        self._matrix = plan.matrix if proportional else torch.eye(len(free), dtype=torch.float64)
        targets = plan.targets if proportional else free
        self._written = BlockTensors(model, targets)
        self._wished = [model.get_parameter(name) for name in owners]
        self._blocks = targets
        self._shrunk: list[nn.Parameter] = []

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        # A weight that was frozen since is not shrunk.
        wish = self._wish * torch.tensor([weight.requires_grad for weight in self._wished])
        log_factors = self._matrix @ wish
        followers = [(str(self._blocks[row]), p) for row, p in self._written.parameters() if log_factors[row]]
        check_not_frozen(self.name, followers)
        for tensor, factor in zip(self._written.get(), log_factors.exp().tolist(), strict=True):
            tensor.mul_(factor)
        self._shrunk = [parameter for _, parameter in followers]
        return {}

    def _rewritten(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(self._shrunk))
