"""The metrics that runs recorded during training, as arrays: over epochs, at task ends, and averaged over seeds."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant import streams
from pliant.experiments.report.comparison import Broken, Comparison
from pliant.experiments.report.statistics import ANYTHING, Floats, bands
from pliant.experiments.store import Run, read_records

ENTRY = "entry_"
"""Prefix of metrics measured before the first step of a task."""
MEASURES = "measures"
"""Key of a record's measures, which are named `name` or `name/layer`."""

MANY_TASKS = 60
"""With at least this many tasks, curves show only the end of each task."""

_BOOKKEEPING = frozenset({"task", "epoch", "step", "progress", "lr", "receipts", MEASURES})
_MARKS = {"intervention": "interventions", "priming": "the end of priming"}
"""What the task boundaries of a stream are, where no task is new."""
_NEW_TASKS = "new tasks"
_AT_AN_END = ("train_loss", "task_return")
"""Metrics recorded only at the end of a task."""


@dataclass(frozen=True)
class History:
    """The records of one run.

    Args:
        seed: The run's seed.
        task: The task of each record, from 0.
        epoch: The epoch in the task: 0 before the first step, n after epoch n.
        x: Epochs since the start of the run; environment steps of an agent.
        values: The metrics by name; NaN where missing.
        measures: The measures by name or name/layer.
    """

    seed: int
    task: NDArray[np.int64]
    epoch: NDArray[np.int64]
    x: Floats
    values: dict[str, Floats]
    measures: dict[str, Floats]

    def ends(self) -> NDArray[np.int64]:
        """Return the index of the last record of each task, finished or not."""
        return np.flatnonzero(np.append(np.diff(self.task) != 0, True)) if len(self.task) else np.empty(0, np.int64)


def read_history(run: Run) -> History:
    """Read the records of a run.

    Raises:
        ValueError: If a line of its metrics is malformed.
    """
    records = read_records(run)
    rows: list[tuple[int, int, Mapping[str, Any], Mapping[str, Any]]] = []
    for record in records:
        task, epoch = _place(record, "task", len(records)), _place(record, "epoch", 2**62)
        entry = {key.removeprefix(ENTRY): record[key] for key in _entry_keys(tuple(record))}
        measured = record.get(MEASURES) or {}  # Taken at the first step, i.e. at the end of the epoch before.
        if not isinstance(measured, dict):
            raise ValueError(f"{MEASURES} are {measured!r}; they must be numbers by name")
        if rows and rows[-1][:2] == (task, epoch - 1):
            rows[-1] = (*rows[-1][:3], measured)
        elif entry or measured:
            rows.append((task, epoch - 1, entry, measured))
        rows.append((task, epoch, record, {}))
    tasks = np.array([row[0] for row in rows], dtype=np.int64)
    epochs = np.array([row[1] for row in rows], dtype=np.int64)
    lengths = np.zeros(int(tasks.max(initial=-1)) + 2)
    np.maximum.at(lengths, tasks + 1, epochs)
    x = np.cumsum(lengths)[tasks] + epochs
    if _is_of_agent(run):
        at = {(record["task"], record["epoch"]): record["step"] for record in records}
        before = [0, *(at[task, int(epochs[tasks == task].max())] for task in range(len(lengths) - 1))]
        x = np.array([at.get(row[:2], before[row[0]]) for row in rows], dtype=np.float64)
    return History(
        seed=run.config.seed,
        task=tasks,
        epoch=epochs,
        x=x,
        values=_columns([row[2] for row in rows], skip=_BOOKKEEPING),
        measures=_columns([row[3] for row in rows]),
    )


@functools.lru_cache(maxsize=1000)
def _entry_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of values at a task's first step; most records have the same keys."""
    return tuple(key for key in keys if key.startswith(ENTRY))


def _place(record: Mapping[str, Any], key: str, end: int) -> int:
    """Return where a record lies; raise a ValueError if no run can write a record there."""
    value = record[key]
    if isinstance(value, int) and 0 <= value < end:
        return value
    raise ValueError(f"{key} is {value!r}; it must be 0 … {end - 1}")


def _is_of_agent(run: Run) -> bool:
    name = run.config.stream.name
    return name in streams.names() and streams.is_of_environments(name)


_NUMBERS = {int, float, bool, type(None)}


def _columns(rows: Sequence[Mapping[str, Any]], skip: Iterable[str] = ()) -> dict[str, Floats]:
    """Turn rows into columns of numbers; values that are not finite numbers become NaN."""
    names = dict.fromkeys(key for row in rows for key in row)
    left_out = set(skip)
    columns: dict[str, Floats] = {}
    for name in names:
        if name not in left_out and not name.startswith(ENTRY):
            values = [row.get(name) for row in rows]
            if not _NUMBERS.issuperset(map(type, values)):
                values = [value if isinstance(value, int | float) else None for value in values]
            column = np.array(values, dtype=float)  # None becomes NaN
            columns[name] = np.where(np.isfinite(column), column, np.nan)
    return {key: column for key, column in columns.items() if not np.isnan(column).all()}


@dataclass(frozen=True)
class Histories:
    """The records of all runs of a comparison.

    Args:
        of: The histories of each contender's runs by the contender's name, sorted by seed.
        broken: Files of metrics that cannot be read.
        x_title: What `x` counts.
        mark: What the boundaries are.
    """

    of: dict[str, list[History]]
    broken: list[Broken] = field(default_factory=list)
    x_title: str = "epochs"
    mark: str = _NEW_TASKS

    @property
    def has_new_tasks(self) -> bool:
        """Whether the task changes: no interventions in a single task."""
        return self.tasks > 1 and self.mark == _NEW_TASKS

    @property
    def names(self) -> list[str]:
        """The names of the metrics, in order of first appearance."""
        return list(dict.fromkeys(name for history in self._all() for name in history.values))

    @property
    def measures(self) -> list[str]:
        """The names of the measures, in order of first appearance."""
        return list(dict.fromkeys(name for history in self._all() for name in history.measures))

    @property
    def tasks(self) -> int:
        """The number of tasks of the longest run."""
        return max((int(history.task[-1]) + 1 for history in self._all() if len(history.task)), default=0)

    @property
    def boundaries(self) -> list[float]:
        """The epochs at which new tasks begin, in the longest run."""
        longest = max(self._all(), key=lambda history: len(history.x), default=None)
        return [] if longest is None else longest.x[longest.ends()[:-1]].tolist()

    def _all(self) -> Iterable[History]:
        return (history for histories in self.of.values() for history in histories)


def read_histories(comparison: Comparison) -> Histories:
    """Read the records of a comparison's runs, without failed and diverged runs."""
    found: dict[str, list[History]] = {}
    broken = []
    for contender in comparison.contenders:
        found[contender.name] = []
        for run in contender.runs:
            if run.status in ("failed", "diverged"):
                continue
            try:
                found[contender.name].append(read_history(run))
            except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
                broken.append(Broken(run.path / "metrics.jsonl", f"{type(error).__name__}: {error}"))
    names = {run.config.stream.name for contender in comparison.contenders for run in contender.runs}
    mark = _MARKS.get(names.pop(), _NEW_TASKS) if len(names) == 1 else _NEW_TASKS
    return Histories(found, broken, "environment steps" if comparison.is_of_agents else "epochs", mark)


@dataclass(frozen=True)
class Curve:
    """A contender's mean over seeds during training, with 95 % intervals.

    Args:
        x: Epochs since the start of the run, or tasks.
        task: The task at each point, from 0.
        epoch: The epoch in the task.
        mean: The mean over the seeds with a value.
        low: The lower end of the interval.
        high: The upper end of the interval.
    """

    x: Floats
    task: NDArray[np.int64]
    epoch: NDArray[np.int64]
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Samples:
    """A metric of a contender's runs during training.

    Args:
        x: Epochs since the start of the run, or tasks.
        task: The task at each point, from 0.
        epoch: The epoch in the task.
        values: [seeds, points]; NaN where a seed has no value.
    """

    x: Floats
    task: NDArray[np.int64]
    epoch: NDArray[np.int64]
    values: Floats


def gather(histories: Sequence[History], name: str, *, points: int, measure: bool = False) -> Samples | None:
    """Collect a metric or measure from several runs.

    Args:
        histories: The runs of one contender.
        name: The metric or measure.
        points: The approximate number of points to keep: the first and last of every task, and evenly spaced ones.
        measure: Whether `name` is a measure.

    Returns:
        The samples; None if no run recorded it.
    """
    found: dict[tuple[int, int], float] = {}
    columns = []
    for history in histories:
        column = (history.measures if measure else history.values).get(name)
        if column is None:
            continue
        present = np.flatnonzero(np.isfinite(column))
        keys = list(zip(history.task[present].tolist(), history.epoch[present].tolist(), strict=True))
        found |= dict(zip(keys, history.x[present].tolist(), strict=True))
        columns.append(dict(zip(keys, column[present].tolist(), strict=True)))
    if not found:
        return None
    keys = _thin(sorted(found), points)
    return Samples(
        x=np.array([found[key] for key in keys]),
        task=np.array([task for task, _ in keys], dtype=np.int64),
        epoch=np.array([epoch for _, epoch in keys], dtype=np.int64),
        values=np.array([[column.get(key, np.nan) for key in keys] for column in columns]),
    )


def average(samples: Samples, within: tuple[float, float] = ANYTHING) -> Curve:
    """Average over seeds, with 95 % intervals that stay within the limits of the metric."""
    return Curve(samples.x, samples.task, samples.epoch, *bands(samples.values, within))


def at_task_ends(histories: Sequence[History], name: str) -> Floats:
    """Return a metric at the end of each task: [seeds, tasks], NaN for unfinished tasks."""
    tasks = max((int(history.task[-1]) + 1 for history in histories if len(history.task)), default=0)
    table = np.full((len(histories), tasks), np.nan)
    for row, history in zip(table, histories, strict=True):
        end = next((each for each in _AT_AN_END if each in history.values), None)
        if name in history.values and end is not None:
            ends = np.flatnonzero(np.isfinite(history.values[end]))
            row[history.task[ends]] = history.values[name][ends]
    return table


def _thin(keys: list[tuple[int, int]], points: int) -> list[tuple[int, int]]:
    """Keep about `points` of (task, epoch), including the first and last of every task.

    With many tasks only the last of every task is kept.
    """
    if keys[-1][0] >= MANY_TASKS:
        return [key for key, after in zip(keys, [*keys[1:], (-1, 0)], strict=True) if after[0] != key[0]]
    if len(keys) <= points:
        return keys
    kept = {int(place) for place in np.linspace(0, len(keys) - 1, points)}
    kept |= {
        place
        for place, (task, _) in enumerate(keys)
        if place in (0, len(keys) - 1) or keys[place - 1][0] != task or keys[place + 1][0] != task
    }
    return [keys[place] for place in sorted(kept)]
