"""Compare methods on a stream of changing data: `pliant.compare`, and what it returns.

The command `pliant compare` parses its flags, calls `compare` and prints the result.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant._importing import find_missing, naming_extra

if TYPE_CHECKING:
    import altair
    import pandas
    from rich.console import Console

    from pliant.experiments.engines import Engine
    from pliant.experiments.recipe import Recipe
    from pliant.experiments.report.document import Report, Section
    from pliant.experiments.store import Run, Status


PAGE_NEEDS = ("altair", "jinja2", "vl_convert")
"""The packages that the report's page needs; its table needs none of them."""


class ComparisonResult:
    """The results of a comparison; a notebook shows them as a page.

    `print(result)` shows the table and the answer in a terminal.

    Args:
        folder: The folder of the runs.
        statuses: How each run ended, by its id.
    """

    def __init__(self, folder: Path, statuses: Mapping[str, Status]) -> None:
        self.folder = folder
        self.statuses = dict(statuses)

    @cached_property
    def report(self) -> Report:
        """The report on the folder, which may hold earlier comparisons too."""
        from pliant.experiments.report.document import make_report

        return make_report(self.folder)

    @property
    def table(self) -> pandas.DataFrame:
        """The results as a data frame: one row a method, best mean first.

        `mean`, `low` and `high` are the mean of the deciding metric over seeds and its 95 % interval. `metric` names
        it. `difference_to_vanilla` is taken seed by seed, with its own interval, and `p_value` tests it, corrected by
        Holm's procedure. `seeds` counts the finished runs. Numbers that the runs do not give are missing.
        """
        import pandas

        section = self._section
        rows = []
        for row in section.analysis.rows:
            number = row.numbers.get(section.analysis.headline)
            vanilla, fresh = (contrast and contrast.interval for contrast in (row.against_vanilla, row.against_fresh))
            rows.append(
                {
                    "method": row.contender.name,
                    "settings": row.contender.settings,
                    "metric": section.analysis.headline,
                    "mean": number and number.mean,
                    "low": number and number.low,
                    "high": number and number.high,
                    "difference_to_vanilla": vanilla and vanilla.mean,
                    "difference_low": vanilla and vanilla.low,
                    "difference_high": vanilla and vanilla.high,
                    "p_value": row.against_vanilla and row.against_vanilla.p,
                    "difference_to_fresh": fresh and fresh.mean,
                    "seeds": row.counts.get("finished", 0),
                    "diverged": row.counts.get("diverged", 0),
                    "failed": row.counts.get("failed", 0),
                    "seconds_per_step": row.cost and row.cost.seconds,
                    "bytes_kept": row.cost and row.cost.bytes,
                }
            )
        table = pandas.DataFrame(rows).set_index("method")
        return table.astype({name: float for name in table if name not in _NOT_FLOAT})

    @property
    def answer(self) -> str:
        """Which method to use, by how much it is better, and how sure that is."""
        return str(self._section.answer)

    @property
    def figures(self) -> dict[str, altair.TopLevelMixin]:
        """The report's figures by name, as Altair charts."""
        from pliant.experiments.report.chart_style import print_config

        style = print_config(self._section.series)
        charts: dict[str, Any] = {figure.name: figure.chart for figure in self._section.figures}
        specs = {figure.name: figure.spec(style) for figure in self._section.figures}
        return {name: type(chart).from_dict(specs[name], validate=False) for name, chart in charts.items()}

    @property
    def runs(self) -> list[Run]:
        """The runs that are compared, with their configurations, results and records."""
        return self._section.comparison.runs

    def save(self, path: str | Path, format: str | None = None) -> list[Path]:
        """Write the report.

        Args:
            path: The file to write; a folder for figures.
            format: html, md, csv or tex for one file; png, svg or pdf for one file a figure. By default the ending of
                `path`.

        Returns:
            The files written.
        """
        return self.report.save(path, format)

    def __str__(self) -> str:
        from pliant._console import SafeConsole

        text = io.StringIO()
        self.report.print(SafeConsole(file=text, width=120), asked=True)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return f"ComparisonResult({str(self.folder)!r}, {len(self.statuses)} runs)"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    @property
    def _section(self) -> Section:
        """The section on what was asked for; the folder may hold runs of earlier comparisons."""
        sections = self.report.sections
        return next((section for section in sections if section.comparison.recipe is not None), sections[0])


_NOT_FLOAT = ("settings", "metric", "seeds", "diverged", "failed")


def compare(
    methods: str | Sequence[str | Mapping[str, Any]] = ("vanilla", "fresh", "l2", "swr"),
    *,
    data: str | PathLike[str] | Mapping[str, Any] | Callable[..., Any] = "digits",
    model: str | Mapping[str, Any] | Callable[..., Any] = "mlp",
    stream: str | Mapping[str, Any] | None = None,
    start: str | PathLike[str] | Mapping[str, Any] | None = None,
    old_data: str | PathLike[str] | Mapping[str, Any] | Callable[..., Any] | None = None,
    training: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] = 5,
    measures: Sequence[str] = (),
    tune: bool = False,
    out: str | PathLike[str] | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    checkpoint_seconds: float = 30.0,
    progress: bool | Console = True,
    **settings: Any,
) -> ComparisonResult:
    """Train a network with each method and each seed, and say which method to use.

    Runs are saved in a folder. Calling `compare` again with the same folder resumes what was interrupted, and trains
    only what is new.

    Args:
        methods: What to compare: "vanilla" (plain training), "fresh" (a new network for each task), the name of a
            method, "l2:lam=1e-3" with a setting, "l2:lam=1e-2|1e-4" with values to choose from on held-out data,
            "swr+l2" for two methods at once. Or tables as in a recipe. A single text may hold several, separated by
            commas.
        data: The data set: a name (`pliant.data.names()`), a folder of images, an .npz file, a function that returns
            `(x_train, y_train), (x_test, y_test)`, or "file.py:function". A table adds options:
            `{"name": "digits", "first": 100}`.
        model: The network: a name (`pliant.models.names()`), a function `(shape, classes) -> Module`, or
            "file.py:function"; a table adds options.
        stream: The sequence of tasks: a name (`pliant.streams.names()`); a table adds options. By default
            "warm_start"; with `start` it is "single", one task.
        start: A checkpoint that all runs start from. The first task is then new data, on which methods act, and
            "fresh" is an untrained network. θ₀ is the untrained network of the seed. A table adds options:
            `{"path": "file.pt", "key": "model", "optimizer": "optimizer"}` names the places of the weights and of an
            optimizer's state, which is not loaded otherwise.
        old_data: Data that the network learned before. Its test examples are evaluated too. It has the options of
            `data` unless it is a table.
        training: Settings of the training, e.g. `{"lr": 1e-3}`: see `pliant.training.Settings`.
        seeds: The number of seeds, or the seeds.
        measures: Names of measures to record during training.
        tune: Whether to choose the main setting of each method without settings from its published sweep.
        out: The folder of the runs; by default `runs/STREAM-DATA-MODEL`, or `…-CHECKPOINT` with `start`.
        workers: The number of processes; by default the number of cores.
        engine: Where to run instead of processes, e.g. `pliant.experiments.engines.RayEngine()`. It is closed at the
            end.
        checkpoint_seconds: Seconds between two checkpoints of a run.
        progress: Whether to print progress, or the rich console to print it to.
        settings: Other keys of a recipe: `selection`, `headline`, `reference`, `device`, `title`.

    Returns:
        The results: `print()` them, or see `table`, `answer`, `figures` and `save()`.

    Raises:
        ValueError: If an argument is wrong, or a network, its data and a method do not fit. Nothing is trained then.
        ImportError: If the extra `pliant[report]` is not installed.

    Example:
        >>> import tempfile
        >>> result = compare(
        ...     ["vanilla", "l2_init:lam=1e-3"],
        ...     data={"name": "digits", "first": 100},
        ...     stream={"name": "random_labels", "tasks": 2, "epochs": 1},
        ...     seeds=1,
        ...     out=tempfile.mkdtemp(),
        ...     workers=1,
        ...     progress=False,
        ... )
        >>> sorted(result.table.index), result.table["seeds"].to_list()
        (['l2_init', 'vanilla'], [1, 1])
    """
    with naming_extra("a comparison", "report"):
        from rich.console import Console

        from pliant._console import SafeConsole
        from pliant.experiments.engines import ProcessEngine
        from pliant.experiments.recipe import make_recipe

    if engine is not None and workers is not None:
        raise ValueError(f"workers is {workers}, but an engine is given, which has its own; pass one of the two")
    console = progress if isinstance(progress, Console) else SafeConsole(quiet=not progress)
    names, values = make_values(
        data=data,
        model=model,
        stream=stream or ("warm_start" if start is None else "single"),
        start=start,
        old_data=old_data,
        training=training,
        seeds=seeds,
        measures=measures,
        **settings,
    )
    titled = f"{names['stream'].replace('_', ' ')} on {names['data']} with {names['model']}"
    values["title"] = settings.get("title") or titled
    values["methods"] = _read_methods(methods, tune)
    recipe = make_recipe(values)
    parts = [names[key] for key in ("stream", "data", "model")]
    if recipe.start is not None:
        checkpoint = Path(recipe.start.path)
        title = settings.get("title") or f"{titled}, from {checkpoint.name}"
        recipe = recipe.model_copy(update={"title": title})
        parts.append(checkpoint.stem)
    if tune and (fixed := [entry.label for entry in recipe.methods if entry.parts and len(entry.variants()) == 1]):
        console.print(f"not tuned: {', '.join(fixed)}", markup=False, soft_wrap=True)
    default = Path("runs") / "-".join(parts).replace(":", "_")
    return run_recipe(
        recipe, Path(out or default), engine or ProcessEngine(workers), checkpoint_seconds=checkpoint_seconds,
        console=console,
    )  # fmt: skip


def run_recipe(
    recipe: Recipe, folder: Path, engine: Engine, *, checkpoint_seconds: float = 30.0, console: Console
) -> ComparisonResult:
    """Do all runs of a recipe that are not done yet.

    Args:
        recipe: The experiment.
        folder: Its folder.
        engine: Where the runs are executed; closed at the end.
        checkpoint_seconds: Seconds between two checkpoints of a run.
        console: Where progress is printed.

    Returns:
        The results.
    """
    from pliant import data
    from pliant.experiments.engines import ProcessEngine
    from pliant.experiments.experiment import check_device, find_outdated, rehearse, run_experiment
    from pliant.experiments.progress import LiveProgress
    from pliant.experiments.scheduler import run_all

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with naming_extra("a comparison", "report"):
        import scipy as scipy  # Before anything is trained: the results need it.
    if missing := find_missing(*PAGE_NEEDS):
        tell(f"warning: without {', '.join(missing)} there is a table but no page: pip install 'pliant[report]'")
    try:
        # The rehearsal also downloads and decodes the data, once, before several processes need it.
        present = rehearse(recipe)
        for warning in (data.tell_namesake(recipe.data.name), *find_outdated(folder, present)):
            if warning:
                tell(f"warning: {warning}")
        if isinstance(engine, ProcessEngine):
            check_device(recipe.device)
        with LiveProgress(folder, console) as progress:
            statuses = run_experiment(
                recipe,
                folder,
                lambda runs: run_all(runs, folder, engine, progress, checkpoint_seconds=checkpoint_seconds),
                tell,
            )
    finally:
        engine.close()
    return ComparisonResult(folder, statuses)


def make_values(
    *, data: Any, model: Any, stream: Any, start: Any, old_data: Any, training: Any, **settings: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the short names of data, network and stream, and the values of a recipe without its methods.

    Paths and functions become texts from which a worker process can load them. See `compare` for the arguments.
    """
    parts = {"data": _importable("data", data), "model": _importable("model", model), "stream": stream}
    names = {key: _short_name(part) for key, part in parts.items()}
    optional = {
        "start": str(start) if isinstance(start, PathLike) else start,
        "old_data": None if old_data is None else _like(parts["data"], _importable("old_data", old_data)),
        "training": training,
    }
    return names, {**parts, **{key: value for key, value in optional.items() if value is not None}, **settings}


def _importable(argument: str, value: Any) -> Any:
    """Return paths and functions as texts from which a worker process can load them."""
    if isinstance(value, Mapping):
        return {**value, "name": _importable(argument, value.get("name"))}
    if isinstance(value, PathLike):
        return str(value)
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"{argument} is {value!r}, which other processes cannot import; "
            f"define it at the top level of a file and pass {argument}='FILE.py:FUNCTION'"
        )
    return f"{module}:{name}"


def _like(data: Any, other: Any) -> Any:
    """Return another data set with the options of a data set, unless the other has options of its own."""
    return {**data, "name": other} if isinstance(data, Mapping) and isinstance(other, str) else other


def _short_name(part: Any) -> str:
    """Return the name of a data set, network or stream without its folder."""
    name = str(part.get("name") if isinstance(part, Mapping) else part)
    return Path(name).resolve().name if Path(name).is_dir() else Path(name).name


def _read_methods(methods: str | Sequence[str | Mapping[str, Any]], tune: bool) -> list[Any]:
    """Read what to compare; an entry with the same methods as another is labeled by its settings too."""
    from pliant.experiments.recipe import label_of, published_sweep, split_methods

    given = methods.split(",") if isinstance(methods, str) else list(methods)
    texts = [entry.strip() if isinstance(entry, str) else entry for entry in given]
    labels = [label_of(entry) for entry in texts]
    entries: list[Any] = []
    for text, label in zip(texts, labels, strict=True):
        if not isinstance(text, str):
            entries.append(text)
        elif tune and text.isidentifier() and published_sweep(text):
            entries.append({"name": text, "grid": "sweep"})
        elif text != label and labels.count(label) > 1:
            entries.append({"label": text, "parts": split_methods(text)})
        else:
            entries.append(text)
    return entries
