"""`diagnose`: let a network learn new data beside fresh ones, measure the signs that explain it, name what to try."""

import copy
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pliant._json import without_infinities
from pliant._seeding import drawing_for
from pliant._validation import check_number
from pliant.diagnosis.remedies import Remedy, choose_remedies
from pliant.diagnostics import Measurement, measure
from pliant.diagnostics.batches import LossFn
from pliant.diagnostics.probe import Statistics
from pliant.distributed import Group, call_on_first, find_group, group_of, has_shards, unwrap_model, whole_model
from pliant.methods import FullReset
from pliant.trial import EXAMPLES, MakeOptimizer, check_builder, gather_new
from pliant.trial import trial as hold_trial
from pliant.trial_result import Labels, Trial, Verdict

BUDGET = 120.0
"""The seconds that a trial may take by default."""
COMPARE = "To find out which of them works best from this network, run pliant treat, or call pliant.treat."


@dataclass(frozen=True)
class Diagnosis:
    """Whether a network has lost plasticity, and what explains it.

    Attributes:
        trial: How copies of the network learned beside fresh networks, which decides; None if there was no trial.
        signs: The measured values, and the signs of lost plasticity in them.
        why_no_trial: Why there was no trial.
    """

    trial: Trial | None
    signs: Measurement
    why_no_trial: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The trial's verdict, or None without a trial."""
        return self.trial.verdict if self.trial is not None else None

    @property
    def answer(self) -> str:
        """The verdict as a sentence."""
        if self.trial is None:
            return f"not decided: there was no trial ({self.why_no_trial}), so only signs are shown"
        return f"{self.trial.verdict}: {self.trial.answer}"

    @property
    def explanation(self) -> str:
        """What the signs add to the verdict, as a sentence."""
        present = any(finding.present for finding in self.signs.findings())
        if self.verdict == "plastic" and present:
            return f"Signs without loss: {self.signs.summary} The network learns well all the same."
        if self.verdict == "lost" and not present:
            return f"{self.signs.summary} So no sign explains the loss."
        return self.signs.summary

    @property
    def remedies(self) -> list[Remedy]:
        """What to try; nothing if the network is plastic."""
        return [] if self.verdict == "plastic" else choose_remedies(self.signs.findings(), self.verdict == "lost")

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis in plain types, ready for JSON: None in place of a number that is not finite."""
        findings = [
            {"measure": f.measure, "grade": f.grade, "size": f.size, "value": f.value, "reference": f.reference}
            for f in self.signs.findings()
        ]
        found = {
            "verdict": self.verdict,
            "trial": self.trial.to_dict() if self.trial else None,
            "signs": findings,
            "remedies": [remedy.method for remedy in self.remedies],
            "values": self.signs.to_dict(),
        }
        plain: dict[str, Any] = without_infinities(found)
        return plain

    def __str__(self) -> str:
        """Write the verdict, the signs, what to try, and what could not be measured."""
        lines = [self.answer, *(f"  {line}" for line in (self.trial.details if self.trial else []))]
        lines += ["", self.explanation, *(f"  {line}" for line in self.signs.describe_signs())]
        if self.remedies:
            lines += ["", "What to try:"]
            for remedy in self.remedies:
                signs = f" ({', '.join(remedy.measures)})" if remedy.measures else ""
                lines += [f"  {remedy.method}{signs}: {remedy.does}", *(f"    {line}" for line in remedy.code)]
            lines.append(f"  {COMPARE}")
        elif self.verdict == "plastic":
            lines += ["", "Nothing needs to be done: continue from this network."]
        gaps = self.signs.describe_gaps()
        return "\n".join([*lines, "", *gaps] if gaps else lines)

    def to_html(self, title: str = "Diagnosis") -> str:
        """Return the diagnosis as one self-contained page."""
        from pliant.diagnosis.diagnosis_page import render_diagnosis

        return render_diagnosis(self, title)

    def save(self, path: str | Path, title: str = "Diagnosis") -> None:
        """Write the page."""
        Path(path).write_text(self.to_html(title), encoding="utf-8")

    def _repr_html_(self) -> str:
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" title="Diagnosis" style="width:100%;height:80vh;border:0"></iframe>'


def diagnose(
    model: nn.Module,
    data: Any = None,
    loss_fn: LossFn | Mapping[str, LossFn] | None = None,
    *,
    fresh: Callable[[], nn.Module] | None = None,
    reference: nn.Module | None = None,
    test: Any = None,
    labels: Labels = "given",
    optimizer: MakeOptimizer | Optimizer | None = None,
    trial: bool = True,
    steps: int | None = None,
    budget: float | None = BUDGET,
    measures: Sequence[str] | None = None,
    samples: int = 256,
    statistics: Statistics = "batch",
    seed: int = 0,
    progress: bool | None = None,
    group: Group | None = None,
) -> Diagnosis:
    """Find out whether a network has lost plasticity, which signs explain it, and what to try.

    A trial decides: copies of the network learn the data beside fresh networks (`pliant.trial`). Then the network is
    measured beside one fresh network (`pliant.diagnostics.measure`). The model is left as it was. Without data, labels
    or a loss there is no trial, and the answer says so.

    Args:
        model: The network.
        data: The new data that it is to learn: a pair (inputs, targets), a data set of such pairs, or a loader. What
            `pliant.diagnostics.measure` takes beyond that is measured without a trial.
        loss_fn: `loss_fn(output, target)`. Several losses by name are measured without a trial.
        fresh: Builds an untrained network of the same kind. By default the parameters of a copy are drawn again.
        reference: The network to measure the signs against; by default a fresh one.
        test: Held-out data for the trial; by default a fifth of the data.
        labels: "random" lets the trial learn random classes, where only inputs exist.
        optimizer: The optimizer of the trial, as in `pliant.trial`; Adam with learning rate 1e-3 by default.
        trial: Whether to hold a trial.
        steps: Optimizer steps of each network of the trial; by default as many as `pliant.trial` takes.
        budget: The seconds that the trial may take; None for no limit.
        measures: Names from `pliant.diagnostics.measures.names()`; by default the affordable ones.
        samples: How many samples to measure on.
        statistics: What BatchNorm layers normalize with while the network is measured.
        seed: Decides the fresh networks and the order of the data.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        group: The ranks that train this model together, all of which call this; by default the ranks of its
            DistributedDataParallel or mesh, else all. The first one diagnoses, on its data, and the others get its
            answer.

    Raises:
        ValueError: If an argument is invalid.

    Example:
        >>> import torch
        >>> found = diagnose(nn.Linear(2, 2), torch.eye(2), measures=["weight_l2"])
        >>> found.answer
        'not decided: there was no trial (there is no loss_fn; give one to get a verdict), so only signs are shown'
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "group")}
    if budget is not None:
        check_number("budget", budget, above=True)
    bare = unwrap_model(model)
    check_builder(fresh)
    ranks = find_group(group if group is not None else group_of(model))
    if ranks is not None or has_shards(bare):
        with whole_model(bare):  # in there, the first rank is alone with an ordinary model
            found: Diagnosis = call_on_first(lambda: diagnose(bare, **given), ranks)
        return found
    why = _reason_against(trial, data, loss_fn)
    held: Trial | None = None
    if data is not None:
        try:
            examples = gather_new("data", data, bare, labels, seed, samples if why else EXAMPLES)
            some = examples.take(torch.arange(min(samples, len(examples))))
        except ValueError as error:  # data without pairs is measured without a trial
            why = why or str(error)
        else:
            data = (some.inputs, some.targets)
            if not why:
                held, why = _try(
                    (examples.inputs, examples.targets), bare, loss_fn, fresh=fresh, optimizer=optimizer, test=test,
                    labels=labels, steps=steps, budget=budget, seed=seed, progress=progress,
                )  # fmt: skip
    notes: tuple[str, ...] = ()
    if reference is None:
        try:
            reference = _fresh_network(bare, fresh, seed)
        except ValueError as error:
            notes = (f"there is no fresh network to compare with ({error}); pass fresh= or reference=",)
    signs = measure(model, data, loss_fn, reference, measures=measures, samples=samples, statistics=statistics)
    return Diagnosis(held, replace(signs, notes=(*signs.notes, *notes)), why)


def _reason_against(trial: bool, data: Any, loss_fn: Any) -> str:
    """Return why there is no trial, and how to get one; "" if there is one."""
    if not trial:
        return "trial=False was given"
    if data is None:
        return "there is no data; give the new data, with labels, to get a verdict"
    if loss_fn is None:
        return "there is no loss_fn; give one to get a verdict"
    if isinstance(loss_fn, Mapping):
        return "there are several losses; give one to get a verdict"
    return ""


def _try(data: Any, model: nn.Module, loss_fn: Any, **settings: Any) -> tuple[Trial | None, str]:
    """Hold a trial; or say why it cannot be held, since the signs can be shown without it."""
    try:
        return hold_trial(model, data, loss_fn, **settings), ""
    except ValueError as error:
        return None, str(error)


def _fresh_network(model: nn.Module, build: Callable[[], nn.Module] | None, seed: int) -> nn.Module:
    with drawing_for("diagnose", seed):
        if build is not None:
            return build().to(next(model.parameters()).device)
        twin = copy.deepcopy(model)
        FullReset(twin, optimizer_state="keep").apply()
        return twin
