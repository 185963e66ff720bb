"""A report: comparisons, analyzed, worded and drawn, ready for every format."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pliant.experiments.report.analysis import Analysis
from pliant.experiments.report.answer import Answer, answer
from pliant.experiments.report.chart_style import Series, assign_series
from pliant.experiments.report.comparison import Broken, Comparison, Contender
from pliant.experiments.report.formatting import count, name_of, sentence
from pliant.experiments.report.histories import Histories, read_histories
from pliant.experiments.report.table import ResultTable, metric_table, result_table
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import Run

if TYPE_CHECKING:
    from pliant.experiments.report.figures import Figure


@dataclass(frozen=True)
class Failure:
    """A run that did not end well, or a folder that cannot be read.

    Args:
        what: The run's name, or the file's path.
        status: How it ended.
        reason: Why, in a line.
        details: The whole message.
    """

    what: str
    status: str
    reason: str
    details: str


@dataclass(frozen=True)
class Group:
    """Figures that belong together.

    Args:
        name: For links.
        title: What they are about.
        lead: What a reader should know first.
        figures: The figures.
        size: How much room each takes: "wide", "half" or "small".
    """

    name: str
    title: str
    lead: str
    figures: "list[Figure]"
    size: str


class Section:
    """One comparison in a report.

    Args:
        comparison: The runs.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.analysis = Analysis(comparison)

    @property
    def title(self) -> str:
        """What the comparison is called."""
        return self.comparison.title

    @cached_property
    def answer(self) -> Answer:
        """What the comparison says."""
        return answer(self.analysis)

    @cached_property
    def table(self) -> ResultTable:
        """The table of results."""
        return result_table(self.analysis)

    @cached_property
    def metrics(self) -> ResultTable | None:
        """The table of all metrics, if there are more than the first one shows."""
        return metric_table(self.analysis)

    @cached_property
    def series(self) -> list[Series]:
        """How contenders appear in charts, best first."""
        return assign_series([row.contender for row in self.analysis.rows])

    @cached_property
    def histories(self) -> Histories:
        """What the runs recorded."""
        return read_histories(self.comparison)

    @cached_property
    def groups(self) -> list[Group]:
        """The figures, in the order in which they are read."""
        # Only here: the answer and the table are told without what draws.
        from pliant.experiments.report import measure_charts, result_charts

        comparison, histories, series = self.comparison, self.histories, self.series
        on_validation = comparison.selection.get("on") == "validation"
        judged_on = "held-out training data" if on_validation else "the results themselves"
        association = measure_charts.association_figure(measure_charts.associations(comparison, histories))
        groups = [
            Group("differences", "", "", _known([result_charts.differences(self.analysis, series)]), "wide"),
            Group(
                "curves",
                "Learning curves",
                "From the first epoch to the last, over all tasks.",
                result_charts.learning_curves(histories, series),
                "wide",
            ),
            Group(
                "tasks",
                "The end of each task" + (", against a fresh network" if comparison.baseline("fresh") else ""),
                "Plasticity itself: can the network still learn what a new one learns?",
                result_charts.task_ends(comparison, histories, series),
                "half",
            ),
            Group(
                "sensitivity",
                "Sensitivity to settings",
                f"{name_of(comparison.headline).capitalize()} for each value of a setting, with the best of the "
                f"others, judged on {judged_on}. A large dot is what was chosen.",
                result_charts.sensitivity(comparison, series),
                "small",
            ),
            Group(
                "measures",
                "Measures over time",
                "What the network says about itself on the way: means over seeds with 95 % intervals.",
                measure_charts.measures_over_time(histories, series),
                "small",
            ),
            Group(
                "associations",
                "Which measures go with plasticity",
                "",
                _known([association]),
                "wide",
            ),
            Group(
                "growth",
                "Growth of weights, layer by layer",
                "The norm of each layer's weights relative to its start: a chart a method, a line a layer from the "
                "first (blue) to the last (green), all on one scale.",
                measure_charts.layer_growth(comparison, histories, series),
                "small",
            ),
        ]
        return [group for group in groups if group.figures]

    @property
    def figures(self) -> "list[Figure]":
        """All figures."""
        return [figure for group in self.groups for figure in group.figures]

    @cached_property
    def failures(self) -> list[Failure]:
        """Runs that did not end well, and what cannot be read."""
        runs = {run.id: run for run in (*self.comparison.runs, *self.comparison.trials)}
        ended_badly = [_failed(run) for run in runs.values() if run.status in ("failed", "diverged")]
        return ended_badly + [_unreadable(broken) for broken in (*self.comparison.broken, *self.histories.broken)]

    @property
    def facts(self) -> list[str]:
        """What was compared, in a few words each."""
        runs = self.comparison.runs
        seeds = {run.config.seed for run in runs}
        finished = sum(run.status == "finished" for run in runs)
        baselines = sum(contender.role != "method" for contender in self.comparison.contenders)
        facts = [
            count(len(self.comparison.contenders) - baselines, "method"),
            *([count(baselines, "baseline")] if baselines else []),
            count(len(seeds), "seed"),
            f"{finished} of {count(len(runs), 'run')} finished",
        ]
        choosing = sum(run.config.purpose == "selection" for run in self.comparison.trials)
        if choosing:
            facts.append(f"{count(choosing, 'run')} to choose settings")
        return facts

    @property
    def setting(self) -> dict[str, str]:
        """Data, network, stream, training and device."""
        return {
            name: values[0] if len(values) == 1 else "differs, see the methods' settings"
            for name, values in self._settings.items()
        }

    def settings_of(self, contender: Contender) -> str:
        """A contender's methods with their settings, and what else is its own."""
        plain = "an untrained network at every task" if contender.role == "fresh" else "nothing attached"
        described = _describe(contender.runs[0].config)
        own = [f"{name} {described[name]}" for name, values in self._settings.items() if len(values) > 1]
        return "; ".join([contender.settings or plain, *own])

    @property
    def choices(self) -> list[str]:
        """Which settings were chosen and by what, a sentence each."""
        return [sentence(choice["told"]) for choice in self.comparison.choices.values()]

    @cached_property
    def _settings(self) -> dict[str, list[str]]:
        """Every value that a part of the setting has among the runs."""
        found: dict[str, list[str]] = {}
        for run in self.comparison.runs or self.comparison.trials:
            for name, value in _describe(run.config).items():
                if value not in found.setdefault(name, []):
                    found[name].append(value)
        return found

    @cached_property
    def environment(self) -> dict[str, str]:
        """Where the runs took place: what the first run of each contender says, every value that occurs."""
        found: dict[str, dict[str, None]] = {}
        for contender in self.comparison.contenders:
            for key, value in _environment(contender.runs[0]).items():
                if key != "pid" and value is not None:
                    found.setdefault(key, {})[_flat(value)] = None
        return {key: ", ".join(values) for key, values in found.items()}


def _describe(config: RunConfig) -> dict[str, str]:
    training = {key: value for key, value in vars(config.training).items() if value not in (None, ())}
    return {
        "data": str(config.data),
        "network": str(config.model),
        "stream": str(config.stream),
        "training": ", ".join(f"{key}={value}" for key, value in training.items()),
        "device": config.device,
    }


def _environment(run: Run) -> dict[str, Any]:
    try:
        return dict(next(event["environment"] for event in reversed(run.events) if event.get("event") == "start"))
    except (StopIteration, KeyError, ValueError, OSError):
        return {}


def _flat(value: Any) -> str:
    return ", ".join(f"{key} {_flat(item)}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _failed(run: Run) -> Failure:
    return Failure(run.id, run.status, run.error.strip().rpartition("\n")[2], run.error.strip())


def _unreadable(broken: Broken) -> Failure:
    return Failure(str(broken.path), "unreadable", broken.reason.partition("\n")[0], broken.reason)


def _known(figures: "Iterable[Figure | None]") -> "list[Figure]":
    return [figure for figure in figures if figure is not None]
