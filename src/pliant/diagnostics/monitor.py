"""`Monitor`: takes measures during training on the optimizer's own hooks, within a share of the training time."""

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

from pliant._step_hooks import after_step, before_step, unwrap_optimizer
from pliant._validation import check_choice, check_number, check_positive_int
from pliant.diagnostics import measures as registry
from pliant.diagnostics.batches import LossFn, gather
from pliant.diagnostics.layer_values import Values
from pliant.diagnostics.measurement import ScalarWriter, flatten, note_values, write_table
from pliant.diagnostics.measures import Measure, find_lacking, take
from pliant.diagnostics.per_sample.derivatives import dense
from pliant.diagnostics.probe import (
    Need,
    Notes,
    Probe,
    Statistics,
    check_initialized,
    note_statistics,
    resting,
)
from pliant.distributed import (
    Group,
    find_group,
    gather_whole,
    group_of,
    held,
    is_sharded,
    share_first,
    unwrap_model,
    whole_model,
)
from pliant.running import check_callable

_LACKING: dict[Need, str] = {
    "batch": "a probe batch",
    "labels": "labels in the probe batch",
    "loss": "a loss_fn",
    "reference": "a reference",
}


def find_moments(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's averages or sums of squared gradients, by the name of the parameter."""
    states = {name: optimizer.state.get(held(p), {}) for name, p in model.named_parameters()}
    keys = ("exp_avg_sq", "square_avg", "sum")
    found = {name: next((state[key] for key in keys if key in state), None) for name, state in states.items()}
    moments = {name: moment for name, moment in found.items() if isinstance(moment, Tensor)}
    if not any(map(is_sharded, moments.values())):
        return moments
    return dict(zip(moments, gather_whole(list(moments.values())), strict=True))


@dataclass(frozen=True)
class Record:
    """The values at one step.

    Attributes:
        step: The number of steps before this one.
        seconds: The time that the measurement took.
        values: The values, keyed `measure` and `measure/layer`.
    """

    step: int
    seconds: float
    values: dict[str, float] = field(default_factory=dict)


class Monitor:
    """Measures a model every few steps of its training without changing the training.

    Weights, features and curvature are measured before the step; gradients and updates belong to the step itself.
    Modes, buffers, gradients and random generators are left as they were, so the training is the same to the
    bit. `skipped` holds the measures that could not be taken when they were last due, and why. `notes` holds what
    else a reader must know, with the step at which it first occurred.

    Args:
        model: The model.
        optimizer: The optimizer that trains it.
        every: The smallest number of steps between measurements.
        measures: Names from `pliant.diagnostics.measures.names()`. By default, measures of weights, gradients and
            updates and, with a probe batch, measures that need a forward pass.
        probe: The batch to measure on, or a loader whose first samples form one. It stays the same at every step.
        loss_fn: `loss_fn(output, target)`, for measures of the loss on the probe batch.
        reference: The model to compare with.
        budget: The share of the training time that measuring may take. Pauses between steps, such as an evaluation, do
            not count as training. After the first measurement, each waits until enough training time has passed to pay
            for it, which can stretch `every`. With `None`, the monitor measures exactly every `every` steps, so the
            measured steps do not depend on the clock, and a resumed run measures the same ones.
        samples: How many samples to take from a loader.
        statistics: What BatchNorm layers normalize the probe batch with; see `pliant.diagnose`.
        on_record: Called with every record.
        log: `log(values, step)` receives the values of every record, keyed `monitor/measure/layer`: `wandb.log`,
            `trackio.log` and `mlflow.log_metrics` fit as they are.
        group: The ranks that train this model together, each with a monitor; by default the ranks of its
            DistributedDataParallel or mesh, else all. They record the values of the first rank, on its probe batch.
            `budget` then sets the steps to the next measurement at each measurement, by the first rank's clock.

    Raises:
        ValueError: If an argument is out of range, or a need of a named measure is not met.

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
        log: Callable[[dict[str, float], int], object] | None = None,
        group: Group | None = None,
    ) -> None:
        check_positive_int("every", every)
        if budget is not None:
            check_number("budget", budget, above=True, otherwise=", or None")
        check_choice("statistics", statistics, get_args(Statistics))
        self.model = unwrap_model(model)
        self.group = find_group(group if group is not None else group_of(model))
        self.every = every
        self.budget = budget
        self.loss_fn = loss_fn
        self.reference = reference
        self.statistics: Statistics = statistics
        self.on_record = on_record
        self.log = log
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
        self._pause = every
        self._trained = self._spent = self._cost = self._typical = 0.0
        self._resumed: float | None = None  # when training resumed after the monitor's last hook
        self._outside: float | None = None  # the time from then to the next step; unknown before the first
        self._begun: tuple[float, dict[str, Values], dict[str, Tensor] | None] | None = None
        self._handles: list[RemovableHandle] = []
        self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> Self:
        """Continue with another optimizer, and keep the records."""
        self.detach()
        optimizer = unwrap_optimizer(optimizer)
        self._handles = [
            before_step(optimizer, self._before_step),
            after_step(optimizer, self._after_step),
        ]
        self._resumed = None
        return self

    def detach(self) -> None:
        """Stop measuring and remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def reference(self) -> nn.Module | None:
        """The model to compare with, without wrappers such as `DataParallel`."""
        return self._reference

    @reference.setter
    def reference(self, reference: nn.Module | None) -> None:
        self._reference = check_initialized(reference, "reference") if reference is not None else None

    def set_probe(self, probe: Any) -> None:
        """Measure on another batch from now on, such as a new task's."""
        self._batch = gather(probe, self._samples)

    @property
    def share(self) -> float:
        """The share of the training time spent on measuring so far, or 0 before any training."""
        return self._spent / self._trained if self._trained else 0.0

    @property
    def interval(self) -> int:
        """The number of steps between measurements at the current cost and speed."""
        if self.budget is None or not self._typical:
            return self.every
        return max(self.every, math.ceil(self._cost / (self.budget * self._typical)))

    def mean(self, key: str, since: int = 0) -> float:
        """Return the mean of a value over the records since a step, or NaN if there are none."""
        values = [r.values[key] for r in self.records if r.step >= since and key in r.values]
        return sum(values) / len(values) if values else math.nan

    def to_dict(self) -> dict[str, list[tuple[int, float]]]:
        """Return the history of each value, as pairs of step and value."""
        found: dict[str, list[tuple[int, float]]] = {}
        for record in self.records:
            for key, value in record.values.items():
                found.setdefault(key, []).append((record.step, value))
        return found

    def to_parquet(self, path: str | Path) -> None:
        """Write all values as a Parquet file: step, measure, layer, value.

        Raises:
            ImportError: If pyarrow is not installed.
        """
        cells = [
            (record.step, *key.partition("/")[::2], v) for record in self.records for key, v in record.values.items()
        ]
        write_table(path, {"step": int, "measure": str, "layer": str, "value": float}, cells)

    def write_scalars(self, writer: ScalarWriter, prefix: str = "monitor") -> None:
        """Write all values to TensorBoard or the like, under `prefix/measure/layer`."""
        for record in self.records:
            for key, value in record.values.items():
                writer.add_scalar(f"{prefix}/{key}", value, record.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, in plain types."""
        return {
            "step": self.step,
            "last": self._last,
            "pause": self._pause,
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
        self._last, self._pause = state["last"], state["pause"]
        self._trained, self._spent = state["trained"], state["spent"]
        self._cost, self._typical = state["cost"], state["typical"]
        self.skipped, self.notes = dict(state["skipped"]), dict(state["notes"])
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
        # The optimizer's step gives the gradient and the update.
        probe = Probe(self.model, self._batch, self.loss_fn, gradient={}, before={}, moments={})
        other = Probe(self.reference) if self.reference is not None else None
        if names is None:
            cheap = [m for m in map(registry.info, registry.names()) if m.cost in ("reading", "backward", "forward")]
            return tuple(measure for measure in cheap if not find_lacking(measure, probe, other))
        chosen = registry.select(names)
        for measure in chosen:
            if lacking := find_lacking(measure, probe, other):
                needs = " and ".join(_LACKING[need] for need in lacking)
                raise ValueError(f"measures: {measure.name} needs {needs}")
        return chosen

    def _due(self) -> bool:
        if self.budget is None:
            return self.step % self.every == 0
        if self._last is None:
            return True
        if self.group is not None:
            return self.step - self._last >= self._pause
        paid = self._spent + self._cost <= self.budget * self._trained
        return self.step - self._last >= self.every and paid

    def _before_step(self, *_: Any) -> None:
        self._outside = time.perf_counter() - self._resumed if self._resumed is not None else None
        self._begun = None
        if self._due():
            started = self._clock()
            chosen = [measure for measure in self.measures if not measure.of_step]
            moving = any("step" in measure.needs for measure in self.measures)
            with whole_model(self.model), ExitStack() as stack:
                before = {n: p.detach().clone() for n, p in self.model.named_parameters()} if moving else None
                probe = self._probe(stack, self.model, chosen)
                other = self._probe(stack, self.reference, chosen) if self.reference is not None else None
                found = self._take(chosen, probe, other)
                self._note(probe.notes | note_statistics(self.model, self._batch, self.statistics))
            self._begun = (self._clock() - started, found, before)
        self._resumed = time.perf_counter()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._resumed is not None and self._outside is not None:
            self._credit(self._outside + time.perf_counter() - self._resumed)
        if self._begun is not None:
            started = self._clock()
            seconds, found, before = self._begun
            chosen = [measure for measure in self.measures if measure.of_step]
            with whole_model(self.model), ExitStack() as stack:
                gradient = {n: dense(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
                used = any("batch" in measure.needs for measure in chosen)
                batch = stack.enter_context(resting(self.model, self._batch, self.statistics)) if used else None
                moments = find_moments(optimizer, self.model)
                probe = Probe(self.model, batch, gradient=gradient, before=before, moments=moments)
                found |= self._take(chosen, probe, None)
            values = flatten({measure.name: found[measure.name] for measure in self.measures if measure.name in found})
            self._note(note_values(values))
            values, self.skipped, self.notes = share_first((values, self.skipped, self.notes), self.group)
            self._keep(Record(self.step, seconds + self._clock() - started, values))
            self._begun = None
        self.step += 1
        self._resumed = time.perf_counter()

    def _credit(self, seconds: float) -> None:
        """Add the time of a step to the training time, without long pauses between steps such as an evaluation."""
        counted = min(seconds, 2 * self._typical) if self._typical else seconds
        self._typical += (counted - self._typical) * (0.05 if self._typical else 1)
        self._trained += counted

    def _clock(self) -> float:
        """Return the time once the GPU is idle. Called only at measured steps, because waiting costs time."""
        if any(p.is_cuda for p in self.model.parameters()):
            torch.cuda.synchronize()
        return time.perf_counter()

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._last = record.step
        self._spent += record.seconds
        # Recent costs count more, because the cost changes with the data and the machine's load.
        self._cost = record.seconds if not self._cost else (self._cost + record.seconds) / 2
        self._pause = share_first(self.interval, self.group)
        if self.on_record is not None:
            self.on_record(record)
        if self.log is not None:
            self.log({f"monitor/{key}": value for key, value in record.values.items()}, record.step)

    def _take(self, chosen: Sequence[Measure], probe: Probe, other: Probe | None) -> dict[str, Values]:
        taken = take(chosen, probe, other)
        self.skipped = {name: why for name, why in self.skipped.items() if name not in taken.values} | taken.skipped
        return taken.values

    def _note(self, notes: Notes) -> None:
        for kind, text in notes.items():
            self.notes.setdefault(kind, f"at step {self.step}, {text}")

    def _probe(self, stack: ExitStack, model: nn.Module, chosen: Sequence[Measure]) -> Probe:
        used = any("batch" in measure.needs for measure in chosen)
        batch = stack.enter_context(resting(model, self._batch if used else None, self.statistics))
        keep = any({"batch", "reference"} <= measure.needs for measure in chosen)
        return Probe(model, batch, self.loss_fn, keep=keep)
