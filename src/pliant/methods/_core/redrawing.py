"""Recyclers that draw new weights from each layer's own initial distribution."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from pliant._validation import check_seed
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import Init, check_redrawable, draw_fresh, library_init, seeded
from pliant.methods._core.recycler import Recycler


class RedrawingRecycler(Recycler):
    """A recycler whose new weights come from the initial distribution of their layer.

    Args:
        model: The model.
        example: An example input, from which the units are found.
        init: A function that initializes a layer in place, run after the layer's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which layers' units to renew, as a predicate on the name and value of their weight; all if None.
    """

    saved: ClassVar[tuple[str, ...]] = ("renewals", "draws")

    def __init__(
        self, model: nn.Module, example: Any, *, init: Init | None, seed: int | None, where: Filter | None
    ) -> None:
        super().__init__(model, example, where=where)
        check_redrawable(model, init, [w.tensor for group in self.groups.values() for w in group.weights], whole=False)
        self.init = init
        self.seed = check_seed(seed)
        self.draws = 0

    def _renew(self, chosen: Mapping[str, Tensor]) -> None:
        """Renew the chosen units of each layer.

        Args:
            chosen: For each unit of a layer, whether it is renewed, by layer.
        """
        self._moments_cleared.clear()
        self._chosen = dict(chosen)
        with seeded(self.seed, self.draws):
            for name, units in chosen.items():
                self._rewrite(name, units, [self._draw(weight.tensor) for weight in self.groups[name].weights])
        # Only after all draws: a later layer's draw must not overwrite these zeros.
        for name, units in chosen.items() if self.renews_outgoing else ():
            self._zero_outgoing(name, units)
        self.draws += 1

    def _draw(self, weight: str) -> Tensor:
        path, _, leaf = weight.rpartition(".")
        return draw_fresh(self.model.get_submodule(path), self.init or library_init(self.model, path))[leaf]
