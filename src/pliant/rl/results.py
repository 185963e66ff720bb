"""The results of an agent's run, from its records."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

_LATE = 1 / 3
"""The last part of a task whose evaluations make up the late return."""
_LATER_TASKS = 0.4
"""The last part of the tasks that `later_…` is the mean over."""
_AT_ENDS = ("late_return", "task_return", "evaluation_return", "overestimation")
_OF_RUNS = ("run_late_return", "run_return", "run_late_overestimation")
RESULTS = (*(f"{which}_{name}" for name in _AT_ENDS for which in ("final", "later", "mean")), *_OF_RUNS)
"""The metrics of a run's result."""


def summarize_task(evaluations: Sequence[float]) -> dict[str, float]:
    """Summarize a task's evaluations: the mean over its last third, and over all of it.

    Example:
        >>> summarize_task([0.0, 10.0, 10.0, 20.0, 30.0])
        {'late_return': 25.0, 'task_return': 14.0}
    """
    return {"late_return": fmean(_last(evaluations, _LATE)), "task_return": fmean(evaluations)}


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Summarize a run's records in its result.

    Args:
        records: The records of a run.

    Returns:
        `final_…`: the value at the end of the last task; `mean_…`: the mean over the ends of all tasks; `later_…`: the
        mean over the last 40 % of the tasks. `run_…` does not depend on where tasks end: the mean over all evaluations
        of the run, or over its last third.
    """
    ends = [record for record in records if "late_return" in record]
    result: dict[str, float] = {}
    for name in _AT_ENDS:
        values = [record[name] for record in ends]
        result[f"final_{name}"] = values[-1]
        result[f"later_{name}"] = fmean(_last(values, _LATER_TASKS))
        result[f"mean_{name}"] = fmean(values)
    returns = [record["evaluation_return"] for record in records]
    result["run_return"] = fmean(returns)
    result["run_late_return"] = fmean(_last(returns, _LATE))
    result["run_late_overestimation"] = fmean(_last([record["overestimation"] for record in records], _LATE))
    return result


def _last(values: Sequence[float], part: float) -> Sequence[float]:
    return values[-math.ceil(part * len(values)) :]
