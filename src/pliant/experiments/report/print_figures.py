"""The report's figures as files for print: the page's own charts, drawn without a browser."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import vl_convert

from pliant._files import write_atomically
from pliant.experiments.report.chart_style import print_config
from pliant.experiments.report.document import Section

_PIXELS = 3.0
"""Pixels of a PNG for each of the page's: about 300 a printed inch at the width of a column."""


def save_figures(sections: Sequence[Section], folder: Path, format: str) -> list[Path]:
    """Draw every figure into a file.

    Args:
        sections: The comparisons.
        folder: Where to put them; made if it is missing.
        format: png, svg or pdf.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    alike: Counter[str] = Counter()
    for number, section in enumerate(sections):
        config = print_config(section.series)
        for figure in section.figures:
            prefix = f"{number + 1}_" if len(sections) > 1 else ""
            stem = prefix + re.sub(r"[^\w-]+", "-", figure.name)
            alike[stem.casefold()] += 1
            again = f"-{alike[stem.casefold()]}" if alike[stem.casefold()] > 1 else ""
            path = folder / f"{stem}{again}.{format}"
            spec = figure.spec(config)
            if format == "svg":
                content = vl_convert.vegalite_to_svg(spec).encode()
            elif format == "pdf":
                content = vl_convert.vegalite_to_pdf(spec)
            else:
                content = vl_convert.vegalite_to_png(spec, scale=_PIXELS)
            write_atomically(path, content)
            files.append(path)
    return files
