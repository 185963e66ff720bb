"""The report of experiments: which method to use, by how much, and how sure that is.

What it needs beyond torch is imported when a report is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pliant._importing import naming_extra

if TYPE_CHECKING:
    from pliant.experiments.report.document import Report
    from pliant.experiments.store import Run

__all__ = ["report"]


def report(runs: str | Path | Iterable[str | Path | Run]) -> Report:
    """Make a report of runs; a notebook shows it as a page.

    Args:
        runs: An experiment's folder, several of them, or runs that were loaded already.

    Returns:
        The report: print it, look at its `sections`, or `save()` it as a page, a table or figures.

    Raises:
        ValueError: If there are no runs.
        ImportError: If what reports need is not installed.
    """
    with naming_extra("a report", "report"):
        from pliant.experiments.report.document import make_report
    return make_report(runs)
