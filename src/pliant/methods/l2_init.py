"""L2 Init, or regenerative regularization: λ/2 ‖θ − θ₀‖² in the loss (Kumar et al. 2023; SWR paper, D.2).

Other code uses the name for other terms. Here the distance is squared, has the factor ½ and covers all learnable
parameters. The authors leave norm layers out; `where=lambda name, p: p.ndim > 1` leaves out norm layers and biases.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from pliant._validation import check_seed
from pliant.methods._core.filters import Filter, Strength
from pliant.methods._core.learning_rate import Schedule
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.penalty import Penalty, add_scaled_, half_squared_norm
from pliant.methods._core.stored import Store, draw_initial, keep_initial


def l2_init_penalty(
    parameters: Mapping[str, Tensor], initial: Mapping[str, Tensor], strengths: Mapping[str, float]
) -> Tensor:
    """Return Σ λ/2 ‖θ − θ₀‖², whose gradient is λ(θ − θ₀).

    Args:
        parameters: θ by name.
        initial: θ₀ by name; a parameter without one is left out.
        strengths: λ by name.

    Example:
        >>> l2_init_penalty({"weight": torch.tensor([3.0])}, {"weight": torch.tensor([1.0])}, {"weight": 0.5})
        tensor(1.)
    """
    distances = {name: theta - initial[name] for name, theta in parameters.items() if name in initial}
    return half_squared_norm(distances, strengths)


class L2Init(Penalty):
    """Pull every learnable parameter towards its value at construction.

    Args:
        model: The model; its current values are θ₀.
        lam: λ, one number for all parameters or one per name pattern.
        schedule: "constant" λ, or "coupled": λ·lr/lr₀, where lr₀ is the learning rate at the start.
        where: Which parameters to penalize; all learnable ones if None.
        store: How to keep θ₀: in "full", rounded to "bf16", or as the "seed" that it is drawn from at every step.
        seed: For store="seed", the seed before the model was made: `torch.manual_seed(seed); model = Model()`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> penalty = L2Init(model, lam=0.5)
        >>> _ = model.weight.data.add_(2.0)
        >>> model.weight.grad = torch.zeros(1, 1)
        >>> penalty.step()
        >>> model.weight.grad.round(decimals=4)
        tensor([[1.]])
    """

    name = "l2_init"
    sharding: Sharding = "entries"
    takes_complex: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ("initial",)

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1e-2,
        schedule: Schedule = "constant",
        where: Filter | None = None,
        store: Store = "full",
        seed: int | None = None,
    ) -> None:
        super().__init__(model, lam=lam, schedule=schedule, where=where)
        self.store = store
        self._seed = check_seed(seed)
        self.initial = keep_initial(model, {name: self.parameters[name] for name in self.strengths}, store, seed)

    @torch.no_grad()
    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return Σ λ/2 ‖θ − θ₀‖²."""
        chosen = self.parameters if names is None else {name: self.parameters[name] for name in names}
        terms = [l2_init_penalty(chosen, initial, self.strengths) for initial in self._parts_of_initial()]
        return sum(terms[1:], start=terms[0]) if terms else torch.zeros(())

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        for initial in self._parts_of_initial():
            part = gradients if self.initial else {name: g for name, g in gradients.items() if name in initial}
            add_scaled_(part, self.parameters, self.strengths, scale, initial)

    def _parts_of_initial(self) -> Iterable[Mapping[str, Tensor]]:
        """Return θ₀, in parts if it is drawn again."""
        if self.store != "seed":
            return (self.initial,)
        assert self._seed is not None
        return draw_initial(self.model, {name: self.parameters[name] for name in self.strengths}, self._seed)
