"""The report of runs as an object: shown in a notebook, printed in a terminal, saved in any format."""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant import streams
from pliant._files import write_atomically
from pliant._importing import naming_extra
from pliant._terminal import printable
from pliant._validation import check_choice
from pliant.experiments.report import text_formats as text
from pliant.experiments.report.analysis import Analysis
from pliant.experiments.report.answer import Answer, answer
from pliant.experiments.report.chart_style import Series, assign_series
from pliant.experiments.report.comparison import Broken, Comparison, Contender
from pliant.experiments.report.folders import find_experiments
from pliant.experiments.report.formatting import count, name_of, sentence
from pliant.experiments.report.grouping import compare_folders, compare_runs
from pliant.experiments.report.histories import Histories, read_histories
from pliant.experiments.report.table import ResultTable, metric_table, result_table
from pliant.experiments.run_config import RunConfig, describe
from pliant.experiments.store import Run

if TYPE_CHECKING:
    from rich.console import Console

    from pliant.experiments.report.figures import Figure

DOCUMENTS = ("html", "md", "csv", "tex")
FIGURES = ("png", "svg", "pdf")
FORMATS = (*DOCUMENTS, *FIGURES)


def make_report(runs: str | Path | Iterable[str | Path | Run]) -> "Report":
    """Make a report of folders or runs; see `pliant.report`."""
    if isinstance(runs, str | Path):
        runs = [runs]
    given = list(runs)
    loaded = [run for run in given if isinstance(run, Run)]
    folders = [each for folder in given if not isinstance(folder, Run) for each in find_experiments(Path(folder))]
    if loaded and folders:
        raise ValueError("runs holds both folders and runs; pass only one kind")
    comparisons = compare_folders(folders) if folders else compare_runs(loaded)
    return Report([Section(comparison) for comparison in comparisons])


class Report:
    """The results of one or more comparisons.

    Args:
        sections: The comparisons, each with its `answer`, `table` and `figures`.
    """

    def __init__(self, sections: "Sequence[Section]") -> None:
        self.sections = list(sections)

    @property
    def title(self) -> str:
        """The title of the first comparison, and the number of others."""
        first = self.sections[0].title
        return first if len(self.sections) == 1 else f"{first}, and {len(self.sections) - 1} more"

    def __str__(self) -> str:
        return "\n".join(str(section.answer) for section in self.sections)

    def _repr_html_(self) -> str:
        """Return the page inside a frame, which keeps its styles apart from the notebook's."""
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" title="Pliant report" style="width:100%;height:80vh;border:0"></iframe>'

    def to_html(self) -> str:
        """Return the page as one self-contained HTML document."""
        with naming_extra("a page", "report"):
            from pliant.experiments.report.page import render_page

        return render_page(self.sections, self.title)

    def save(self, target: str | Path, format: str | None = None) -> list[Path]:
        """Write the report.

        Args:
            target: The file, or the folder for figures.
            format: html, md, csv or tex for one file; png, svg or pdf for one file per figure. By default the
                target's suffix.

        Returns:
            The written files.

        Raises:
            ValueError: If the format is unknown.
        """
        path = Path(target)
        chosen = format or path.suffix.removeprefix(".")
        check_choice("format", chosen, FORMATS)
        if chosen in FIGURES:
            with naming_extra("drawing", "report"):
                from pliant.experiments.report.figures import save_figures
            return save_figures([(section.figures, section.series) for section in self.sections], path, chosen)
        write: dict[str, Callable[[], str]] = {
            "html": self.to_html,
            "md": lambda: printable(text.markdown(self.sections)),
            "csv": lambda: printable(text.csv_table(self.sections)),
            "tex": lambda: printable(text.latex(self.sections)),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write[chosen]().encode())
        return [path]

    def print(self, console: "Console | None" = None, *, asked: bool = False) -> None:
        """Print the answer and the table in a terminal.

        Args:
            console: The console to print to; standard output by default.
            asked: Print only the comparisons of the folders' current recipes, and name the others in one line.
        """
        others = [section for section in self.sections if asked and section.comparison.recipe is None]
        if len(others) == len(self.sections):
            others = []
        for section in self.sections:
            if section not in others:
                text.print_section(section, console)
        if others:
            text.print_titles(others, console)


@dataclass(frozen=True)
class Failure:
    """A failed or diverged run, or a file that cannot be read.

    Args:
        what: The run's name, or the file's path.
        status: "failed", "diverged" or "unreadable".
        reason: The cause, in one line.
        details: The whole message.
    """

    what: str
    status: str
    reason: str
    details: str


@dataclass(frozen=True)
class Group:
    """Figures under a common heading.

    Args:
        name: The anchor of links.
        title: The heading.
        lead: The introduction.
        figures: The figures.
        size: The width of each figure: "wide", "half" or "small".
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
        """The title of the comparison."""
        return self.comparison.title

    @cached_property
    def answer(self) -> Answer:
        """The answer in words."""
        return answer(self.analysis)

    @cached_property
    def table(self) -> ResultTable:
        """The table of results."""
        return result_table(self.analysis)

    @cached_property
    def metrics(self) -> ResultTable | None:
        """The table of all metrics; None if the first table shows all of them."""
        return metric_table(self.analysis)

    @property
    def code(self) -> str:
        """Python code that does what the answer says; empty if there is none."""
        return ""

    @property
    def tried(self) -> ResultTable | None:
        """The table of settings from which a contender was chosen; None if there is none."""
        return None

    @cached_property
    def series(self) -> list[Series]:
        """The colors and line patterns of the contenders, best first."""
        return assign_series([row.contender for row in self.analysis.rows])

    @cached_property
    def histories(self) -> Histories:
        """The metrics that the runs recorded during training."""
        return read_histories(self.comparison)

    @cached_property
    def groups(self) -> list[Group]:
        """The figures in reading order."""
        # Imported here: the answer and the table do not need Altair.
        from pliant.experiments.report import agent_charts, measure_charts, result_charts

        comparison, histories, series = self.comparison, self.histories, self.series
        on_validation = comparison.selection.get("on") == "validation"
        judged_on = "held-out training data" if on_validation else "the results themselves"
        association = measure_charts.association_figure(measure_charts.associations(comparison, histories))
        groups = [
            Group("differences", "", "", _drawn([result_charts.differences(self.analysis, series)]), "wide"),
            Group(
                "aggregates",
                "Aggregates over seeds",
                "As usual for agents: robust to single seeds, with 95 % bootstrap intervals.",
                agent_charts.aggregate_figures(self.analysis, histories, series) if comparison.is_of_agents else [],
                "half",
            ),
            Group(
                "curves",
                "Learning curves",
                f"Over all tasks, in {histories.x_title}.",
                result_charts.learning_curves(histories, series),
                "wide",
            ),
            Group(
                "tasks",
                "The end of each task" + (", against a fresh network" if comparison.baseline("fresh") else ""),
                "Plasticity itself: does the network still learn as well as a new one?",
                result_charts.task_ends(comparison, histories, series),
                "half",
            ),
            Group(
                "sensitivity",
                "Sensitivity to settings",
                f"{name_of(comparison.headline).capitalize()} for each value of a setting, with the other settings at "
                f"their best, measured on {judged_on}. The large dot is the chosen value.",
                result_charts.sensitivity(comparison, series),
                "small",
            ),
            Group(
                "measures",
                "Measures over time",
                "Measures of the network during training: means over seeds with 95 % intervals.",
                measure_charts.measures_over_time(histories, series),
                "small",
            ),
            Group(
                "associations",
                "Which measures correlate with plasticity",
                "",
                _drawn([association]),
                "wide",
            ),
            Group(
                "growth",
                "Growth of weights by layer",
                "The norm of each layer's weights relative to its start: one chart per method, one line per layer from "
                "the first (blue) to the last (green), all on the same scale.",
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
        """Failed and diverged runs, and files that cannot be read."""
        runs = {run.id: run for run in (*self.comparison.runs, *self.comparison.trials)}
        ended_badly = [_failed(run) for run in runs.values() if run.status in ("failed", "diverged")]
        return ended_badly + [_unreadable(broken) for broken in (*self.comparison.broken, *self.histories.broken)]

    @property
    def facts(self) -> list[str]:
        """The numbers of methods, baselines, seeds and runs."""
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
        """Describe a contender's methods, and the settings in which it differs from other contenders."""
        plain = "an untrained network at every task" if contender.role == "fresh" else "nothing attached"
        described = _describe(contender.runs[0].config)
        own = [f"{name} {described[name]}" for name, values in self._settings.items() if len(values) > 1]
        return "; ".join([describe(contender.effective) or plain, *own])

    @property
    def choices(self) -> list[str]:
        """One sentence per chosen setting: its value and how it was chosen."""
        return [sentence(choice["told"]) for choice in self.comparison.choices.values()]

    @cached_property
    def _settings(self) -> dict[str, list[str]]:
        """All values of each part of the setting among the runs."""
        found: dict[str, list[str]] = {}
        for run in self.comparison.runs or self.comparison.trials:
            for name, value in _describe(run.config).items():
                if value not in found.setdefault(name, []):
                    found[name].append(value)
        return found

    @cached_property
    def environment(self) -> dict[str, str]:
        """The environments of each contender's first run."""
        found: dict[str, dict[str, None]] = {}
        for contender in self.comparison.contenders:
            for key, value in _environment(contender.runs[0]).items():
                if key != "pid" and value is not None:
                    found.setdefault(key, {})[_flat(value)] = None
        return {key: ", ".join(values) for key, values in found.items()}


def _describe(config: RunConfig) -> dict[str, str]:
    if config.stream.name in streams.names() and streams.is_of_environments(config.stream.name):
        parts = {"environment": config.data, "agent": config.model, "stream": config.stream, "device": config.device}
        return {name: str(part) for name, part in parts.items()}
    training = {key: value for key, value in vars(config.training).items() if value not in (None, ())}
    return {
        "data": str(config.data),
        "network": str(config.model),
        "stream": str(config.stream),
        "training": ", ".join(f"{key}={value}" for key, value in training.items()),
        "device": config.device,
        **({"checkpoint": config.start.path} if config.start else {}),
        **({"old data": str(config.old_data)} if config.old_data else {}),
    }


def _environment(run: Run) -> dict[str, Any]:
    try:
        return dict(next(event["environment"] for event in reversed(run.events) if event.get("event") == "start"))
    except (StopIteration, KeyError, ValueError, TypeError, OSError):
        return {}


def _flat(value: Any) -> str:
    return ", ".join(f"{key} {_flat(item)}" for key, item in value.items()) if isinstance(value, dict) else str(value)


def _failed(run: Run) -> Failure:
    return Failure(run.id, run.status, run.error.strip().rpartition("\n")[2], run.error.strip())


def _unreadable(broken: Broken) -> Failure:
    return Failure(str(broken.path), "unreadable", broken.reason.partition("\n")[0], broken.reason)


def _drawn(figures: "Iterable[Figure | None]") -> "list[Figure]":
    return [figure for figure in figures if figure is not None]
