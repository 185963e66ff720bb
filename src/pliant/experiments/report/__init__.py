"""The report of an experiment: one HTML file that needs nothing else."""

import html
from pathlib import Path

from pliant import streams
from pliant.experiments.files import write_atomically
from pliant.experiments.store import load_recipe, load_runs
from pliant.experiments.table import tabulate


def write_report(root: Path) -> Path:
    """Write the report of an experiment's runs.

    Args:
        root: The experiment's folder.

    Returns:
        Where the report is.
    """
    recipe = load_recipe(root)
    rows = tabulate(load_runs(root))
    headline = streams.stream_class(recipe["stream"]["name"]).headline
    title = html.escape(recipe["title"] or root.name)
    lines = [
        f"<tr><td>{html.escape(row.settings or row.label)}</td><td>{row.numbers.get(headline, '–')}</td></tr>"
        for row in rows
    ]
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><h1>{title}</h1>"
        f"<table><caption>{headline.replace('_', ' ')}: mean ± 95 % confidence interval over seeds</caption>"
        f"<tr><th>method</th><th>result</th></tr>{''.join(lines)}</table></html>\n"
    )
    path = Path(root) / "report.html"
    write_atomically(path, page.encode())
    return path
