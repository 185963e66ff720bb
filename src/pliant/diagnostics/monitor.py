"""The measures during training, on the optimizer's own hooks, within a stated share of the time."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._step_hooks import after_step, before_step
from pliant._validation import check_choice, check_number, check_positive_int
from pliant.diagnostics import caveats as note
from pliant.diagnostics import measures as registry
from pliant.diagnostics._diagnose import initialized, prepare, take, unwrapped
from pliant.diagnostics.batches import LossFn, gather
from pliant.diagnostics.diagnosis import ScalarWriter, combine, write_table
from pliant.diagnostics.measure import Measure, Need
from pliant.diagnostics.per_sample.derivatives import dense
from pliant.diagnostics.probe import Probe, Statistics
from pliant.running import check_callable


@dataclass(frozen=True)
class Record:
    """What was measured at one step.

    Attributes:
        step: How many steps had been taken before this one.
        seconds: What the measurement took.
        values: Values by `measure` and `measure/layer`.
    """

    step: int
    seconds: float
    values: dict[str, float] = field(default_factory=dict)


class Monitor:
    """Measures a model every few steps of its training, and does not disturb it.

    Weights, features and curvature are those before the step that is measured; gradients and updates are those of the
    step itself. The training is bit-equal to one without a monitor: modes, buffers, gradients and random generators
    are left as they were. `skipped` says which measures could not be taken when they were last due, and why; `notes`,
    what else a reader must know, each when it was first met.

    Args:
        model: The model.
        optimizer: What trains it.
        every: Steps between measurements, at least.
        measures: Names of `pliant.diagnostics.measures.names()`; by default those that read weights, gradients and
            updates, and with a probe batch those that take a forward pass.
        probe: A batch (or a loader whose first samples make one) to measure on, the same at every step.
        loss_fn: `loss_fn(output, target)`, for measures of the loss on the probe batch.
        reference: A model to compare with.
        budget: The share of the training time that may be spent on measuring; pauses between steps, such as an
            evaluation, are no training. After the first measurement, the next ones wait until the training time has
            paid for them, so that `every` is stretched where it must be. `None`:
            exactly every `every` steps, which steps are measured does not depend on the clock, and a resumed run
            measures the same ones.
        samples: How many samples to take of a loader.
        statistics: What BatchNorm layers normalize the probe batch with; see `pliant.diagnose`.
        on_record: Called with every record.

    Raises:
        ValueError: If an argument is out of range, or a measure lacks what it needs.

    Example:
        >>> network = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        >>> monitor = Monitor(network, optimizer, every=2, measures=["weight_l2"], budget=None)
        >>> for _ in range(4):
        ...     network(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> [record.step for record in monitor.records]
        [0, 2]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int = 100,
        measures: Sequence[str] | None = None,
        probe: Any = None,
        loss_fn: LossFn | None = None,
        reference: nn.Module | None = None,
        budget: float | None = 0.03,
        samples: int = 256,
        statistics: Statistics = "batch",
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        check_positive_int("every", every)
        if budget is not None:
            check_number("budget", budget, above=True, otherwise=", or None")
        check_choice("statistics", statistics, get_args(Statistics))
        self.model = unwrapped(model)
        self.every = every
        self.budget = budget
        self.loss_fn = loss_fn
        self.reference = reference
        self.statistics: Statistics = statistics
        self.on_record = on_record
        self.records: list[Record] = []
        self.skipped: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.step = 0
        self._samples = samples
        if probe is not None:
            check_callable(self.model)
        self._batch = gather(probe, samples) if probe is not None else None
        self.measures = self._choose(measures)
        self._last: int | None = None
        self._trained = self._spent = self._cost = self._typical = 0.0
        self._resumed: float | None = None  # when the training went on after our last hook
        self._outside: float | None = None  # how long it then took to the next step; unknown for the first
        self._begun: tuple[float, dict[str, Mapping[str, float]], dict[str, Tensor] | None] | None = None
        self._handles: list[RemovableHandle] = []
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> Self:
        """Go on with another optimizer; what was measured stays."""
        self.detach()
        self._handles = [
            before_step(optimizer, self._before_step),
            after_step(optimizer, self._after_step),
        ]
        self._resumed = None
        return self

    def detach(self) -> None:
        """Stop measuring; no hook is left."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def reference(self) -> nn.Module | None:
        """The model to compare with, without wrappers such as DataParallel."""
        return self._reference

    @reference.setter
    def reference(self, reference: nn.Module | None) -> None:
        self._reference = initialized(reference, "reference") if reference is not None else None

    def set_probe(self, probe: Any) -> None:
        """Measure on another batch from now on: that of a new task."""
        self._batch = gather(probe, self._samples)

    @property
    def share(self) -> float:
        """The share of the training time that was spent on measuring so far; 0 before any training."""
        return self._spent / self._trained if self._trained else 0.0

    @property
    def interval(self) -> int:
        """How many steps apart measurements are, at the present cost and speed."""
        if self.budget is None or not self._typical:
            return self.every
        return max(self.every, math.ceil(self._cost / (self.budget * self._typical)))

    def mean(self, key: str, since: int = 0) -> float:
        """Return the mean of a value over the records since a step: over a task, say; NaN without any."""
        values = [r.values[key] for r in self.records if r.step >= since and key in r.values]
        return sum(values) / len(values) if values else math.nan

    def to_dict(self) -> dict[str, list[tuple[int, float]]]:
        """Return each value's history, as pairs of step and value."""
        found: dict[str, list[tuple[int, float]]] = {}
        for record in self.records:
            for key, value in record.values.items():
                found.setdefault(key, []).append((record.step, value))
        return found

    def to_parquet(self, path: str | Path) -> None:
        """Write all values as a Parquet file: step, measure, layer, value.

        Raises:
            ImportError: If pyarrow is missing; names the extra that has it.
        """
        cells = [
            (record.step, *key.partition("/")[::2], v) for record in self.records for key, v in record.values.items()
        ]
        write_table(path, {"step": int, "measure": str, "layer": str, "value": float}, cells)

    def write_scalars(self, writer: ScalarWriter, prefix: str = "monitor") -> None:
        """Give all values to a writer of scalars, such as TensorBoard's, under `prefix/measure/layer`."""
        for record in self.records:
            for key, value in record.values.items():
                writer.add_scalar(f"{prefix}/{key}", value, record.step)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, in plain types."""
        return {
            "step": self.step,
            "last": self._last,
            "trained": self._trained,
            "spent": self._spent,
            "cost": self._cost,
            "typical": self._typical,
            "skipped": dict(self.skipped),
            "notes": dict(self.notes),
            "records": [(r.step, r.seconds, dict(r.values)) for r in self.records],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step = state["step"]
        self._last = state["last"]
        self._trained, self._spent = state["trained"], state["spent"]
        self._cost, self._typical = state["cost"], state["typical"]
        self.skipped, self.notes = dict(state["skipped"]), dict(state.get("notes", {}))
        self.records = [Record(step, seconds, dict(values)) for step, seconds, values in state["records"]]
        self._resumed = None

    def __str__(self) -> str:
        pace = f"every {self.interval} steps" if self.budget is not None else f"every {self.every} steps exactly"
        taken = f"{len(self.records)} measurement{'s' * (len(self.records) != 1)}"
        share = f"{100 * self.share:.1f} % of the training time"
        if self.budget is not None and self.share > self.budget:
            share += f" so far, {100 * self.budget:g} % in the long run"
        lines = [f"{taken} in {self.step} steps, {pace}: {self._spent:.3g} s, {share}"]
        lines += [f"Skipped: {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join([*lines, *(f"Note: {text}" for text in self.notes.values())])

    def _choose(self, names: Sequence[str] | None) -> tuple[Measure, ...]:
        missing: dict[Need, str] = {}
        if self._batch is None:
            missing |= {"batch": "a probe batch"}
        if self.loss_fn is None or self._batch is None or self._batch.target is None:
            missing |= {"labels": "a probe batch with labels and a loss_fn"}
        if self.reference is None:
            missing |= {"reference": "a reference"}

        def lacks(measure: Measure) -> list[str]:
            if measure.cost == "backward":  # the step has a gradient of its own
                return []
            return [what for need, what in missing.items() if need in measure.needs]

        if names is None:
            cheap = (registry.info(name) for name in registry.names())
            return tuple(m for m in cheap if m.cost in ("reading", "backward", "forward") and not lacks(m))
        chosen = registry.select(names)
        for measure in chosen:
            if lacking := lacks(measure):
                raise ValueError(f"measures: {measure.name} needs {' and '.join(lacking)}")
        return chosen

    def _due(self) -> bool:
        if self.budget is None:
            return self.step % self.every == 0
        if self._last is None:
            return True
        paid = self._spent + self._cost <= self.budget * self._trained
        return self.step - self._last >= self.every and paid

    def _before_step(self, *_: Any) -> None:
        self._outside = time.perf_counter() - self._resumed if self._resumed is not None else None
        self._begun = None
        if self._due():
            started = self._clock()
            resting = [measure for measure in self.measures if not _of_the_step(measure)]
            with ExitStack() as stack:
                probe = self._probe(stack, self.model, resting)
                other = self._probe(stack, self.reference, resting) if self.reference is not None else None
                found = take(resting, probe, other, self.skipped)
                self._note(note.on_probe(probe) | note.on_statistics(self.model, self._batch, self.statistics))
            moving = any("step" in measure.needs for measure in self.measures)
            before = {n: p.detach().clone() for n, p in self.model.named_parameters()} if moving else None
            self._begun = (self._clock() - started, found, before)
        self._resumed = time.perf_counter()

    def _after_step(self, *_: Any) -> None:
        if self._resumed is not None and self._outside is not None:
            self._credit(self._outside + time.perf_counter() - self._resumed)
        if self._begun is not None:
            started = self._clock()
            seconds, found, before = self._begun
            gradient = {n: dense(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
            probe = Probe(self.model, gradient=gradient, before=before)
            found |= take([measure for measure in self.measures if _of_the_step(measure)], probe, None, self.skipped)
            values = combine({measure.name: found[measure.name] for measure in self.measures if measure.name in found})
            self._note(note.on_values(values))
            self._keep(Record(self.step, seconds + self._clock() - started, values))
            self._begun = None
        self.step += 1
        self._resumed = time.perf_counter()

    def _credit(self, seconds: float) -> None:
        """Count a step's time, but not the pauses of an evaluation or a checkpoint that lie between two steps."""
        counted = min(seconds, 2 * self._typical) if self._typical else seconds
        self._typical += (counted - self._typical) * (0.05 if self._typical else 1)
        self._trained += counted

    def _clock(self) -> float:
        """Return the time when all that was asked of a GPU is done; only asked for at steps that are measured."""
        if any(p.is_cuda for p in self.model.parameters()):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._last = record.step
        self._spent += record.seconds
        # The recent cost counts more: it changes with the data and with the machine's load.
        self._cost = record.seconds if not self._cost else (self._cost + record.seconds) / 2
        if self.on_record is not None:
            self.on_record(record)

    def _note(self, notes: note.Notes) -> None:
        for kind, text in notes.items():
            self.notes.setdefault(kind, f"at step {self.step}, {text}")

    def _probe(self, stack: ExitStack, model: nn.Module, chosen: Sequence[Measure]) -> Probe:
        used = any("batch" in measure.needs for measure in chosen)
        batch = prepare(stack, model, self._batch if used else None, self.statistics)
        keep = any({"batch", "reference"} <= measure.needs for measure in chosen)
        return Probe(model, batch, self.loss_fn, keep=keep)


def _of_the_step(measure: Measure) -> bool:
    return "step" in measure.needs or measure.cost == "backward"
