"""The options that commands of the command line share, and the ends of their help."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

LISTED = ("methods", "streams", "models", "data", "training", "measures", "recipes")
"""What `pliant list` lists."""


class EngineName(StrEnum):
    """Where runs are executed."""

    PROCESSES = "processes"
    RAY = "ray"


class Format(StrEnum):
    """The format of a report."""

    HTML = "html"
    MARKDOWN = "md"
    CSV = "csv"
    LATEX = "tex"
    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


RUNS, WHAT, SETTINGS = "Where it runs", "What to compare", "Settings"
"""Panels of `--help`."""
Out = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=RUNS,
        metavar="FOLDER",
        help="Folder of the runs; an interrupted folder resumes. Default: runs/NAME.",
    ),
]
EngineOption = Annotated[
    EngineName, typer.Option("--engine", rich_help_panel=RUNS, metavar="NAME", help="processes, or ray.")
]
Workers = Annotated[
    int | None, typer.Option(rich_help_panel=RUNS, metavar="N", help="Processes. Default: the cores / --threads.")
]
Threads = Annotated[int, typer.Option(rich_help_panel=RUNS, metavar="N", help="Threads of each run; on Ray, its CPUs.")]
Gpus = Annotated[float, typer.Option(rich_help_panel=RUNS, metavar="N", help="GPUs of each run, on Ray.")]
Address = Annotated[
    str | None, typer.Option(rich_help_panel=RUNS, metavar="HOST", help="Ray cluster to join. Default: a local one.")
]
Checkpoint = Annotated[
    float, typer.Option(rich_help_panel=RUNS, metavar="N", help="Seconds between two checkpoints of a run.")
]


def list_examples(*commands: str) -> str:
    """Return the end of a command's help."""
    return "\n\n".join(("Examples:", *(f"- `{command}`" for command in commands)))


METHODS_EXAMPLES = {
    "vanilla": "plain training",
    "fresh": "a new network for each task",
    "l2:lam=1e-3": "a setting",
    "redo:tau=0.1:every=97": "two settings",
    "l2:lam=1e-2|1e-4": "the better of two values, chosen on held-out data",
    "swr+l2": "two methods at once",
}
ACTS = {
    "demo": "Act 1: the data grew. Continue from the old weights, train from scratch, or treat the weights first?",
    "demo_random_labels": "Act 2: the labels keep changing. Does the network learn the last task as well as the first?",
}
"""The recipes of the demo, and what each asks."""
LANGUAGE_ACTS = {"demo_language": "The alphabet keeps changing. Does a GPT learn the last one as well as the first?"}
RL_ACTS = {"demo_rl": "An agent learned too much from too little, and stopped learning. Does a reset bring it back?"}
