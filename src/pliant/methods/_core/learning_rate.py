"""Strengths and initial values that follow the learning rate of the optimizer."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from pliant._validation import check_choice
from pliant.methods._core.attachment import Attachment, check_rates

Schedule = Literal["constant", "coupled", "reinit"]
"""What a method does when the learning rate changes: nothing; scale its strength by lr/lr₀; start from new norms."""


class LearningRateSchedule:
    """What a method does when the learning rates of its parameters change.

    lr₀ is the group's `initial_lr` if a scheduler set one, else the rate at attachment. If lr₀ is 0 (a warm-up), the
    first rate above 0 takes its place.

    Args:
        kind: "constant": nothing. "coupled": strengths are multiplied by lr/lr₀. "reinit": the present
            values become the initial ones when a rate decays.
        names: The parameters, one name for each entry of the results. A name may appear several times.
        allowed: The kinds that the method supports.

    Attributes:
        state: The tensors to save: "initial" (lr₀), "previous" and "declining"; NaN for rates that are unknown. Empty
            if the schedule is constant.
    """

    def __init__(self, kind: Schedule, names: Sequence[str] = (), allowed: Sequence[str] = get_args(Schedule)) -> None:
        check_choice("schedule", kind, allowed)
        self.kind = kind
        self._names = tuple(names)
        self.state: dict[str, Tensor] = {}
        if kind != "constant":
            unknown = torch.full((len(names),), torch.nan, dtype=torch.float64)
            self.state = {"initial": unknown, "previous": unknown.clone(), "declining": unknown.isinf()}

    def check(self, optimizer: Optimizer) -> None:
        """Raise a ValueError if the schedule needs a learning rate and the optimizer has none."""
        if self.kind != "constant":
            check_rates(optimizer, f"schedule={self.kind!r} follows it")

    def note(self, optimizer: Optimizer, attachment: Attachment) -> None:
        """Note the learning rates of parameters that no optimizer held before."""
        if self.kind == "constant":
            return
        started = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
        for key, rates in (
            ("initial", self._spread(started, attachment)),
            ("previous", self._now(optimizer, attachment)),
        ):
            self.state[key] = torch.where(self.state[key].isnan(), rates, self.state[key])

    def factors(self, attached: Iterable[tuple[Optimizer, Attachment]], otherwise: float) -> Tensor:
        """Return lr/lr₀ of each parameter, and `otherwise` for parameters that none of these optimizers holds."""
        factors = torch.full((len(self._names),), otherwise, dtype=torch.float64)
        for optimizer, attachment in attached:
            rates, initial = self._now(optimizer, attachment), self.state["initial"]
            self.state["initial"] = initial = torch.where((rates > 0) & ~(initial > 0), rates, initial)
            factors = torch.where(rates.isnan(), factors, torch.where(rates > 0, rates / initial, 0.0))
        return factors

    def find_decays(self, optimizer: Optimizer, attachment: Attachment) -> Tensor:
        """Return for each parameter whether its rate dropped to half or less since the previous step.

        Smooth schedules do not count: once a rate has fallen by less than half, drops are ignored until it rises.
        """
        rates, previous = self._now(optimizer, attachment), self.state["previous"]
        dropped = (rates <= previous / 2) & ~self.state["declining"]
        declining = self.state["declining"] | (rates < previous * (1 - 1e-6)) & ~dropped  # 1e-6: not by rounding
        self.state["declining"] = declining & ~(rates > previous)
        self.state["previous"] = torch.where(rates.isnan(), previous, rates)
        return dropped

    def _now(self, optimizer: Optimizer, attachment: Attachment) -> Tensor:
        return self._spread([group["lr"] for group in optimizer.param_groups], attachment)

    def _spread(self, values: Sequence[float], attachment: Attachment) -> Tensor:
        """Return the value of each parameter's group, or NaN where the optimizer does not hold the parameter."""
        groups = dict(zip(attachment.names, attachment.groups, strict=True))
        found = [float(values[groups[name]]) if name in groups else torch.nan for name in self._names]
        return torch.tensor(found, dtype=torch.float64)
