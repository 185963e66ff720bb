"""Results as a table: mean and 95 % confidence interval over seeds, for every method."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pliant.experiments.store import Run

# 97.5 % points of Student's t with 1 … 10 degrees of freedom.
_STUDENT = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and how far off it may be.

    Args:
        mean: The mean.
        half: Half the width of the 95 % confidence interval (Student's t); NaN for a single value.
        count: How many values.
    """

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if math.isnan(self.half) else f"{self.mean:.4f} ± {self.half:.4f}"


def interval(values: Sequence[float]) -> Interval:
    """Estimate a mean with its 95 % confidence interval.

    Example:
        >>> str(interval([1.0, 2.0, 3.0]))
        '2.0000 ± 2.4841'
    """
    n = len(values)
    if n == 0:
        raise ValueError("values is empty; a mean needs at least one")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, student_quantile(n - 1) * math.sqrt(variance / n), n)


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % point of Student's t distribution, to 4 digits.

    Beyond 10 degrees of freedom by its expansion around the normal distribution's (Abramowitz & Stegun
    26.7.5).
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


@dataclass(frozen=True)
class Row:
    """What one method with one setting came to.

    Args:
        label: The method.
        settings: Its settings.
        numbers: Every number of the results, over the seeds that finished.
        bad: How many seeds failed or diverged.
    """

    label: str
    settings: str
    numbers: dict[str, Interval]
    bad: int


def chosen(rows: Iterable[Row], selection: Mapping[str, Any]) -> list[Row]:
    """Keep, where settings were chosen from several, the rows of the chosen ones.

    Args:
        rows: What `tabulate` returned.
        selection: What `store.load_selection` returned.
    """
    labels = selection.get("labels", {})
    return [row for row in rows if row.label not in labels or labels[row.label]["chosen"] == row.settings]


def tabulate(runs: Iterable[Run]) -> list[Row]:
    """Bring runs that differ in their seeds only into one row.

    Args:
        runs: Runs of one experiment; those for selection and unfinished ones are left out.

    Returns:
        A row for every method and setting, in the order of first appearance.
    """
    groups: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        if run.config.purpose == "result" and run.status != "unfinished":
            groups[run.config.variant].append(run)
    rows = []
    for (label, settings), members in groups.items():
        finished = sorted((run for run in members if run.status == "finished"), key=lambda run: run.config.seed)
        names = finished[0].result if finished else {}
        numbers = {name: interval([run.result[name] for run in finished]) for name in names}
        rows.append(Row(label, settings, numbers, len(members) - len(finished)))
    return rows
