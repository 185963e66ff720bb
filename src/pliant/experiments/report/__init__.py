"""The report of experiments: which method is best, by how much, and how certain this is.

Packages beyond torch are imported when a report is made.
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
    """Make a report of runs. A notebook shows it as a page.

    Args:
        runs: An experiment's folder, several folders, or loaded runs.

    Returns:
        The report: print it, inspect its `sections`, or `save()` it as a page, a table or figures.

    Raises:
        ValueError: If there are no runs.
        ImportError: If the packages of the extra `report` are missing.
    """
    with naming_extra("a report", "report"):
        from pliant.experiments.report.document import make_report
    return make_report(runs)
