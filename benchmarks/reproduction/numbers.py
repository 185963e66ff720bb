"""Numbers computed from a run's records, beyond its result."""

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean
from typing import Any

from scipy import stats

from pliant.diagnostics import measures
from pliant.experiments.store import Run

EXACT, APPROXIMATIONS = "hessian_exact_rank", {"hessian_rank", "fisher_rank", "gauss_newton_rank"}
LATE_TESTS = 10
Record = dict[str, Any]
"""The metrics of an epoch."""


def more_numbers(run: Run) -> Iterator[tuple[str, float]]:
    """Yield numbers computed from a run's records, beyond its result.

    - `best_test_accuracy` is the best of the last task, if it has several tests; `best_gain` is this minus the best of
      the first task. `late_test_accuracy` is the mean of the last 10 tests, which varies less than the last test.
    - `mean_drop` is the test accuracy lost at the start of a task, before its first step; `mean_first_loss` the
      accuracy lost after its first epoch. Both are means over all tasks but the first. With BatchNorm `mean_drop` means
      little, because the running statistics belong to the weights before a method changed them.
    - `least_gain` is the smallest difference between the mean of a task's last 10 tests and that of the task before.
    - `early_train_error` and `late_train_error` are the training error at the ends of the first and of the last fifth
      of the tasks, `first_train_error` that at the end of the first task. `train_error_growth` is the late error minus
      the first, because plasticity may be lost as early as the second task. `train_error_trend` is the late error minus
      the early one, which varies less between seeds. `online_error_growth` is the same trend of the online error, since
      an untrained network learns slowly in its first task.
    - `MEASURE_change` is the difference of a measure between the first fifth of the tasks and the last, divided by its
      value in the first; it is missing if only the first value is zero. `MEASURE_mean` is over all tasks. The value of
      a measure in a task is that at its first step; for measures of an optimizer step it is the mean over all measured
      steps but the first, which is atypical. `MEASURE_late_change` is from the second to last fifth to the last.
    - `MEASURE_last` is the last value, in runs of a single task.
    - Of an agent, `late_overestimation` and `late_MEASURE` are means over the last third of the last task. The name of
      a measure ends with the network if there are several: `late_weight_l2 (critic.0)`.
    - `MEASURE_first_gap` and `MEASURE_late_gap` of an approximation of the Hessian's rank are its mean distance from
      that rank in the first and the last fifth of the tasks, `MEASURE_gap_growth` their difference, and
      `MEASURE_correlation` is Pearson's, over tasks; it is missing if a rank never changes.
    """
    tasks = split_tasks(run)
    if "evaluation_return" in tasks[-1][-1]:
        yield from agent_numbers(tasks[-1])
        return
    yield from test_numbers(tasks)
    if len(tasks) > 1 and all("train_accuracy" in records[-1] for records in tasks):  # Not if a task was left early.
        errors = end_errors(tasks)
        early, late = ends_of(errors)
        yield "first_train_error", errors[0]
        yield "early_train_error", early
        yield "late_train_error", late
        yield "train_error_growth", late - errors[0]
        yield "train_error_trend", late - early
        early, late = ends_of([1 - records[-1]["task_online_accuracy"] for records in tasks])
        yield "online_error_growth", late - early
    series = {name: values for name in run.config.measures if (values := take_measure(name, tasks))}
    for name, values in series.items():
        if len(tasks) == 1:
            yield f"{name}_last", values[-1]
        else:
            first, late = ends_of(values)
            yield f"{name}_mean", fmean(values)
            if first or not late:
                yield f"{name}_change", (late - first) / abs(first) if first else 0.0
            part = fifth_of(values)
            if before := fmean(values[-2 * part : -part]):
                yield f"{name}_late_change", (late - before) / abs(before)
    for name in series.keys() & APPROXIMATIONS if EXACT in series else ():
        first, late = ends_of([abs(one - other) for one, other in zip(series[name], series[EXACT], strict=True)])
        yield f"{name}_first_gap", first
        yield f"{name}_late_gap", late
        yield f"{name}_gap_growth", late - first
        if len(set(series[name])) > 1 and len(set(series[EXACT])) > 1:
            yield f"{name}_correlation", float(stats.pearsonr(series[name], series[EXACT]).statistic)


def split_tasks(run: Run) -> list[list[Record]]:
    """Return a run's records by task."""
    by_task: dict[int, list[Record]] = {}
    for record in run.records:
        by_task.setdefault(record["task"], []).append(record)
    return [by_task[index] for index in sorted(by_task)]


def end_errors(tasks: list[list[Record]]) -> list[float]:
    """Return the training error at the end of each task."""
    return [1 - records[-1]["train_accuracy"] for records in tasks]


def test_numbers(tasks: list[list[Record]]) -> Iterator[tuple[str, float]]:
    """Yield numbers of the test accuracy, in streams with a test set."""
    tested = [[record["test_accuracy"] for record in records if "test_accuracy" in record] for records in tasks]
    if not tested[-1]:
        return
    if len(tested[-1]) > 1:
        yield "best_test_accuracy", max(tested[-1])
    if len(tested[-1]) >= LATE_TESTS:
        yield "late_test_accuracy", fmean(tested[-1][-LATE_TESTS:])
    if len(tasks) > 1:
        yield "best_gain", max(tested[-1]) - max(tested[0])
        before = [values[-1] for values in tested[:-1]]
        entries = [records[0]["entry_test_accuracy"] for records in tasks[1:]]
        yield "mean_drop", fmean(before) - fmean(entries)
        if all(len(values) >= LATE_TESTS for values in tested):
            ends = [fmean(values[-LATE_TESTS:]) for values in tested]
            yield "least_gain", min(after - end for end, after in pairwise(ends))
        if all("test_accuracy" in records[0] for records in tasks):
            yield "mean_first_loss", fmean(before) - fmean(values[0] for values in tested[1:])


def agent_numbers(records: list[Record]) -> Iterator[tuple[str, float]]:
    """Yield the means over the last third of a task's records: of the overestimation, and of each measure.

    Example:
        >>> records = [{"overestimation": float(n), "measures": {"weight_l2": n / 2}} for n in range(6)]
        >>> dict(agent_numbers(records))
        {'late_overestimation': 4.5, 'late_weight_l2': 2.25}
    """
    late = records[-math.ceil(len(records) / 3) :]
    yield "late_overestimation", fmean(record["overestimation"] for record in late)
    for name in late[0]["measures"]:
        values = [record["measures"].get(name) for record in late]
        if None not in values:
            yield f"late_{name}", fmean(values)


def take_measure(name: str, tasks: list[list[Record]]) -> list[float]:
    """Return a measure's value in each task, or all values of a single task; [] if a value is missing."""
    taken = [[record["measures"].get(name) for record in records if "measures" in record] for records in tasks]
    if len(tasks) > 1:
        stepwise = "step" in measures.info(name).needs
        taken = [(values[1:] or values) if stepwise else values[:1] for values in taken]
    if any(value is None for values in taken for value in values):
        return []
    return taken[0] if len(tasks) == 1 else [fmean(values) for values in taken]


def ends_of(values: list[float]) -> tuple[float, float]:
    """Return the means over the first and the last fifth of the values.

    Example:
        >>> ends_of([1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 7.0])
        (2.0, 6.0)
    """
    part = fifth_of(values)
    return fmean(values[:part]), fmean(values[-part:])


def fifth_of(values: list[float]) -> int:
    """Return the number of values in a fifth, at least one."""
    return max(1, len(values) // 5)
