"""The command line: compare methods, run recipes, read results, find out what there is."""

import io
import os
import re
import signal
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console

    from pliant._diagnose_command import diagnose_command
    from pliant.experiments import archive, listings
    from pliant.experiments.method_specs import published_sweep, split_methods
    from pliant.experiments.progress import LiveProgress
    from pliant.experiments.recipe import Recipe, RecipeError, label_of, make_recipe
    from pliant.experiments.recipe_files import Scale, find_recipe, load_recipe
except ImportError as error:
    raise SystemExit(f"the command line needs more than torch ({error}): pip install 'pliant[cli]'") from error

from pliant import data as datasets
from pliant._key_values import override, read_options
from pliant._names import suggest
from pliant._version import __version__
from pliant.data import cache
from pliant.experiments.engines import Engine, ProcessEngine, RayEngine
from pliant.experiments.experiment import run_experiment
from pliant.experiments.preflight import check_device, rehearse
from pliant.experiments.provenance import find_outdated
from pliant.experiments.scheduler import run_all

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keep PyTorch networks able to learn: attach methods, diagnose, compare.",
    epilog="Exit codes: 0 done; 1 a run or a report failed, or data are damaged; 2 something asked for is wrong; "
    "130 stopped by Ctrl-C, 143 by a signal to end: the same command goes on.",
)
data_app = typer.Typer(no_args_is_help=True, help="Fetch data sets and look after the cache.")
app.add_typer(data_app, name="data")
app.command("diagnose")(diagnose_command)
# A pipe or a file has no width: there words stay whole, for grep and for readers that wrap by themselves.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)


class EngineName(StrEnum):
    """Where runs are executed."""

    PROCESSES = "processes"
    RAY = "ray"


class Format(StrEnum):
    """What a report is written as."""

    HTML = "html"
    MARKDOWN = "md"
    CSV = "csv"
    LATEX = "tex"
    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the runs; the same folder goes on where it stopped. By default runs/ and what is run, e.g. "
        "runs/warm_start-digits-mlp or runs/RECIPE; for the demo demo/."
    ),
]
EngineOption = Annotated[EngineName, typer.Option("--engine", help="Where to run.")]
Workers = Annotated[int | None, typer.Option(help="Processes at a time; by default the cores divided by --threads.")]
Threads = Annotated[int, typer.Option(help="Threads (on Ray: CPUs) of every run.")]
Gpus = Annotated[float, typer.Option(help="GPUs that every run asks Ray for.")]
Address = Annotated[str | None, typer.Option(help="Ray cluster to join; a new one on this machine by default.")]
Checkpoint = Annotated[float, typer.Option(help="Seconds between two checkpoints of a run.")]


METHODS_EXAMPLES = {
    "vanilla": "nothing attached",
    "fresh": "an untrained network for every task",
    "l2:lam=1e-3": "a setting",
    "redo:tau=0.1:every=97": "two settings",
    "l2:lam=1e-2|1e-4": "the better one on held-out data; in quotes, for the shell",
    "swr+l2": "both at once",
}


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Take what stands before the command."""


@app.command()
def compare(
    data: Annotated[
        str,
        typer.Option(
            help="Data set: a name (`pliant list data`), a path, file.py:function or package.module:function."
        ),
    ] = "digits",
    model: Annotated[
        str,
        typer.Option(help="Network: a name (`pliant list models`), file.py:function or package.module:function."),
    ] = "mlp",
    stream: Annotated[str, typer.Option(help="What the network meets (`pliant list streams`).")] = "warm_start",
    methods: Annotated[
        str,
        typer.Option(
            help="What to compare (`pliant list methods`), with commas between: "
            f"{', '.join(f'{example} ({meaning})' for example, meaning in METHODS_EXAMPLES.items())}."
        ),
    ] = "vanilla,fresh,l2,swr",
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 5,
    tune: Annotated[
        bool,
        typer.Option(
            help="Choose the main setting (mostly the strength) of each method that stands alone, on held-out data."
        ),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Anything else: training.lr=1e-3 (`pliant list training`), stream.epochs=20, data.size=32, model.…, "
            "selection.seeds=1, 'measures=[\"loss\"]' (`pliant list measures`), device.",
        ),
    ] = None,
    out: Out = None,
    engine: EngineOption = EngineName.PROCESSES,
    workers: Workers = None,
    threads: Threads = 1,
    gpus: Gpus = 0.0,
    address: Address = None,
    checkpoint_seconds: Checkpoint = 30.0,
) -> None:
    """Compare methods on a stream: train each with several seeds, show a table, write a report."""
    _warn(datasets.tell_namesake(data))
    values: dict[str, Any] = {
        "title": f"{stream.replace('_', ' ')} on {_name_of(data)} with {model}",
        "data": data,
        "model": model,
        "stream": stream,
        "methods": _entries(methods, tune),
        "seeds": seeds,
    }
    try:
        recipe = make_recipe(override(values, setting or ()))
    except RecipeError as error:  # Where it stands in a recipe is nothing that was written here.
        raise ValueError(re.sub(r"^methods\b[\w.]*", "--methods", str(error), flags=re.MULTILINE)) from error
    fixed = [entry.label for entry in recipe.methods if entry.parts and len(entry.variants()) == 1]
    if tune and fixed:
        console.print(f"--tune leaves as they are: {', '.join(fixed)}", markup=False, soft_wrap=True)
    name = "-".join((stream, _name_of(data), Path(model).name)).replace(":", "_")
    make = _engine_maker(engine, workers, threads, gpus, address)
    _run(recipe, out or Path("runs") / name, make, checkpoint_seconds)


@app.command()
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe: its name (`pliant list recipes`), a TOML file, or the recipe.json of a folder of runs."
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, e.g. seeds=2 stream.epochs=5.")] = None,
    scale: Annotated[Scale, typer.Option(help="As published, or the same in minutes.")] = "paper",
    out: Out = None,
    engine: EngineOption = EngineName.PROCESSES,
    workers: Workers = None,
    threads: Threads = 1,
    gpus: Gpus = 0.0,
    address: Address = None,
    checkpoint_seconds: Checkpoint = 30.0,
) -> None:
    """Run a recipe: all of it that is not done yet."""
    path = find_recipe(recipe)
    make = _engine_maker(engine, workers, threads, gpus, address)
    name = path.stem if scale == "paper" else f"{path.stem}-{scale}"
    _run(load_recipe(path, overrides or (), scale), out or Path("runs") / name, make, checkpoint_seconds)


@app.command()
def demo(out: Out = None, workers: Workers = None) -> None:
    """See what Pliant does, in a minute or two: digits whose labels keep changing, trained in seven ways."""
    make = _engine_maker(EngineName.PROCESSES, workers, 1, 0.0, None)
    _run(load_recipe(find_recipe("demo")), out or Path("demo"), make, 30.0)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Experiments' folders.")],
    format: Annotated[
        Format | None,
        typer.Option(
            help="html: a page. md, csv, tex: text and tables. png, svg, pdf: the figures. By default what the name "
            "of --to ends in, or html."
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Where to write; report.FORMAT or figures/ in the first folder by default.")
    ] = None,
) -> None:
    """Say what experiments came to, finished or not, and write a report."""
    _report(folders, format, to)


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="An experiment's folder.")],
    file: Annotated[Path, typer.Argument(help="Where to write, e.g. results.jsonl.gz.")],
) -> None:
    """Keep an experiment's ended runs in one small file."""
    console.print(f"{archive.pack(folder, file)} runs in {file}", markup=False, soft_wrap=True)


@app.command()
def unpack(
    file: Annotated[Path, typer.Argument(help="A packed experiment.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
) -> None:
    """Make an experiment's folder again from a packed file, to report on."""
    console.print(f"{archive.unpack(file, folder)} runs in {folder}", markup=False, soft_wrap=True)


@app.command()
def tensorboard(
    folder: Annotated[Path, typer.Argument(help="An experiment's folder.")],
    to: Annotated[Path | None, typer.Option(help="Where to write; FOLDER/tensorboard by default.")] = None,
) -> None:
    """Export the metrics of an experiment for TensorBoard."""
    from pliant.experiments.tensorboard import export

    target = to or folder / "tensorboard"
    count = export(folder, target)
    console.print(f"{count} runs; see them with: tensorboard --logdir {target}", markup=False, soft_wrap=True)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help=", ".join(listings.LISTINGS))]) -> None:
    """Show what there is to choose from."""
    if what not in listings.LISTINGS:
        raise ValueError(f"list {what!r}: {suggest(what, listings.LISTINGS)}")
    console.print(listings.LISTINGS[what]())


@data_app.command("list")
def data_list() -> None:
    """Show the data sets and what is in the cache."""
    console.print(listings.data_listing())
    folder = cache.cache_folder()
    for entry in cache.entries():
        size = sum(file.stat().st_size for file in entry.iterdir())
        console.print(f"in the cache: {entry} ({size / 1e6:.0f} MB)", markup=False, soft_wrap=True)
    console.print(f"the cache is {folder}; PLIANT_CACHE names another", markup=False, soft_wrap=True)


@data_app.command("get")
def data_get(
    name: Annotated[
        str, typer.Argument(help="A data set: a name, a path, file.py:function or package.module:function.")
    ],
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="How to load it, as for runs: data.size=32, data.first=100.")
    ] = None,
) -> None:
    """Download and decode a data set, so that runs find it ready."""
    _warn(datasets.tell_namesake(name))
    dataset = datasets.load(name, **read_options(setting or (), "data")["data"])
    console.print(
        f"{name}: {len(dataset.train)} examples to learn from, {len(dataset.test)} to be tested on, "
        f"{len(dataset.classes)} classes, shape {dataset.shape}",
        markup=False,
        soft_wrap=True,
    )


@data_app.command("check")
def data_check() -> None:
    """Compare every data set in the cache with its checksums."""
    problems = [problem for entry in cache.entries() for problem in cache.check(entry)]
    for problem in problems:
        console.print(problem, markup=False, soft_wrap=True)
    console.print(f"{len(cache.entries())} data sets in {cache.cache_folder()}, {len(problems)} problems", markup=False)
    if problems:
        raise typer.Exit(1)


def _warn(*warnings: str | None) -> None:
    for warning in filter(None, warnings):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


def _engine_maker(
    engine: EngineName, workers: int | None, threads: int, gpus: float, address: str | None
) -> Callable[[], Engine]:
    if engine is EngineName.RAY:
        if workers is not None:
            raise ValueError("--workers is for --engine processes; Ray starts as many runs as its CPUs allow")
        return lambda: RayEngine(address, threads, gpus)
    if gpus or address:
        raise ValueError("--gpus and --address are for --engine ray")
    return lambda: ProcessEngine(workers, threads)


def _run(recipe: Recipe, root: Path, make_engine: Callable[[], Engine], checkpoint_seconds: float) -> None:
    present = rehearse(recipe)  # It also downloads and decodes once, before many processes want it at the same time.
    _warn(*find_outdated(root, present))
    engine = make_engine()
    if isinstance(engine, ProcessEngine):
        check_device(recipe.device)
    try:
        with LiveProgress(root, console) as progress:
            statuses = run_experiment(
                recipe,
                root,
                lambda runs: run_all(runs, root, engine, progress, checkpoint_seconds=checkpoint_seconds),
                lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
            )
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    finally:
        engine.close()
    bad = sum(status != "finished" for status in statuses.values())
    code = 1 if bad else 0
    try:
        _report([root], Format.HTML, asked=True)
    except (OSError, ValueError, ImportError) as error:
        console.print(f"the report could not be made: {error}", markup=False, soft_wrap=True)
        code = 1
    if bad:
        console.print(f"{bad} of {len(statuses)} runs did not finish; result.json in their folders says why")
    if code:
        raise typer.Exit(code)


def _name_of(data: str) -> str:
    """Return what a data set is called in titles and folders: a path's last part, also if that is written `.`."""
    return Path(data).resolve().name if Path(data).is_dir() else Path(data).name


def _entries(methods: str, tune: bool) -> list[Any]:
    """Read what --methods says; of entries with the same methods, those with settings are called by these too."""
    texts = [text.strip() for text in methods.split(",")]
    parts = [split_methods(text) for text in texts]
    names = [label_of(text) for text in texts]
    entries: list[Any] = []
    for text, name, each in zip(texts, names, parts, strict=True):
        if tune and text.isidentifier() and published_sweep(text):
            entries.append({"name": text, "grid": "sweep"})
        elif text != name and names.count(name) > 1:
            entries.append({"label": text, "parts": each})
        else:
            entries.append(text)
    return entries


def _report(folders: list[Path], format: Format | None, to: Path | None = None, *, asked: bool = False) -> None:
    from pliant.experiments.report.document import FIGURES, FORMATS, make_report  # Statistics take seconds to import.

    chosen: str = format or (to and to.suffix.removeprefix(".")) or Format.HTML
    if chosen not in FORMATS:
        raise ValueError(
            f"--to is '{to}', which does not tell the format; end it in one of {', '.join(FORMATS)}, or give --format"
        )
    report = make_report(folders)
    target = to or folders[0] / ("figures" if chosen in FIGURES else f"report.{chosen}")
    files = report.save(target, chosen)
    report.print(console, asked=asked)
    written = f"report: {target}" + (f" ({len(files)} files)" if chosen in FIGURES else "")
    console.print(written, markup=False, soft_wrap=True)


def main() -> NoReturn:
    """Run the command line; a mistake in what was asked for ends in a line, not in a traceback."""
    # A polite kill ends like Ctrl-C: workers are stopped, what was saved stays.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter shows a question mark
    try:
        app()
    except (ValueError, ImportError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    sys.exit(0)
