"""A report as an object: made from folders or runs, shown in a notebook, saved in any format."""

import html
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pliant._files import write_atomically
from pliant._importing import naming_extra
from pliant._validation import check_choice
from pliant.experiments.report import text_formats as text
from pliant.experiments.report.document import Section
from pliant.experiments.report.folders import read_folders, read_runs
from pliant.experiments.store import Run

if TYPE_CHECKING:
    from rich.console import Console

DOCUMENTS = ("html", "md", "csv", "tex")
FIGURES = ("png", "svg", "pdf")
FORMATS = (*DOCUMENTS, *FIGURES)


class Report:
    """What runs came to.

    Args:
        sections: The comparisons, each with its `answer`, `table` and `figures`.
    """

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = list(sections)

    @property
    def title(self) -> str:
        """What the report is called."""
        first = self.sections[0].title
        return first if len(self.sections) == 1 else f"{first}, and {len(self.sections) - 1} more"

    def __str__(self) -> str:
        return "\n".join(str(section.answer) for section in self.sections)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither disturbs the other's styles."""
        page = html.escape(self.to_html(), quote=True)
        return f'<iframe srcdoc="{page}" title="Pliant report" style="width:100%;height:80vh;border:0"></iframe>'

    def to_html(self) -> str:
        """Return the page: one HTML document that needs nothing else."""
        with naming_extra("a page", "report"):
            from pliant.experiments.report.html import render_page

        return render_page(self.sections, self.title)

    def save(self, target: str | Path, format: str | None = None) -> list[Path]:
        """Write the report.

        Args:
            target: The file; for figures the folder to put them in.
            format: html, md, csv or tex: one file; png, svg or pdf: a file a figure. By default what the target's
                name ends in.

        Returns:
            The files.

        Raises:
            ValueError: If the format is not one of these.
        """
        path = Path(target)
        chosen = format or path.suffix.removeprefix(".")
        check_choice("format", chosen, FORMATS)
        if chosen in FIGURES:
            with naming_extra("drawing", "report"):
                from pliant.experiments.report.print_figures import save_figures
            return save_figures(self.sections, path, chosen)
        write: dict[str, Callable[[], str]] = {
            "html": self.to_html,
            "md": lambda: text.markdown(self.sections),
            "csv": lambda: text.csv_table(self.sections),
            "tex": lambda: text.latex(self.sections),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write[chosen]().encode())
        return [path]

    def print(self, console: "Console | None" = None, *, asked: bool = False) -> None:
        """Show the answer and the table in a terminal.

        Args:
            console: Where to; the standard output by default.
            asked: Whether to show only what the folders' recipes ask for now, and to name the rest in a line.
        """
        from pliant.experiments.report.terminal import name_rest, show

        rest = [section for section in self.sections if asked and section.comparison.recipe is None]
        if len(rest) == len(self.sections):
            rest = []
        for section in self.sections:
            if section not in rest:
                show(section, console)
        if rest:
            name_rest(rest, console)


def make_report(runs: str | Path | Iterable[str | Path | Run]) -> Report:
    """Make a report of folders or runs; see `pliant.report`."""
    if isinstance(runs, str | Path):
        runs = [runs]
    given = list(runs)
    loaded = [run for run in given if isinstance(run, Run)]
    folders = [Path(folder) for folder in given if not isinstance(folder, Run)]
    if loaded and folders:
        raise ValueError("runs holds both folders and runs; give one kind")
    comparisons = read_folders(folders) if folders else read_runs(loaded)
    return Report([Section(comparison) for comparison in comparisons])
