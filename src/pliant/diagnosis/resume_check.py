"""Explain a jump in the loss after a resume: lost optimizer or schedule state, other data, or lost plasticity.

What the two files hold decides first. An optimizer counts its steps, and a schedule its epochs: a smaller count after
the resume than before it proves a new start. If nothing was lost, a trial decides whether the network still learns the
data. What remains is the data: other examples, or another order.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pliant._examples import Examples, gather
from pliant._validation import check_number
from pliant.diagnostics.checkpoints import load_into, read_checkpoint
from pliant.running import call_with, undisturbed
from pliant.trial import LossFunction, trial
from pliant.trial_result import Trial

Cause = Literal["optimizer state", "schedule", "plasticity", "data", "undecided"]

_MEANING: dict[Cause, str] = {
    "optimizer state": "the optimizer's state was lost: save optimizer.state_dict() and load it when you resume",
    "schedule": "the learning rate's schedule was lost: save scheduler.state_dict() and load it when you resume",
    "plasticity": "the network has lost plasticity: it learns this data worse than a fresh one; see `pliant diagnose`",
    "data": "nothing was lost and the network still learns: look at the data, its order and its preparation",
    "undecided": "nothing was lost in the files, and it is not clear whether the network still learns as a fresh one",
}
_CHUNKS = 20
_EXAMPLES = 2_000


@dataclass(frozen=True)
class ResumeCheck:
    """What explains a jump in the loss after a resume.

    Attributes:
        cause: "optimizer state", "schedule", "plasticity", "data" or "undecided".
        evidence: What was found, one sentence each.
        trial: How the network after the resume learns beside fresh ones; None if the files decide, or without data.
    """

    cause: Cause
    evidence: tuple[str, ...]
    trial: Trial | None = None

    def __str__(self) -> str:
        lines = [f"{self.cause}: {_MEANING[self.cause]}", *(f"  {line}" for line in self.evidence)]
        return "\n".join(lines + ([f"  trial: {self.trial.answer}"] if self.trial else []))


def check_resume(
    before: str | Path,
    after: str | Path,
    build: Callable[[], nn.Module],
    data: Any = None,
    loss_fn: LossFunction = cross_entropy,
    *,
    key: str = "",
    hold_trial: bool = True,
    **settings: Any,
) -> ResumeCheck:
    """Explain a jump in the loss after a resume.

    Args:
        before: The checkpoint that training resumed from.
        after: A checkpoint of the resumed training, after the jump.
        build: Builds the network.
        data: The data of the resumed training: a pair (inputs, targets), a data set of such pairs, or a loader.
        loss_fn: `loss_fn(model(inputs), targets)`.
        key: The place of the weights in the checkpoints.
        hold_trial: Whether to let the network learn beside fresh ones, if the files do not decide.
        settings: Settings of `pliant.trial`.

    Raises:
        ValueError: If a file cannot be read or does not fit the network, or the data is invalid.
    """
    contents = [read_checkpoint(path) for path in (before, after)]
    models = [load_into(build(), path, key) for path in (before, after)]
    try:
        lost, evidence = compare_states(*contents)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise ValueError(
            f"{str(before)!r} or {str(after)!r} holds a malformed state of an optimizer or schedule ({reason})"
        ) from error
    found: Trial | None = None
    if data is not None:
        examples = gather("data", data, _EXAMPLES)
        evidence.append(_compare_losses(models, examples, loss_fn))
        if not lost and hold_trial:
            found = trial(models[1], data, loss_fn, fresh=build, **settings)
    cause: Cause = lost[0] if lost else _cause_of(found)
    return ResumeCheck(cause, tuple(evidence), found)


def _cause_of(found: Trial | None) -> Cause:
    if found is None or found.verdict == "undecided":
        return "undecided"
    return "plasticity" if found.verdict == "lost" else "data"


def compare_states(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[Cause], list[str]]:
    """Return what the state after a resume lost of the state before it, and what was found, one sentence each.

    Example:
        >>> state = lambda steps: {"optimizer": {"state": {0: {"step": steps}}, "param_groups": [{"lr": 0.1}]}}
        >>> compare_states(state(100), state(7))[0]
        ['optimizer state']
        >>> compare_states(state(100), state(107))
        ([], ['the optimizer continued: 100 steps before, 107 after, unless all 107 were made after the resume'])
    """
    lost: list[Cause] = []
    evidence: list[str] = []
    optimizers = [dict(_find(content, {"state", "param_groups"})) for content in (before, after)]
    schedules = [dict(_find(content, {"last_epoch"})) for content in (before, after)]
    if not optimizers[0]:
        lost.append("optimizer state")
        evidence.append("the checkpoint before holds no optimizer state, so the resume began with a new optimizer")
    for place in optimizers[0].keys() & optimizers[1].keys():
        old, new = optimizers[0][place], optimizers[1][place]
        steps = [_steps(old), _steps(new)]
        if (old["state"] and not new["state"]) or (
            steps[0] is not None and steps[1] is not None and steps[1] < steps[0]
        ):
            lost.append("optimizer state")
            evidence.append(f"the optimizer started over: {steps[0] or 0} steps before, {steps[1] or 0} after")
        elif None in steps:
            evidence.append("the optimizer does not count its steps, so its state is taken to be kept")
        else:
            counted = f"{steps[0]} steps before, {steps[1]} after"
            evidence.append(f"the optimizer continued: {counted}, unless all {steps[1]} were made after the resume")
    if optimizers[0] and not optimizers[1]:
        evidence.append("the checkpoint after holds no optimizer state, so nothing shows whether it was kept")
    kept = False
    for place in schedules[0].keys() & schedules[1].keys():
        counts = [int(check_number("last_epoch", schedules[i][place]["last_epoch"], low=-1)) for i in (0, 1)]
        kept = counts[1] >= counts[0]
        evidence.append(
            f"the schedule {'continued' if kept else 'started over'}: at {counts[0]} before, {counts[1]} after"
        )
        if not kept:
            lost.append("schedule")
    rates = [
        [group["lr"] for o in each.values() for group in o["param_groups"] if "lr" in group] for each in optimizers
    ]
    if rates[0] and len(rates[0]) == len(rates[1]):
        rose = any(float(b) > 1.01 * float(a) for a, b in zip(*rates, strict=True))
        if rose:
            evidence.append(f"the learning rate rose from {float(rates[0][0]):.3g} to {float(rates[1][0]):.3g}")
        if rose and not kept and "schedule" not in lost:
            lost.append("schedule")
    return lost, evidence


def _find(
    content: Any, keys: set[str], place: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every mapping inside a checkpoint that holds certain keys, with its place.

    A pickle can hold a table within itself, or twice at each of many levels: each is walked once.
    """
    seen = set() if seen is None else seen
    if isinstance(content, Mapping | list | tuple):
        if id(content) in seen:
            return
        seen.add(id(content))
    if isinstance(content, Mapping):
        if keys <= content.keys():
            yield place, content
            return
        for key, value in content.items():
            yield from _find(value, keys, f"{place}.{key}", seen)
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _find(value, keys, f"{place}.{number}", seen)


def _steps(optimizer: Mapping[str, Any]) -> int | None:
    counts = [int(each["step"]) for each in optimizer["state"].values() if isinstance(each, Mapping) and "step" in each]
    return max(counts, default=None)


@torch.no_grad()
def _compare_losses(models: list[nn.Module], examples: Examples, loss_fn: LossFunction) -> str:
    """Say whether the network after the resume is worse than the one before it on the same data."""
    chunks = [examples.take(index) for index in torch.arange(len(examples)).chunk(_CHUNKS)]
    losses = []
    for model in models:
        with undisturbed(model):
            losses.append(torch.stack([loss_fn(call_with(model, c.inputs), c.targets).double() for c in chunks]))
    rise = losses[1] - losses[0]
    means = f"{float(losses[0].mean()):.4g} before, {float(losses[1].mean()):.4g} after"
    if _is_above_zero(rise):
        return f"on the same data the weights are worse than before: loss {means}"
    return f"on the same data the weights are not worse than before: loss {means}"


def _is_above_zero(values: Tensor) -> bool:
    """Return whether the mean is above zero by more than twice its standard error."""
    if len(values) < 2:
        return bool(values.mean() > 0)
    return bool(values.mean() > 2 * values.std() / math.sqrt(len(values)))
