"""The command line: compare methods, run recipes, read results, list what is there to choose from.

Commands import torch and what else they need when they run, so that `pliant --help` answers at once.
"""

import importlib
import io
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

try:
    import typer
    from typer.core import TyperGroup
    from typer.main import get_command

    from pliant import _command_options as shared
    from pliant._console import SafeConsole, make_console
except ImportError as error:
    raise SystemExit(f"the command line needs more than torch ({error}): pip install 'pliant[cli]'") from error

from pliant._key_values import override, read_options
from pliant._names import check_names, suggest
from pliant._terminal import printable
from pliant._version import __version__

if TYPE_CHECKING:
    from pliant.compare import ComparisonResult
    from pliant.experiments.engines import Engine


class _Group(TyperGroup):
    """Commands whose help shows arguments and flags by their names, without the Python types that rich would add."""

    def get_params(self, ctx: Any) -> Any:
        """Return the group's own parameters."""
        return _hide_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in _LATER:  # it lives in its own module, which is imported now
            module = importlib.import_module(f"pliant._{name}_command")
            holder = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            holder.command(name, epilog=module.EPILOG)(getattr(module, f"{name}_command"))
            command = get_command(holder)
        if command is not None:
            _hide_types(command.get_params(ctx))
        return name, command, rest


def _hide_types(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = " "
        if param.param_type_name == "argument":  # its name says enough; typer would add `<list[Path]>`
            param.display_type_rich = lambda ctx: None
    return params


class _Commands(_Group):
    """All commands; Ctrl-C ends each of them in one line."""

    def invoke(self, ctx: Any) -> Any:
        pressed = False

        def interrupt(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            pressed = True
            signal.default_int_handler(number, frame)

        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupt)
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except (KeyboardInterrupt, Exception) as error:  # an import may turn the one into another
            if not pressed and isinstance(error, Exception):
                raise
            _print(STOPPED)
            raise typer.Exit(130) from None
        finally:
            signal.signal(signal.SIGINT, before)


_LATER = {
    "diagnose": "Say whether a network has lost plasticity, which signs explain it, and what to try.",
    "treat": "Treat a checkpoint: continue, apply a remedy or train from scratch? Tries all, and gives the code.",
}
"""The commands that live in modules of their own, `_NAME_command`."""
STOPPED = "stopped; the same command starts over"
RESUMES = "stopped; the same command resumes"
PREPARING = "preparing …"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Keep PyTorch networks able to learn: attach methods, diagnose, treat, compare.",
    epilog="First steps:\n\n- `pliant demo`\n\n- `pliant diagnose checkpoint.pt --model mine.py:build --data photos/`"
    "\n\n- `pliant list methods`\n\nExit codes: 0 done; 1 a run or a report failed, or data is damaged; 2 wrong "
    "arguments; 130 stopped by Ctrl-C; 143 terminated. After 130 and 143 the same command resumes.",
)
data_app = typer.Typer(cls=_Group, no_args_is_help=True, help="Download data sets and check the cache.")
app.add_typer(data_app, name="data")
console = make_console()


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Take the options before the command."""


@app.command(
    epilog=shared.list_examples(
        "pliant compare --seeds 2",
        "pliant compare --data photos/ --model resnet18 --methods 'vanilla,swr,l2:lam=1e-2|1e-4'",
    )
    + "\n\nEntries of --methods:\n\n"
    + "\n\n".join(f"- `{entry}`: {meaning}" for entry, meaning in shared.METHODS_EXAMPLES.items())
)
def compare(
    data: Annotated[
        str,
        typer.Option(
            rich_help_panel=shared.WHAT,
            metavar="NAME",
            help="Data set: see `pliant list data`; a path, or file.py:function.",
        ),
    ] = "digits",
    model: Annotated[
        str,
        typer.Option(
            rich_help_panel=shared.WHAT, metavar="NAME", help="Network: see `pliant list models`, or file.py:function."
        ),
    ] = "mlp",
    stream: Annotated[
        str, typer.Option(rich_help_panel=shared.WHAT, metavar="NAME", help="Tasks: see `pliant list streams`.")
    ] = "warm_start",
    methods: Annotated[
        str,
        typer.Option(
            rich_help_panel=shared.WHAT,
            metavar="LIST",
            help="Methods, separated by commas: see `pliant list methods`, and below.",
        ),
    ] = "vanilla,fresh,l2,swr",
    seeds: Annotated[int, typer.Option(rich_help_panel=shared.WHAT, metavar="N", help="Number of seeds.")] = 5,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            rich_help_panel=shared.SETTINGS,
            help="Choose the main setting of each method without settings, on held-out data.",
        ),
    ] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            rich_help_panel=shared.SETTINGS,
            metavar="KEY=VALUE",
            help="Any other setting, e.g. training.lr=1e-3 (`pliant list training`), stream.epochs=20, data.size=32, "
            "selection.seeds=1, 'measures=[\"loss\"]' (`pliant list measures`), device=cuda.",
        ),
    ] = None,
    out: shared.Out = None,
    engine: shared.EngineOption = shared.EngineName.PROCESSES,
    workers: shared.Workers = None,
    threads: shared.Threads = 1,
    gpus: shared.Gpus = 0.0,
    address: shared.Address = None,
    checkpoint_seconds: shared.Checkpoint = 30.0,
) -> None:
    """Compare methods: train each with several seeds, print a table, write a report."""
    _print(PREPARING)
    from pliant.compare import compare as compare_methods
    from pliant.experiments.recipe import Recipe, RecipeError

    asked = {"methods": methods, "data": data, "model": model, "stream": stream, "seeds": seeds}
    values = override(asked, setting or ())
    check_names("--set", values, Recipe.model_fields)
    place = _make_engine(engine, workers, threads, gpus, address)

    def run_it() -> "ComparisonResult":
        try:
            return compare_methods(
                **values, tune=tune, out=out, engine=place, checkpoint_seconds=checkpoint_seconds, progress=console
            )
        except RecipeError as error:  # The flag is what the user wrote, not its place in a recipe.
            raise ValueError(re.sub(r"^methods\b[\w.]*", "--methods", str(error), flags=re.MULTILINE)) from error

    _run_and_report(run_it)


@app.command(
    epilog=shared.list_examples(
        "pliant run p0_table1_mnist --scale quick",
        "pliant run mine.toml stream.epochs=5",
        "pliant run mine.toml methods=vanilla,SWR",
    )
)
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A name (`pliant list recipes`), a TOML file, or the recipe.json of a folder."
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes of the recipe.")] = None,
    scale: Annotated[
        Literal["paper", "quick"],
        typer.Option(metavar="SCALE", help="paper: as published. quick: smaller, in minutes."),
    ] = "paper",
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Let the file name code. Read that code first."),
    ] = False,
    out: shared.Out = None,
    engine: shared.EngineOption = shared.EngineName.PROCESSES,
    workers: shared.Workers = None,
    threads: shared.Threads = 1,
    gpus: shared.Gpus = 0.0,
    address: shared.Address = None,
    checkpoint_seconds: shared.Checkpoint = 30.0,
) -> None:
    """Run a recipe: every run that is not done yet."""
    _print(PREPARING)
    from pliant.compare import run_recipe
    from pliant.experiments.recipe_files import find_recipe, load_recipe

    path = find_recipe(recipe)
    loaded = load_recipe(path, overrides or (), scale, trust=trust, tell=_print)
    folder = out or Path("runs") / (path.stem if scale == "paper" else f"{path.stem}-{scale}")
    place = _make_engine(engine, workers, threads, gpus, address)
    _run_and_report(lambda: run_recipe(loaded, folder, place, checkpoint_seconds=checkpoint_seconds, console=console))


@app.command(epilog=shared.list_examples("pliant demo", "pliant demo --rl"))
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=shared.RUNS,
            metavar="FOLDER",
            help="Folder of the runs; an interrupted folder resumes. Default: demo.",
        ),
    ] = None,
    workers: shared.Workers = None,
    rl: Annotated[bool, typer.Option("--rl", help="Show an agent that stopped learning, and learns again.")] = False,
    language: Annotated[bool, typer.Option("--language", help="Show a GPT whose alphabet keeps changing.")] = False,
) -> None:
    """Show what Pliant is for: retraining on data that grew, and labels that keep changing. Takes minutes."""
    _print(PREPARING)
    from pliant.compare import ComparisonResult, run_recipe
    from pliant.experiments.engines import ProcessEngine
    from pliant.experiments.recipe_files import find_recipe, load_recipe
    from pliant.experiments.report.document import make_report

    if rl and language:
        raise ValueError("--rl and --language are two demos; give one of them")
    folder, acts = out or Path("demo"), shared.RL_ACTS if rl else shared.LANGUAGE_ACTS if language else shared.ACTS

    def run_acts() -> ComparisonResult:
        statuses: dict[str, Any] = {}
        for name, question in acts.items():
            _print(question)
            recipe, engine = load_recipe(find_recipe(name)), ProcessEngine(workers)
            statuses |= run_recipe(recipe, folder / name, engine, console=console).statuses
        result = ComparisonResult(folder, statuses)
        result.report = make_report([folder / name for name in acts])
        return result

    own = "pliant diagnose checkpoint.pt --model my_models.py:build --data photos/ asks about a network of your own"
    _run_and_report(run_acts, None if rl or language else own)


@app.command(epilog=shared.list_examples("pliant report runs/mine", "pliant report runs/a runs/b --to tables.tex"))
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDERS", help="Folders of runs, or a folder of these.")],
    format: Annotated[
        shared.Format | None,
        typer.Option(
            metavar="FORMAT",
            help="html, md, csv or tex: one file. png, svg or pdf: the figures. Default: the ending of --to, or html.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Where to write. Default: report.FORMAT or figures/ in the first folder."),
    ] = None,
) -> None:
    """Print the results of experiments and write a report."""
    from pliant.experiments.report.document import FIGURES, FORMATS, make_report

    chosen: str = format or (to and to.suffix.removeprefix(".")) or shared.Format.HTML
    if chosen not in FORMATS:
        raise ValueError(
            f"--to is '{to}', which does not tell the format; end it in one of {', '.join(FORMATS)}, or give --format"
        )
    made = make_report(folders)
    target = to or folders[0] / ("figures" if chosen in FIGURES else f"report.{chosen}")
    files = made.save(target, chosen)
    made.print(console)
    _print(f"report: {target}" + (f" ({len(files)} files)" if chosen in FIGURES else ""))
    if chosen == shared.Format.HTML:
        _print(f"next: open {target} in a browser; pliant report {folders[0]} --format csv for the numbers")


def _announce(name: str, summary: str) -> None:
    """Let `pliant --help` list a command whose module is imported when it is called."""

    @app.command(name, help=summary)
    def never_called() -> None:
        raise NotImplementedError


for _name, _summary in _LATER.items():
    _announce(_name, _summary)


@app.command(epilog=shared.list_examples("pliant pack runs/mine mine.jsonl.gz"))
def pack(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of an experiment.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, e.g. results.jsonl.gz.")],
) -> None:
    """Pack the finished runs of an experiment into one small file."""
    from pliant.experiments import archive

    _print(f"{archive.pack(folder, file)} runs in {file}\nnext: pliant unpack {file} FOLDER, on any machine")


@app.command(epilog=shared.list_examples("pliant unpack mine.jsonl.gz runs/again"))
def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A packed experiment.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to make.")],
) -> None:
    """Unpack an experiment, to report on it."""
    from pliant.experiments import archive

    _print(f"{archive.unpack(file, folder)} runs in {folder}\nnext: pliant report {folder}")


@app.command(epilog=shared.list_examples("pliant tensorboard runs/mine"))
def tensorboard(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of an experiment.")],
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write. Default: FOLDER/tensorboard.")
    ] = None,
) -> None:
    """Export the metrics of an experiment to TensorBoard."""
    from pliant.experiments.tensorboard import export

    target = to or folder / "tensorboard"
    _print(f"{export(folder, target)} runs in {target}\nnext: tensorboard --logdir {target}")


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and those in the cache."""
    from pliant._listings import list_data
    from pliant.data import cache

    console.print(list_data())
    for entry in cache.entries():
        size = sum(file.stat().st_size for file in entry.iterdir())
        _print(f"in the cache: {entry} ({size / 1e6:.0f} MB)")
    _print(f"The cache is {cache.cache_folder()}. Set PLIANT_CACHE to use another folder.")
    _print("next: pliant data get NAME downloads and decodes a data set; pliant data check looks for damage")


@data_app.command("get", epilog=shared.list_examples("pliant data get photos/ --set data.size=32"))
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set: a name, a path, or file.py:function.")],
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Options, e.g. data.size=32.")
    ] = None,
) -> None:
    """Download and decode a data set before runs need it."""
    from pliant import data as datasets

    if warning := datasets.tell_namesake(name):
        _print(f"warning: {warning}")
    dataset = datasets.load(name, **read_options(setting or (), "data")["data"])
    _print(
        f"{name}: {len(dataset.train)} training examples, {len(dataset.test)} test examples, "
        f"{len(dataset.classes)} classes, shape {dataset.shape}\nnext: pliant compare --data {name}"
    )


@data_app.command("check")
def data_check() -> None:
    """Compare every data set in the cache with its checksums."""
    from pliant.data import cache

    problems = [problem for entry in cache.entries() for problem in cache.check(entry)]
    for problem in problems:
        _print(problem)
    _print(f"{len(cache.entries())} data sets in {cache.cache_folder()}, {len(problems)} problems")
    if problems:
        _print("next: pliant data get NAME decodes a damaged data set again")
        raise typer.Exit(1)


def _complete_listing(incomplete: str) -> list[str]:
    return [name for name in shared.LISTED if name.startswith(incomplete)]


@app.command("list", epilog=shared.list_examples("pliant list methods", "pliant list data"))
def list_(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help=", ".join(shared.LISTED) + ".", autocompletion=_complete_listing)
    ],
) -> None:
    """List methods, streams, models, data, training, measures or recipes."""
    if what not in shared.LISTED:
        raise ValueError(f"list {what!r}: {suggest(what, shared.LISTED)}")
    from pliant._listings import LISTINGS, NEXT

    console.print(LISTINGS[what]())
    _print(f"next: {NEXT[what]}")


def _print(line: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(line, markup=False, soft_wrap=True)


def _print_error(message: str) -> None:
    SafeConsole(stderr=True).print(f"error: {message}", markup=False, soft_wrap=True)


def _make_engine(
    engine: shared.EngineName, workers: int | None, threads: int, gpus: float, address: str | None
) -> "Engine":
    from pliant.experiments.engines import ProcessEngine, RayEngine

    if engine is shared.EngineName.RAY:
        if workers is not None:
            raise ValueError("--workers is for --engine processes; Ray starts as many runs as its CPUs allow")
        return RayEngine(address, threads, gpus)
    if gpus or address:
        raise ValueError("--gpus and --address are for --engine ray")
    return ProcessEngine(workers, threads)


def _run_and_report(run: "Callable[[], ComparisonResult]", then: str | None = None) -> None:
    """Run an experiment, print its results, write its report; exit with code 1 if a run or the report failed.

    Args:
        run: Runs the experiment.
        then: What to do after looking at the report; by default, read its numbers.
    """
    from pliant._importing import find_missing
    from pliant.compare import PAGE_NEEDS

    try:
        result = run()
    except KeyboardInterrupt:
        _print(RESUMES)
        raise typer.Exit(130) from None
    code = 0
    try:
        result.report.print(console, asked=True)
        if missing := find_missing(*PAGE_NEEDS):
            _print(f"no page without {', '.join(missing)}: pip install 'pliant[report]'; pliant report {result.folder}")
        else:
            (page,) = result.save(result.folder / "report.html")
            _print(
                f"report: {page}\n"
                f"next: open it in a browser; {then or f'pliant report {result.folder} --format csv for the numbers'}"
            )
    except KeyboardInterrupt:
        _print(f"stopped; the runs are done, and `pliant report {result.folder}` makes the report")
        raise typer.Exit(130) from None
    except (OSError, ValueError, ImportError) as error:
        _print(f"the report could not be made: {error}")
        code = 1
    bad = sum(status != "finished" for status in result.statuses.values())
    if bad:
        _print(f"{bad} of {len(result.statuses)} runs did not finish; result.json in their folders says why")
    if bad or code:
        raise typer.Exit(1)


def main() -> NoReturn:
    """Run the command line; wrong arguments end in one line, without a traceback."""
    # SIGTERM ends the command like Ctrl-C: workers stop, saved files stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal without a letter shows a question mark.
    vars(importlib.import_module("typer.rich_utils"))["Console"] = SafeConsole  # Prints wrong arguments.
    write_warning = warnings.formatwarning
    warnings.formatwarning = lambda *arguments, **options: printable(write_warning(*arguments, **options))
    try:
        app()
    except ModuleNotFoundError as error:
        _print_error(f"the command line needs more than torch ({error}): pip install 'pliant[cli]'")
        sys.exit(2)
    except (ValueError, ImportError, OSError) as error:
        _print_error(str(error))
        sys.exit(2)
    except RecursionError:
        _print_error("the input is nested too deeply")
        sys.exit(2)
    except Exception:  # Its text may come from a file.
        sys.stderr.write(printable(traceback.format_exc()))
        sys.exit(1)
    sys.exit(0)
