"""A comparison: contenders with their runs, and the recipe and selection of their folders."""

import contextlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pliant import streams
from pliant.experiments.run_config import Part, describe
from pliant.experiments.store import Run, Status

Role = Literal["vanilla", "fresh", "method"]


@dataclass(frozen=True)
class Contender:
    """A row of the comparison: one method with one setting, or a baseline.

    Args:
        name: The name in the report.
        settings: Its methods with their settings.
        role: "vanilla": plain training; "fresh": an untrained network at every task; else "method".
        label: The name in the recipe.
        runs: Its runs of any status, sorted by seed.
    """

    name: str
    settings: str
    role: Role
    label: str
    runs: tuple[Run, ...]

    @cached_property
    def effective(self) -> tuple[Part, ...]:
        """Its methods with the settings that a run recorded, defaults included; else with those given."""
        for run in self.runs:
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                for event in reversed(run.events):
                    if "methods" in event:
                        return tuple(Part(**part) for part in event["methods"])
        return self.runs[0].config.methods

    @property
    def written_settings(self) -> str:
        """Its effective settings in one line; empty if it has none or its name already contains them."""
        parts = [part for part in self.effective if part.options]
        if "|" not in self.name and all(f"{key}=" in self.name for part in parts for key in part.options):
            return ""
        return parts[0].written_options if len(self.effective) == 1 else describe(parts)

    def values(self, metric: str) -> dict[int, float]:
        """Return the finite results of a metric by seed."""
        return {run.config.seed: run.result[metric] for run in self.runs if metric in run.result}

    def count(self, status: Status) -> int:
        """Return the number of runs with a status."""
        return sum(run.status == status for run in self.runs)

    @property
    def diverged(self) -> int:
        """The number of diverged runs."""
        return self.count("diverged")


@dataclass(frozen=True)
class Broken:
    """A file or folder that cannot be read.

    Args:
        path: The path.
        reason: What is wrong with it.
    """

    path: Path
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Runs to compare with each other.

    Args:
        title: The title.
        headline: The metric that decides.
        contenders: The contenders, in the recipe's order.
        trials: Runs with settings that were tried, chosen or not.
        recipe: The recipe; None if unknown.
        selection: The chosen settings, and the data and scores that decided; empty if there was no choice.
        folders: The folders of the runs.
        broken: Files and folders that could not be read.
        mixed: One sentence for each change of data or network between the runs.
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
        """The labels and seeds of the recipe without a run."""
        begun = {(run.config.label, run.config.seed) for run in self.runs}
        recipe = self.recipe or {"methods": [], "seeds": []}
        asked = [(entry["label"], seed) for entry in recipe["methods"] for seed in recipe["seeds"]]
        return [each for each in asked if each not in begun]

    @property
    def is_of_agents(self) -> bool:
        """Whether agents learn in environments."""
        used = {run.config.stream.name for run in (*self.runs, *self.trials)} & set(streams.names())
        return any(map(streams.is_of_environments, used))

    @property
    def tasks_alike(self) -> bool:
        """Whether all tasks are equally hard."""
        used = {run.config.stream.name for run in self.runs}
        return used <= set(streams.names()) and all(streams.stream_class(name).alike for name in used)

    def baseline(self, role: Role) -> Contender | None:
        """Return the first contender with a role."""
        return next((contender for contender in self.contenders if contender.role == role), None)

    @property
    def choices(self) -> dict[str, dict[str, Any]]:
        """The chosen settings, by label."""
        return dict(self.selection.get("labels", {}))

    @property
    def untuned(self) -> list[str]:
        """The names of the contenders with settings that were not chosen in this comparison."""
        return [each.name for each in self.contenders if each.label not in self.choices and each.written_settings]

    @property
    def metric(self) -> str:
        """The metric whose last value, or mean over tasks, is the headline."""
        return self.headline.removeprefix("final_").removeprefix("mean_").removeprefix("later_")

    @property
    def metrics(self) -> list[str]:
        """The metrics of the results, the headline first."""
        names = dict.fromkeys([self.headline])
        for run in self.runs:
            names |= dict.fromkeys(run.result)
        return [name for name in names if any(name in run.result for run in self.runs)]
