"""Selective weight reinitialization: re-draw the least useful single weights (Hernandez-Garcia et al. 2025).

Paper: "Reinitializing weights vs units for maintaining plasticity in neural networks". Every n steps, in each weight
tensor, the entries of least utility are drawn again from the initial distribution, and their moments are cleared. The
utility of a weight w with gradient g is |w·g| ("gradient") or |w| ("magnitude"), averaged over steps if β > 0. Chosen
are the lowest `fraction` of the entries, or those with a utility of at most `threshold` times the tensor's mean.

The paper abbreviates this as SWR. In Pliant, `swr` is soft weight rescaling, another method.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import widen
from pliant._validation import check_choice, check_number, check_seed
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.attachment import Attachment, check_timing, count_step, found_inf_of, is_due, was_skipped
from pliant.methods._core.averages import start_averages, update_averages_
from pliant.methods._core.filters import Filter, having_role, warn_of_computed
from pliant.methods._core.initial import Init, check_redrawable, draw_fresh, seeded
from pliant.methods._core.method import Receipt
from pliant.methods._core.surgery import write_, zero_moments_

Utility = Literal["gradient", "magnitude"]


def least_useful_entries(utility: Tensor, fraction: float | None, threshold: float | None) -> Tensor:
    """Return a mask of the entries of least utility.

    Args:
        utility: The utility of every entry.
        fraction: Choose this fraction, rounded to whole entries; of equal utilities, the first ones.
        threshold: Choose the entries with at most this many times the mean utility.

    Example:
        >>> utility = torch.tensor([[4.0, 1.0], [3.0, 0.0]])
        >>> least_useful_entries(utility, 0.5, None)
        tensor([[False,  True],
                [False,  True]])
        >>> least_useful_entries(utility, None, 0.25)
        tensor([[False, False],
                [False,  True]])
    """
    if fraction is None:
        assert threshold is not None
        return utility <= threshold * utility.mean()
    flat = utility.flatten().nan_to_num(nan=torch.inf, posinf=torch.inf)  # NaN is chosen last
    count = round(fraction * flat.numel())
    if count == 0:
        return torch.zeros_like(utility, dtype=torch.bool)
    limit = flat.topk(count, largest=False, sorted=False).values.max()  # ten times faster than sorting all
    chosen, equal = flat < limit, flat == limit
    chosen |= equal & (equal.cumsum(0) <= count - chosen.sum())
    return chosen.view(utility.shape)


class SelectiveReinit(AfterStep):
    """Re-draw the weights of least utility, every n steps.

    Args:
        model: The model.
        utility: "gradient", |w·g|, or "magnitude", |w|.
        fraction: The fraction of each tensor's entries to re-draw.
        threshold: Instead of a fraction: re-draw entries with at most this many times the tensor's mean utility.
        beta: β in [0, 1) of the utilities' average over steps; 0 takes the utility of the step alone.
        every: The number of steps between two actions.
        first: The step of the first action, counted from 1; `every` if None.
        init: A function that initializes the model in place, run after every module's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        where: Which parameters to act on; all weight matrices and kernels if None.
    """

    name = "selective_reinit"
    order: ClassVar[int] = 40
    saved: ClassVar[tuple[str, ...]] = ("averages", "draws")

    def __init__(
        self,
        model: nn.Module,
        *,
        utility: Utility = "gradient",
        fraction: float | None = 0.01,
        threshold: float | None = None,
        beta: float = 0.0,
        every: int = 100,
        first: int | None = None,
        init: Init | None = None,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, where=where or having_role(model, None, "matrix"))
        warn_of_computed(self.name, model, self.parameters)
        check_choice("utility", utility, get_args(Utility))
        self.utility = utility
        if (fraction is None) == (threshold is None):
            raise ValueError(
                f"fraction and threshold: {fraction!r} and {threshold!r}; give one and set the other to None"
            )
        self.fraction = None if fraction is None else check_number("fraction", fraction, high=1.0)
        self.threshold = None if threshold is None else check_number("threshold", threshold)
        self.beta = check_number("beta", beta, high=1.0, below=True)  # with 1 the average would never move
        self.every, self.first = check_timing(every, first)
        check_redrawable(model, init, self.parameters)
        self.init = init
        self.seed = check_seed(seed)
        self.averages = start_averages(self.parameters, "utilities") if beta else {}
        self.draws = 0
        self._last: dict[str, Tensor] = {}
        self._moments_cleared = 0

    def step(self) -> None:
        """Act once by hand if it is due, with the present gradients."""
        names = tuple(self.parameters)
        self._observe(names, None)
        if is_due(count_step(self.steps), self.every, self.first):
            self._redraw(names)

    @property
    def receipt(self) -> Receipt | None:
        """The number of re-drawn entries of each tensor, and of optimizer tensors that were cleared in part."""
        if not self._last:
            return None
        redrawn = {name: int(chosen.sum()) for name, chosen in self._last.items()}
        details = {"redrawn": redrawn, "optimizer_tensors_cleared": self._moments_cleared, "steps": sum(self.steps)}
        return Receipt(
            self.name, "re-draw weights", sum(n > 0 for n in redrawn.values()), sum(redrawn.values()), details
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._observe(self._attachment(optimizer).names, found_inf_of(optimizer))
        super()._after_step(optimizer, args, kwargs)

    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        if not was_skipped(optimizer):
            self._redraw(attachment.names)

    @torch.no_grad()
    def _observe(self, names: Sequence[str], found_inf: Tensor | None) -> None:
        if not self.beta:
            return
        with self._acting():
            utilities = self._utilities(names)
            if utilities:
                values = {"utilities": list(utilities.values())}
                update_averages_(self.averages, self.beta, list(utilities), values, found_inf)

    def _utilities(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the present utilities of these parameters' entries, leaving out parameters without a gradient."""
        gradients = self._gradients(names)
        weights = {name: widen(self.parameters[name].detach()) for name in gradients}
        if self.utility == "magnitude":
            return {name: weight.abs() for name, weight in weights.items()}
        return {name: (weight * widen(gradients[name])).abs() for name, weight in weights.items()}

    @torch.no_grad()
    def _redraw(self, names: Sequence[str]) -> None:
        utilities = self._utilities(names)
        if self.beta:
            utilities = {name: self.averages["utilities"][name] for name in utilities}
        if not utilities:
            return
        with seeded(self.seed, self.draws):
            fresh = draw_fresh(self.model, self.init)
        self.draws += 1
        self._moments_cleared = 0
        self._last = {}
        for name, utility in utilities.items():
            chosen = least_useful_entries(utility, self.fraction, self.threshold)
            write_(self.parameters[name].detach(), chosen, fresh[name])
            self._moments_cleared += zero_moments_(self.optimizers, self.parameters[name], chosen)
            self._last[name] = chosen
        if self.beta:
            places = list(self.averages["utilities"])
            for name in utilities:
                self.averages["utilities"][name].zero_()
                self.averages["counts"][places.index(name)] = 0
