"""The command line: compare methods, run recipes, read results, find out what there is."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.table import Table

    from pliant.experiments.display import LiveProgress, result_table
    from pliant.experiments.recipe import BASELINES, Recipe, RecipeError, load_recipe, make_recipe, parse_value
except ImportError as error:  # pragma: no cover
    raise SystemExit(f"the command line needs more than torch ({error}): pip install 'pliant[cli]'") from error

from pliant import data, methods, models, streams
from pliant.experiments.engines import ProcessEngine
from pliant.experiments.experiment import run_experiment
from pliant.experiments.report import write_report
from pliant.experiments.schedule import run_all
from pliant.experiments.store import FINAL, load_runs
from pliant.experiments.table import tabulate

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Keep networks able to learn.", pretty_exceptions_enable=False
)
console = Console()

Out = Annotated[Path | None, typer.Option(help="Folder for the runs; the same folder goes on where it stopped.")]
Workers = Annotated[int | None, typer.Option(help="Processes; one a core by default.")]
Seeds = Annotated[int, typer.Option(help="How many seeds.")]


@app.command()
def compare(
    data: Annotated[str, typer.Option(help="Data set; see `pliant list data`.")] = "digits",
    model: Annotated[str, typer.Option(help="Network; see `pliant list models`.")] = "mlp",
    stream: Annotated[str, typer.Option(help="What it meets; see `pliant list streams`.")] = "warm_start",
    methods: Annotated[
        str, typer.Option(help="Methods, e.g. vanilla,swr:lam=1e-3,l2:lam=1e-3|1e-4,swr+l2.")
    ] = "vanilla,swr,l2",
    seeds: Seeds = 5,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="More, e.g. stream.epochs=20, training.lr=1e-3.")
    ] = None,
    out: Out = None,
    workers: Workers = None,
) -> None:
    """Compare methods on a stream: train each with several seeds, then show a table and write a report."""
    values: dict[str, Any] = {
        "title": f"{stream} on {data} with {model}",
        "data": {"name": data},
        "model": {"name": model},
        "stream": {"name": stream},
        "training": {},
        "methods": methods.split(","),
        "seeds": seeds,
    }
    for assignment in setting or []:
        key, _, text = assignment.partition("=")
        table, dot, name = key.partition(".")
        if dot and isinstance(values.get(table), dict):
            values[table][name] = parse_value(text)
        else:
            values[key] = parse_value(text)
    _run(make_recipe(values), out or Path("runs") / f"{stream}-{data}-{model}".replace("/", "_"), workers)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes: key=value.")] = None,
    out: Out = None,
    workers: Workers = None,
) -> None:
    """Run a recipe: all that is not done yet of it."""
    _run(load_recipe(recipe, overrides or ()), out or Path("runs") / recipe.stem, workers)


@app.command()
def demo(out: Out = None, workers: Workers = None) -> None:
    """See what Pliant does, in a minute or two: a warm start on handwritten digits, trained in seven ways."""
    recipe = make_recipe(
        {
            "title": "Warm start on 400 digits: a quarter of them first, then all",
            "data": {"name": "digits", "first": 400},
            "model": "mlp",
            "stream": {"name": "warm_start", "fraction": 0.25, "first_epochs": 200, "epochs": 60},
            "training": {"lr": 1e-2, "batch_size": 16, "evaluate_every": 10},
            "methods": ["vanilla", "fresh", "l2", "l2_init", "shrink_perturb", "head_reset", "swr"],
            "seeds": 5,
        }
    )
    _run(recipe, out or Path("demo"), workers)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="An experiment's folder.")]) -> None:
    """Write the report of an experiment, finished or not, and show its table."""
    _show(folder)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="methods, streams, models or data.")]) -> None:
    """Show what there is to choose from."""
    listings = {"methods": _methods, "streams": _streams, "models": _models, "data": _data}
    if what not in listings:
        raise RecipeError(f"list {what!r}: allowed: {', '.join(listings)}")
    console.print(listings[what]())


def _methods() -> Table:
    table = Table("name", "kind", "what it does", "settings (default)", "from")
    for name, summary in BASELINES.items():
        table.add_row(name, "baseline", summary, "", "")
    for info in map(methods.info, methods.names()):
        settings = ", ".join(f"{t.name} ({t.default})" for t in info.tunables)
        table.add_row(info.name, info.kind, info.summary, settings, info.paper)
    return table


def _streams() -> Table:
    table = Table("name", "what the network meets", "options (default)", "from")
    for name in streams.names():
        cls = streams.stream_class(name)
        summary = (cls.__doc__ or "").partition("\n")[0]
        options = ", ".join(f"{key} ({value})" for key, value in streams.options(name).items())
        table.add_row(name, summary, options, cls.paper)
    return table


def _models() -> Table:
    table = Table("name", "what it is", "from")
    for info in map(models.info, models.names()):
        table.add_row(info.name, info.summary, info.paper)
    return table


def _data() -> Table:
    table = Table("name", "what it is")
    for name in data.names():
        table.add_row(name, data.summary(name))
    table.add_row("PATH", "a folder of images (class/… or train/class/… and test/class/…), or an .npz file")
    table.add_row("MODULE:FUNCTION", "a function of your own that returns (x_train, y_train), (x_test, y_test)")
    return table


def _run(recipe: Recipe, root: Path, workers: int | None) -> None:
    # Downloads and decodes once, before many processes want it at the same time.
    data.load(recipe.data.name, **recipe.data.options)
    engine = ProcessEngine(workers)
    try:
        with LiveProgress(root, console) as progress:
            statuses = run_experiment(recipe, root, lambda runs: run_all(runs, root, engine, progress))
    finally:
        engine.close()
    _show(root)
    bad = [name for name, status in statuses.items() if status != "finished"]
    if bad:
        console.print(f"{len(bad)} of {len(statuses)} runs did not finish; result.json in their folders says why:")
        console.print("\n".join(bad))
        raise typer.Exit(1)


def _show(root: Path) -> None:
    runs = load_runs(root)
    rows = tabulate(runs)
    unfinished = sum(run.status not in FINAL for run in runs)
    if not rows:
        console.print("no run has ended yet")
        return
    recipe_stream = runs[0].config.stream.name
    console.print(result_table(rows, streams.stream_class(recipe_stream).headline, root.name))
    if unfinished:
        console.print(f"{unfinished} runs are not finished")
    console.print(f"report: {write_report(root)}")


def main() -> NoReturn:
    """Run the command line; mistakes in what was asked for end in a line, not in a traceback."""
    # A polite kill ends like Ctrl-C: workers are stopped, what was saved stays.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(standalone_mode=False)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        sys.exit(130)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (ValueError, typer.BadParameter) as error:
        Console(stderr=True).print(f"error: {error}", markup=False)
        sys.exit(2)
    sys.exit(0)
