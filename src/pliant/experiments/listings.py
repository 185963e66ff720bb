"""What there is to choose from, as tables for the terminal."""

import tomllib
from collections.abc import Callable
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pliant import data, methods, models, streams
from pliant._names import keyword_options, read_arguments
from pliant.data.image_folder import load_folder
from pliant.diagnostics import measures
from pliant.experiments.method_specs import BASELINES
from pliant.experiments.recipe_files import recipe_folder
from pliant.training import Settings


def method_listing() -> Table:
    """List the methods and the baselines."""
    table = Table("name", "when it acts", "what it does", "settings (default)", "from")
    for name, summary in BASELINES.items():
        table.add_row(name, "baseline", summary, "", "")
    for info in map(methods.info, methods.names()):
        settings = "\n".join(f"{each.name} ({each.default}): {each.meaning}" for each in info.tunables)
        table.add_row(info.name, info.acts, escape(info.summary), escape(settings), info.paper)
    return table


def stream_listing() -> Table:
    """List the streams."""
    table = Table("name", "what the network meets", "options (default)", "from")
    for name in streams.names():
        cls = streams.stream_class(name)
        summary = (cls.__doc__ or "").partition("\n")[0]
        table.add_row(name, summary, _options(streams.options(name)), cls.paper)
    return table


def model_listing() -> Table:
    """List the networks."""
    table = Table("name", "what it is", "options (default)", "from")
    for info in map(models.info, models.names()):
        table.add_row(info.name, info.summary, _options(models.options(info.name)), info.paper)
    table.add_row("FILE.py:FUNCTION", "your own: function(shape, classes) -> torch.nn.Module", "", "")
    return table


def data_listing() -> Group:
    """List the data sets, and what they can be asked for."""
    table = Table("name", "what it is")
    for name in data.names():
        table.add_row(name, data.summary(name))
    table.add_row("PATH", "a folder of images (class/… or train/class/… and test/class/…), or an .npz file")
    table.add_row("FILE.py:FUNCTION", "your own: function() -> (x_train, y_train), (x_test, y_test)")
    options = Table("option (default)", "of", "what it is", title="--set data.OPTION=VALUE", title_justify="left")
    for loader, which in ((data.load, "all"), (load_folder, "a folder of images")):
        meanings = read_arguments(loader)
        for name, default in keyword_options(loader).items():
            options.add_row(f"{name} ({default})", which, escape(meanings[name]))
    options.add_row("…", "your own", "the function's own keyword arguments")
    return Group(table, options)


def training_listing() -> Table:
    """List how networks are trained."""
    table = Table("setting (default)", "what it is", title="--set training.SETTING=VALUE", title_justify="left")
    meanings = read_arguments(Settings)
    for field in fields(Settings):
        default = list(field.default) if isinstance(field.default, tuple) else field.default  # As it is given.
        table.add_row(escape(f"{field.name} ({default})"), escape(meanings[field.name]))
    return table


def measure_listing() -> Table:
    """List the measures."""
    table = Table("name", "what it is", "what it takes", "from")
    for info in map(measures.info, measures.names()):
        table.add_row(info.name, info.definition, info.cost, info.source)
    return table


def recipe_listing() -> Table:
    """List the recipes that come with Pliant."""
    table = Table("name", "what it is", "from")
    for path in sorted(recipe_folder().glob("*.toml")):
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        table.add_row(path.stem, values.get("title", ""), values.get("source", ""))
    return table


def _options(options: dict[str, object]) -> str:
    return "\n".join(f"{name} ({default})" for name, default in options.items())


LISTINGS: dict[str, Callable[[], RenderableType]] = {
    "methods": method_listing,
    "streams": stream_listing,
    "models": model_listing,
    "data": data_listing,
    "training": training_listing,
    "measures": measure_listing,
    "recipes": recipe_listing,
}
"""The tables by what they list."""
