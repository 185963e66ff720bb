"""The tables of `pliant list`: methods, streams, models, data, training, measures, recipes.

Each has two columns, so that it can be read in 80 columns: the name, and all else line by line.
"""

import tomllib
from collections.abc import Callable
from dataclasses import fields

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pliant import data as datasets
from pliant import methods as registry
from pliant import models, streams
from pliant._names import keyword_options, read_arguments
from pliant.data.image_folder import load_folder
from pliant.diagnostics import measures
from pliant.experiments.recipe import BASELINES
from pliant.experiments.recipe_files import recipe_folder
from pliant.training import Settings


def _make_table(name: str = "name", meaning: str = "what it is", title: str | None = None) -> Table:
    """Make a table whose first column is never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column(name, no_wrap=True, style="bold")
    table.add_column(meaning)
    return table


def _write_lines(summary: str, details: str = "", source: str = "") -> str:
    """Write the second column: the summary, then options and source in a quieter color."""
    quiet = [f"[dim]{escape(line)}[/dim]" for line in (*details.splitlines(), *filter(None, (source,)))]
    return "\n".join([escape(summary), *quiet])


def list_methods() -> Group:
    """List the methods and the baselines, by when they act."""
    table = _make_table("method", "what it does, its settings (default), its source")
    table.add_row("[italic]baselines[/italic]", "")
    for name, summary in BASELINES.items():
        table.add_row(name, summary)
    for acts, infos in registry.by_timing().items():
        mark = " *" if any(info.needs_telling for info in infos) else ""
        table.add_section()
        table.add_row(f"[italic]{acts}{mark}[/italic]", "")
        for info in infos:
            settings = "\n".join(_write_tunable(each) for each in info.tunables)
            table.add_row(info.name, _write_lines(info.summary, settings, info.paper))
    return Group(table, escape("* acts only when you call apply(), or at the steps of at=[steps] or every=steps"))


def _write_tunable(tunable: registry.Tunable) -> str:
    default = "" if tunable.default is None else f" ({tunable.default})"
    return f"{tunable.name}{default}: {tunable.meaning}"


def list_streams() -> Table:
    """List the streams."""
    table = _make_table("stream", "its tasks, options (default), source")
    for name in streams.names():
        cls = streams.stream_class(name)
        summary = (cls.__doc__ or "").partition("\n")[0]
        table.add_row(name, _write_lines(summary, _write_options(streams.options(name)), cls.paper))
    return table


def list_models() -> Table:
    """List the networks."""
    table = _make_table("network", "what it is, options (default), source")
    for info in map(models.info, models.names()):
        table.add_row(info.name, _write_lines(info.summary, _write_options(models.options(info.name)), info.paper))
    table.add_row("FILE.py:FUNCTION", "your own: function(shape, classes) -> torch.nn.Module")
    return table


def list_data() -> Group:
    """List the data sets and their options."""
    table = _make_table()
    for name in datasets.names():
        table.add_row(name, datasets.summary(name))
    table.add_row("PATH", "a folder of images (class/… or train/class/… and test/class/…), or an .npz file")
    table.add_row("FILE.py:FUNCTION", "your own: function() -> (x_train, y_train), (x_test, y_test)")
    options = _make_table("option (default)", title="--set data.OPTION=VALUE")
    for loader, which in ((datasets.load, ""), (load_folder, "Of a folder of images. ")):
        meanings = read_arguments(loader)
        for name, default in keyword_options(loader).items():
            options.add_row(f"{name} ({default})", escape(which + meanings[name]))
    options.add_row("…", "Of your own: the keyword arguments of the function.")
    return Group(table, options)


def list_training() -> Table:
    """List the settings of the training."""
    table = _make_table("setting (default)", title="--set training.SETTING=VALUE")
    meanings = read_arguments(Settings)
    for field in fields(Settings):
        default = list(field.default) if isinstance(field.default, tuple) else field.default  # as TOML writes it
        table.add_row(escape(f"{field.name} ({default})"), escape(meanings[field.name]))
    return table


def list_measures() -> Table:
    """List the measures."""
    table = _make_table("measure", "what it is, its cost, its source")
    for info in map(measures.info, measures.names()):
        table.add_row(info.name, _write_lines(info.definition, f"cost: {info.cost}; {info.source}"))
    return table


def list_recipes() -> Table:
    """List the recipes that come with Pliant."""
    table = _make_table("recipe", "what it is, source")
    for path in sorted(recipe_folder().glob("*.toml")):
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        table.add_row(path.stem, _write_lines(values.get("title", ""), source=values.get("source", "")))
    return table


def _write_options(options: dict[str, object]) -> str:
    return ", ".join(f"{name} ({default})" for name, default in options.items())


LISTINGS: dict[str, Callable[[], RenderableType]] = {
    "methods": list_methods,
    "streams": list_streams,
    "models": list_models,
    "data": list_data,
    "training": list_training,
    "measures": list_measures,
    "recipes": list_recipes,
}
NEXT = {
    "methods": "pliant compare --data PATH --methods vanilla,fresh,METHOD",
    "streams": "pliant compare --data PATH --stream STREAM --set stream.epochs=20",
    "models": "pliant compare --data PATH --model NETWORK --set model.OPTION=VALUE",
    "data": "pliant compare --data NAME; pliant data get NAME downloads it first",
    "training": "pliant compare --data PATH --set training.lr=1e-3",
    "measures": "pliant diagnose FILE --model NETWORK --data PATH --measures MEASURE",
    "recipes": "pliant run RECIPE --scale quick",
}
"""What to do after each listing."""
