"""Wasserstein regularization: keep the distribution of each tensor's values near the initial one.

Paper: Lewandowski et al. 2023, "Directions of Curvature as an Explanation for Loss of Plasticity", §5. The term is the
squared 2-Wasserstein distance between the current and the initial values of each parameter tensor, with λ in front:

    Σ_l Σ_i (θ_(i) − θ⁰_(i))²,

where θ_(i) is the i-th smallest entry. Each entry is pulled towards the initial value of equal rank:
∂/∂θ_j = 2(θ_j − θ⁰_(rank of j)). A layer's weight and bias are separate tensors.

Two terms have this name. `reduction="sum"` is the paper's; `reduction="mean"` divides each tensor's sum by its size.

The sort dominates the cost (_core/sorting.py). With `refresh=n` only every n-th step sorts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from pliant._validation import check_choice, check_positive_int
from pliant.anatomy.parameters import members, stack_dims
from pliant.methods._core.filters import Filter, Strength
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.penalty import Penalty, add_scaled_, half_squared_norm
from pliant.methods._core.sorting import batches, rank_order
from pliant.methods._core.stored import keep_initial

Reduction = Literal["sum", "mean"]


def match_order(values: Sequence[Tensor], ordered: Sequence[Tensor]) -> list[Tensor]:
    """Return for each entry the value of equal rank in an ordered vector: its target under optimal transport.

    Args:
        values: The tensors.
        ordered: For each tensor, as many values in ascending order.

    Example:
        >>> match_order([torch.tensor([[3.0, -1.0], [0.0, 9.0]])], [torch.tensor([1.0, 2.0, 3.0, 4.0])])
        [tensor([[3., 1.],
                [2., 4.]])]
    """
    vectors = [each.flatten() for each in values]
    matched: list[Tensor] = []
    for part in batches(vectors):
        parts = [each.flatten() for each in ordered[part]]
        targets = parts[0] if len(parts) == 1 else torch.cat(parts)
        placed = torch.empty_like(targets).scatter_(0, rank_order(*vectors[part]), targets)
        matched += torch.split(placed, [len(each) for each in parts])
    return [each.view(value.shape) for each, value in zip(matched, values, strict=True)]


class WassersteinRegularization(Penalty):
    """Pull the sorted values of each tensor towards the sorted values that it had at construction.

    Args:
        model: The model; its current values are θ⁰.
        lam: λ, one number for all parameters or one per name pattern.
        reduction: "sum" over a tensor's entries (the paper's) or their "mean".
        refresh: Sort only on every n-th step; 1 is exact.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which parameters to penalize; all learnable ones if None. The padding row of an embedding is penalized
            like the others, and moves.
        store: Whether to keep the initial values in "full" or rounded to "bf16".

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        >>> penalty = WassersteinRegularization(model, lam=0.5)
        >>> _ = model.weight.data.copy_(torch.tensor([[4.0, 1.0]]))
        >>> round(float(penalty.value()), 4)  # ½·((1 − 1)² + (4 − 2)²)
        2.0
    """

    name = "wasserstein"
    sharding: Sharding = "owned"
    saved: ClassVar[tuple[str, ...]] = ("ordered", "targets", "ages")

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 5e-3,
        reduction: Reduction = "sum",
        refresh: int = 1,
        schedule: Schedule = "constant",
        where: Filter | None = None,
        store: Literal["full", "bf16"] = "full",
    ) -> None:
        super().__init__(model, lam=lam, schedule=schedule, where=where)
        check_choice("store", store, ("full", "bf16"))
        check_choice("reduction", reduction, get_args(Reduction))
        self.reduction = reduction
        self.refresh = check_positive_int("refresh", refresh)
        self.store = store
        initial = keep_initial(model, {name: self.parameters[name] for name in self.strengths}, store)
        self._stacked = {name: stack_dims(model, name, self.parameters[name]) for name in self.strengths}
        self._sizes = {name: self._members(name, values)[0].numel() for name, values in initial.items()}
        self.ordered = {name: self._sorted(name, values) for name, values in initial.items()}
        self.targets = initial if refresh > 1 else {}
        if refresh > 1:
            self.sharding = "whole"  # the targets change
        self.ages = dict.fromkeys(self.targets, 0)

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ Σ_l Σ_i (θ_(i) − θ⁰_(i))², with the ranks of the last sort if `refresh` is above 1."""
        return half_squared_norm(self._distances(self.parameters if names is None else names), self._factors())

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        names = [name for name in gradients if name in self.targets]
        due = [name for name in names if self.ages[name] % self.refresh == 0]
        if due:
            self.targets |= zip(due, self._matched(due), strict=True)
        for name in names:
            self.ages[name] += 1

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        add_scaled_(gradients, self._distances(gradients), self._factors(), scale)

    def _members(self, name: str, tensor: Tensor) -> list[Tensor]:
        return members(tensor, self._stacked[name])

    def _sorted(self, name: str, values: Tensor) -> Tensor:
        """Return a tensor's values sorted, in its shape; in a stack, each member is sorted by itself."""
        return torch.cat([member.flatten().sort().values for member in self._members(name, values)]).view(values.shape)

    def _matched(self, names: Sequence[str]) -> list[Tensor]:
        """Return the target of each entry of these parameters; the members of a stack are matched one by one."""
        values = [self.parameters[name].detach() for name in names]
        parts = [self._members(name, value) for name, value in zip(names, values, strict=True)]
        ordered = [member for name in names for member in self._members(name, self.ordered[name])]
        matched = iter(match_order([member for part in parts for member in part], ordered))
        return [
            torch.stack([next(matched) for _ in part]).view(value.shape) if self._stacked[name] else next(matched)
            for name, part, value in zip(names, parts, values, strict=True)
        ]

    def _factors(self) -> dict[str, float]:
        """Return 2λ of each tensor, divided by the size of a member for the mean."""
        sizes = self._sizes if self.reduction == "mean" else {}
        return {name: 2 * strength / sizes.get(name, 1) for name, strength in self.strengths.items()}

    def _distances(self, names: Iterable[str]) -> dict[str, Tensor]:
        chosen = [name for name in names if name in self.strengths]
        if not chosen:  # torch's foreach functions reject empty lists
            return {}
        values = [self.parameters[name].detach() for name in chosen]
        targets = [self.targets[name] for name in chosen] if self.targets else self._matched(chosen)
        return dict(zip(chosen, torch._foreach_sub(values, targets), strict=True))
