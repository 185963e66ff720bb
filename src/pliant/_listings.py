"""The tables of `pliant list`: methods, streams, models, data, training, measures, recipes."""

import tomllib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from pliant import data as datasets
from pliant import methods as registry
from pliant import models, streams
from pliant._names import keyword_options, read_arguments
from pliant.data.image_folder import load_folder
from pliant.diagnostics import measures
from pliant.experiments.recipe import BASELINES
from pliant.experiments.recipe_files import recipe_folder
from pliant.training import Settings


def _make_table(name: str, *others: str, **options: Any) -> Table:
    """Make a table that never cuts a word short, however narrow the terminal: the names are there to be copied."""
    columns = [Column(name, no_wrap=True), *(Column(other, overflow="fold") for other in others)]
    return Table(*columns, **options)


def list_methods() -> Table:
    """List the baselines, and the methods by when they act."""
    table = _make_table(
        "name", "what it does (source)", "settings (default)",
        caption="* needs to be told of new data: call apply(), or give at=\\[steps] or every=steps",
    )  # fmt: skip
    table.add_row("[bold]baselines[/bold]")
    for name, summary in BASELINES.items():
        table.add_row(name, summary)
    for acts, infos in registry.by_timing().items():
        table.add_section()
        table.add_row(f"[bold]{acts}{' *' if infos[0].needs_telling else ''}[/bold]")
        for info in infos:
            settings = "\n".join(_write_tunable(each) for each in info.tunables)
            table.add_row(info.name, escape(f"{info.summary} ({info.paper})"), escape(settings))
    return table


def _write_tunable(tunable: registry.Tunable) -> str:
    default = "" if tunable.default is None else f" ({tunable.default})"
    return f"{tunable.name}{default}: {tunable.meaning}"


def list_streams() -> Table:
    """List the streams."""
    table = _make_table("name", "tasks", "options (default)", "from")
    for name in streams.names():
        cls = streams.stream_class(name)
        summary = (cls.__doc__ or "").partition("\n")[0]
        table.add_row(name, summary, _write_options(streams.options(name)), cls.paper)
    return table


def list_models() -> Table:
    """List the networks."""
    table = _make_table("name", "what it is", "options (default)", "from")
    for info in map(models.info, models.names()):
        table.add_row(info.name, info.summary, _write_options(models.options(info.name)), info.paper)
    table.add_row("FILE.py:FUNCTION", "your own: function(shape, classes) -> torch.nn.Module", "", "")
    return table


def list_data() -> Group:
    """List the data sets and their options."""
    table = _make_table("name", "what it is")
    for name in datasets.names():
        table.add_row(name, datasets.summary(name))
    table.add_row("PATH", "a folder of images (class/… or train/class/… and test/class/…), or an .npz file")
    table.add_row("FILE.py:FUNCTION", "your own: function() -> (x_train, y_train), (x_test, y_test)")
    options = _make_table("option (default)", "of", "what it is", title="--set data.OPTION=VALUE", title_justify="left")
    for loader, which in ((datasets.load, "all"), (load_folder, "a folder of images")):
        meanings = read_arguments(loader)
        for name, default in keyword_options(loader).items():
            options.add_row(f"{name} ({default})", which, escape(meanings[name]))
    options.add_row("…", "your own", "the keyword arguments of the function")
    return Group(table, options)


def list_training() -> Table:
    """List the settings of the training."""
    table = _make_table("setting (default)", "what it is", title="--set training.SETTING=VALUE", title_justify="left")
    meanings = read_arguments(Settings)
    for field in fields(Settings):
        default = list(field.default) if isinstance(field.default, tuple) else field.default  # as TOML writes it
        table.add_row(escape(f"{field.name} ({default})"), escape(meanings[field.name]))
    return table


def list_measures() -> Table:
    """List the measures."""
    table = _make_table("name", "what it is", "cost", "from")
    for info in map(measures.info, measures.names()):
        table.add_row(info.name, info.definition, info.cost, info.source)
    return table


def list_recipes() -> Table:
    """List the recipes that come with Pliant."""
    table = _make_table("name", "what it is", "from")
    for path in sorted(recipe_folder().glob("*.toml")):
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        table.add_row(path.stem, values.get("title", ""), values.get("source", ""))
    return table


def _write_options(options: dict[str, object]) -> str:
    return "\n".join(f"{name} ({default})" for name, default in options.items())


LISTINGS: dict[str, Callable[[], RenderableType]] = {
    "methods": list_methods,
    "streams": list_streams,
    "models": list_models,
    "data": list_data,
    "training": list_training,
    "measures": list_measures,
    "recipes": list_recipes,
}
