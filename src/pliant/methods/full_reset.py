"""Full reset: re-draw the whole network when data is new, which is training from scratch (FIRE paper, §4).

θ ← θ', where θ' is drawn from each module's own initial distribution.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pliant._validation import check_seed
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init, bare_modules, check_redrawable, redraw_, seeded
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer, Steps


class FullReset(Reinitializer):
    """Re-draw all learnable parameters from their initial distribution, on `apply()`.

    Args:
        model: The model.
        optimizer_state: "reset" (default: a fresh network has no history) or "keep" the moments.
        init: A function that initializes the model in place, run after every module's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which parameters to re-draw; all learnable ones if None. Buffers of the modules that own a re-drawn
            parameter, such as running statistics, are reset too. Without `where`, so are the buffers of modules
            without parameters.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.

    Example:
        >>> def init(model: nn.Module) -> None:
        ...     for parameter in model.parameters():
        ...         nn.init.constant_(parameter, 0.5)
        >>> model = nn.Linear(2, 1)
        >>> receipt = FullReset(model, init=init, optimizer_state="keep").apply()
        >>> model.weight.data
        tensor([[0.5000, 0.5000]])
    """

    name = "full_reset"
    takes_complex: ClassVar[bool] = True
    saved: ClassVar[tuple[str, ...]] = ("draws",)

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer_state: OptimizerState = "reset",
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        super().__init__(model, optimizer_state=optimizer_state, where=where, at=at, every=every)
        check_redrawable(model, init, self.parameters)
        self._bare = bare_modules(model) if where is None else []
        self.init = init
        self.seed = check_seed(seed)
        self.draws = 0

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        with seeded(self.seed, self.draws):
            redraw_(self.model, self._free(), self.init, self._bare)
        self.draws += 1
        return {}
