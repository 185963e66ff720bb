"""Progress bars in the terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pliant.experiments.run import Outcome
from pliant.experiments.run_config import SELECTION_SEEDS, RunConfig, full_name
from pliant.experiments.store import last_progress

_MOST_BARS = 16
"""The number of runs with their own bar; a terminal has few lines."""


class LiveProgress:
    """One bar for all runs with the time left, and one for each active run.

    The progress of a run is read from its folder, so any process or machine may execute it. Without a terminal, one
    line is printed when a run ends.

    Args:
        root: The folder of the experiment.
        console: Where to print.
    """

    def __init__(self, root: Path, console: Console) -> None:
        self._root = root
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),  # A label may hold brackets.
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar_of: dict[str, TaskID] = {}
        self._ended = 0
        self._count = 0
        self._total: TaskID | None = None

    def __enter__(self) -> "LiveProgress":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def begin(self, waiting: Sequence[RunConfig], done: Sequence[RunConfig]) -> None:
        """Show the number of runs to do."""
        self._ended, self._count = 0, len(waiting)
        if done:
            self._console.print(f"{len(done)} of {len(done) + len(waiting)} runs are done already")
        if self._total is not None:
            self._bars.remove_task(self._total)
        self._total = self._bars.add_task(f"{len(waiting)} runs", total=len(waiting))

    def tick(self, active: Iterable[RunConfig]) -> None:
        """Update the bars."""
        if self._bars.disable:
            return
        at_work = {config.id: config for config in active}
        for gone in self._bar_of.keys() - at_work.keys():
            self._bars.remove_task(self._bar_of.pop(gone))
        fraction = 0.0
        for run, config in at_work.items():
            progress = last_progress(self._root / "runs" / run)
            fraction += progress
            if progress and run not in self._bar_of and len(self._bar_of) < _MOST_BARS:
                self._bar_of[run] = self._bars.add_task(f"  {_name(config)}", total=1.0)
            if run in self._bar_of:
                self._bars.update(self._bar_of[run], completed=progress)
        if self._total is not None:
            self._bars.update(self._total, completed=self._ended + fraction)

    def ended(self, config: RunConfig, outcome: Outcome) -> None:
        """Count a run that ended; print its name if it did not finish or there is no terminal."""
        self._ended += 1
        reason = outcome.error.strip().rpartition("\n")[2]
        lines = list(outcome.notes)
        if outcome.status != "finished" or not self._console.is_terminal:
            end = f"{outcome.status}: {reason}" if reason else outcome.status
            lines.append(f"[{self._ended}/{self._count}] {_name(config)}: {end}")
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _name(config: RunConfig) -> str:
    """Return the label and the seed of a run; for a run that chooses settings, the settings too."""
    if config.purpose == "selection":
        return f"choosing: {full_name(*config.variant)}, selection seed {config.seed - SELECTION_SEEDS}"
    return f"{config.label}, seed {config.seed}"
