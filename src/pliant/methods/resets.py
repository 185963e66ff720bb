"""Resets: re-draw the head (Nikishin et al. 2022; SWR paper D.2) or everything (FIRE §4) when data is new."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from pliant._validation import check_seed
from pliant.anatomy.layers import called_layers, classifier_names
from pliant.methods._core.initial import Init, bare_modules, check_redrawable, redraw_, seeded
from pliant.methods._core.method import Batches, Filter, LossFunction
from pliant.methods._core.naming import check_modules
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer
from pliant.methods._core.selection import learnable_parameters


class FullReset(Reinitializer):
    """Re-draw all learnable parameters from their initial distribution, on `apply()`.

    Args:
        model: The model.
        optimizer_state: "reset" (default: a fresh network has no history) or "keep" the moments.
        init: What else initializes a model in place, after each module's own `reset_parameters`.
        seed: Draw from a stream of its own; from torch's global generators if None.
        where: Which parameters to re-draw; all learnable ones if None. Running statistics of the norm layers
            that are re-drawn start anew too, and without `where` those of norm layers that have no parameters.
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
    ) -> None:
        super().__init__(model, optimizer_state=optimizer_state, where=where)
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


class HeadReset(FullReset):
    """Re-draw the head: the fully connected tail, or only the last layer of a fully connected network.

    Args:
        model: The model.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), from which the
            head is found. Not needed if `head` is given.
        head: The head's modules by name, if the tail is not what you mean: of several heads of a fully connected
            network (an actor's mean and deviation) it is the one that is called last.
        optimizer_state: "reset" (default) or "keep" the moments of the head.
        init: What else initializes a model in place, after each module's own `reset_parameters`.
        seed: Draw from a stream of its own; from torch's global generators if None.
    """

    name = "head_reset"

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        head: Sequence[str] | None = None,
        optimizer_state: OptimizerState = "reset",
        init: Init | None = None,
        seed: int | None = None,
    ) -> None:
        learnable_parameters(model)  # An error that names what a model lacks, before anything looks into it.
        if head is None:
            if example is None:
                raise ValueError("example: None, and no head is named; pass an example input or head=[module names]")
            head = classifier_names(called_layers(model, example))
        ours = {id(p) for name in check_modules("head", model, head) for p in model.get_submodule(name).parameters()}
        super().__init__(model, optimizer_state=optimizer_state, init=init, seed=seed, where=lambda _, p: id(p) in ours)
        self.head = tuple(head)
        self._bare = bare_modules(model, self.head)
