"""What is compared: contenders with their runs, and what their folders say beside them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pliant import streams
from pliant.experiments.store import Run, Status

Role = Literal["vanilla", "fresh", "method"]


@dataclass(frozen=True)
class Contender:
    """A row of the comparison: one method with one setting, or a baseline.

    Args:
        name: What the report calls it.
        settings: Its methods with their settings.
        role: "vanilla": plain training; "fresh": an untrained network at every task; else "method".
        label: What the recipe calls it.
        runs: Its runs, however they ended, in order of their seeds.
    """

    name: str
    settings: str
    role: Role
    label: str
    runs: tuple[Run, ...]

    def values(self, metric: str) -> dict[int, float]:
        """A number of the results for each seed that finished with one that is finite."""
        return {run.config.seed: run.result[metric] for run in self.runs if metric in run.result}

    def count(self, status: Status) -> int:
        """How many seeds ended in this way."""
        return sum(run.status == status for run in self.runs)

    @property
    def diverged(self) -> int:
        """How many seeds have diverged."""
        return self.count("diverged")


@dataclass(frozen=True)
class Broken:
    """A folder that cannot be read.

    Args:
        path: Where it is.
        reason: What is wrong with it.
    """

    path: Path
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Runs that answer one question.

    Args:
        title: What it is called.
        headline: The number of a run's result that decides.
        contenders: What is compared, in the recipe's order.
        trials: Runs with settings that were tried, chosen or not.
        recipe: What was asked for; None if the folder does not tell.
        selection: Which settings were chosen, by what, and how that is told; empty if there was nothing to choose.
        folders: Where the runs lie.
        broken: What could not be read there.
        mixed: What was changed between some of the runs and others, a sentence each.
    """

    title: str
    headline: str
    contenders: tuple[Contender, ...]
    trials: tuple[Run, ...] = ()
    recipe: dict[str, Any] | None = None
    selection: dict[str, Any] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    broken: tuple[Broken, ...] = ()
    mixed: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """All runs of the contenders."""
        return [run for contender in self.contenders for run in contender.runs]

    @property
    def not_begun(self) -> list[tuple[str, int]]:
        """Labels and seeds that the recipe asks for and that there is no run of yet."""
        begun = {(run.config.label, run.config.seed) for run in self.runs}
        recipe = self.recipe or {"methods": [], "seeds": []}
        asked = [(entry["label"], seed) for entry in recipe["methods"] for seed in recipe["seeds"]]
        return [each for each in asked if each not in begun]

    @property
    def tasks_alike(self) -> bool:
        """Whether all tasks are equally hard."""
        used = {run.config.stream.name for run in self.runs}
        return used <= set(streams.names()) and all(streams.stream_class(name).alike for name in used)

    def baseline(self, role: Role) -> Contender | None:
        """The contender in this role, the first if there are several."""
        return next((contender for contender in self.contenders if contender.role == role), None)

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """What was chosen, by label."""
        return dict(self.selection.get("labels", {}))

    @property
    def metric(self) -> str:
        """What the headline is the last value, or the mean over tasks, of."""
        return self.headline.removeprefix("final_").removeprefix("mean_")

    @property
    def metrics(self) -> list[str]:
        """The numbers that results have, the headline first."""
        names = dict.fromkeys([self.headline])
        for run in self.runs:
            names |= dict.fromkeys(run.result)
        return [name for name in names if any(name in run.result for run in self.runs)]
