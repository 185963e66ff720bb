"""The console that all output of the command line goes through."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pliant._terminal import printable


class SafeConsole(Console):
    """A rich console that shows control characters of the text instead of obeying them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object; only rich itself may emit control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def make_console(**options: Any) -> SafeConsole:
    """Make a console; without a terminal, lines stay long and whole, for grep."""
    return SafeConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160, **options)
