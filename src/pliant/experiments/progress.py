"""What the terminal shows while runs come along."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pliant.experiments.run import Outcome
from pliant.experiments.run_config import SELECTION_SEEDS, RunConfig, full_name
from pliant.experiments.store import last_progress

_MOST_BARS = 16
"""How many runs get a bar of their own: a cluster may do more than a terminal has lines."""


class LiveProgress:
    """A bar over all runs with the time left, and one for each run at work.

    How far a run is stands in its folder, so it does not matter which process, machine or command does it.
    Where there is no terminal, a line is printed as each run ends.

    Args:
        root: The experiment's folder.
        console: Where to show it.
    """

    def __init__(self, root: Path, console: Console) -> None:
        self._root = root
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),  # Labels are the user's.
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
        """Show how much there is to do."""
        self._ended, self._count = 0, len(waiting)
        if done:
            self._console.print(f"{len(done)} of {len(done) + len(waiting)} runs are done already")
        if self._total is not None:
            self._bars.remove_task(self._total)
        self._total = self._bars.add_task(f"{len(waiting)} runs", total=len(waiting))

    def tick(self, active: Iterable[RunConfig]) -> None:
        """Show how far the runs at work are."""
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
        """Count a run that ended, and name it if it did not end well or there is no bar."""
        self._ended += 1
        reason = outcome.error.strip().rpartition("\n")[2]
        lines = list(outcome.notes)
        if outcome.status != "finished" or not self._console.is_terminal:
            end = f"{outcome.status}: {reason}" if reason else outcome.status
            lines.append(f"[{self._ended}/{self._count}] {_name(config)}: {end}")
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _name(config: RunConfig) -> str:
    """Name a run by what tells it from the others: its seed, and while settings are chosen these."""
    if config.purpose == "selection":
        return f"choosing: {full_name(*config.variant)}, selection seed {config.seed - SELECTION_SEEDS}"
    return f"{config.label}, seed {config.seed}"
