"""Shrink & perturb: move the weights part of the way back when data is new (Ash & Adams 2020).

Three rules have this name. `toward` selects one:

- "initial" (default): θ ← (1−λ)θ + λθ₀ with the stored initial values (SWR paper D.2, FIRE A.3, Hare & Tortoise);
- "fresh": θ ← (1−λ)θ + λθ' with θ' drawn from the initial distribution;
- "noise": θ ← (1−λ)θ + ε with ε ~ N(0, noise_std²), the original form (DASH uses 1−λ = 0.3, noise_std = 0.01).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from pliant._validation import check_choice, check_number, check_seed
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init, check_redrawable, draw_fresh, draw_normal, seeded
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer, Steps
from pliant.methods._core.stored import Store, draw_initial, keep_initial

Toward = Literal["initial", "fresh", "noise"]


def shrink_toward_(parameters: list[Tensor], targets: list[Tensor], lam: float) -> None:
    """Move the parameters towards targets in place: θ ← (1−λ)θ + λ·target.

    Args:
        parameters: θ.
        targets: The target of each parameter.
        lam: λ, from 0 (stay) to 1 (arrive).

    Example:
        >>> theta = torch.tensor([4.0])
        >>> shrink_toward_([theta], [torch.tensor([0.0])], 0.25)
        >>> theta
        tensor([3.])
    """
    torch._foreach_lerp_(parameters, targets, lam)  # leaves a parameter that equals its target exactly unchanged


def shrink_and_add_(parameters: list[Tensor], noise: list[Tensor], lam: float) -> None:
    """Shrink the parameters and add noise in place: θ ← (1−λ)θ + ε.

    Args:
        parameters: θ.
        noise: ε of each parameter.
        lam: λ, the share of the old values to give up.

    Example:
        >>> theta = torch.tensor([4.0])
        >>> shrink_and_add_([theta], [torch.tensor([0.5])], 0.25)
        >>> theta
        tensor([3.5000])
    """
    torch._foreach_mul_(parameters, 1 - lam)
    torch._foreach_add_(parameters, noise)


class ShrinkPerturb(Reinitializer):
    """Shrink and perturb the learnable parameters, on `apply()`.

    Args:
        model: The model; its current values are θ₀.
        lam: λ in [0, 1], the share of the old weights to give up.
        toward: "initial", "fresh" or "noise".
        noise_std: The standard deviation of the noise, for toward="noise".
        optimizer_state: "keep" (as in the papers) or "reset" the moments of the parameters.
        init: A function that initializes the model in place, run after every module's own `reset_parameters`, for
            toward="fresh".
        store: For toward="initial", how to keep θ₀: in "full", rounded to "bf16", or as the "seed" that it is drawn
            from at every action.
        seed: The seed of a private random stream. None draws from torch's global generators. For store="seed", the
            seed before the model was made: `torch.manual_seed(seed); model = Model()`.
        where: Which parameters to move; all learnable ones if None. Buffers stay. Noise is also added to the padding
            row of an embedding.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "shrink_perturb"
    takes_complex: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ("initial", "draws")
    sharding: Sharding = "norms"

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: float = 0.8,
        toward: Toward = "initial",
        noise_std: float = 0.01,
        optimizer_state: OptimizerState = "keep",
        init: Init | None = None,
        store: Store = "full",
        seed: int | None = None,
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        super().__init__(model, optimizer_state=optimizer_state, where=where, at=at, every=every)
        self.lam = check_number("lam", lam, high=1.0)
        check_choice("toward", toward, get_args(Toward))
        self.toward = toward
        self.noise_std = check_number("noise_std", noise_std)
        if toward == "fresh":
            check_redrawable(model, init, self.parameters)
            self.sharding = "whole"  # modules draw whole parameters
        self.init = init
        self.seed = check_seed(seed)
        self.draws = 0
        self.store = store
        self.initial = keep_initial(model, self.parameters if toward == "initial" else {}, store, self.seed)

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        parameters: list[Tensor] = list(self.parameters.values())
        with seeded(self.seed, self.draws):
            if self.toward == "noise":
                noise = [each.mul_(self.noise_std) for each in draw_normal(parameters)]
                shrink_and_add_(parameters, noise, self.lam)
            elif self.toward == "initial" and self.store == "seed":
                assert self.seed is not None
                for targets in draw_initial(self.model, self.parameters, self.seed):
                    shrink_toward_([self.parameters[name] for name in targets], list(targets.values()), self.lam)
            else:
                targets = self.initial if self.toward == "initial" else draw_fresh(self.model, self.init)
                # The model may have been cast or moved since the targets were stored.
                shrink_toward_(parameters, [targets[name].to(p) for name, p in self.parameters.items()], self.lam)
        self.draws += 1
        return {}
