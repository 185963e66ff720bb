"""`pliant diagnose`: diagnose a checkpoint and write a page, or explain a jump in the loss after a resume."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn

from pliant import data as datasets
from pliant import models
from pliant._key_values import read_options
from pliant._losses import class_loss
from pliant._names import check_names
from pliant._seeding import permutation
from pliant._terminal import printable
from pliant._validation import check_number
from pliant.data.dataset import Dataset, Examples
from pliant.diagnosis.diagnose import BUDGET, diagnose
from pliant.diagnosis.resume_check import check_resume
from pliant.diagnostics import measures as registry
from pliant.diagnostics.checkpoints import load_into
from pliant.running import undisturbed
from pliant.training import Settings, make_optimizer
from pliant.trial import EXAMPLES

EPILOG = (
    "Examples:\n\n- `pliant diagnose checkpoint.pt --model mine.py:build --data photos/`\n\n"
    "- `pliant diagnose --before a.pt --after b.pt --model mlp --data digits`"
)
TRIAL, SIGNS, RESUME, OUTPUT = "The trial, which decides", "The signs, which explain", "A loss jump", "Output"
"""Panels of `--help`."""
_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")


def diagnose_command(
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Network: see `pliant list models`, or file.py:function."),
    ],
    checkpoint: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The weights: a safetensors file, or written by torch.save.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The new data to learn, which the verdict needs: see `pliant list data`; a path, or file.py:function.",
        ),
    ] = None,
    trial: Annotated[
        bool, typer.Option(rich_help_panel=TRIAL, help="Let copies learn the data beside fresh networks.")
    ] = True,
    budget: Annotated[
        float, typer.Option(rich_help_panel=TRIAL, metavar="SECONDS", help="How long the trial may take.")
    ] = BUDGET,
    steps: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=TRIAL, metavar="N", min=1, help="Steps of each network. Default: ten epochs, 400 to 2000."
        ),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RESUME, metavar="FILE", help="With --after: the checkpoint that training resumed from."
        ),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=RESUME,
            metavar="FILE",
            help="With --before: a checkpoint after the jump, saved soon after the resume.",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="The place of the weights, if the file holds several networks, e.g. agent.actor."
        ),
    ] = "",
    reference: Annotated[
        str,
        typer.Option(rich_help_panel=SIGNS, metavar="FILE", help="Compare with: `fresh` networks, or a checkpoint."),
    ] = "fresh",
    labels: Annotated[
        Literal["own", "random"],
        typer.Option(rich_help_panel=TRIAL, metavar="NAME", help="`own`, or `random` labels as a stress test."),
    ] = "own",
    samples: Annotated[
        int, typer.Option(rich_help_panel=SIGNS, metavar="N", min=1, help="Examples to measure on.")
    ] = 256,
    seed: Annotated[int, typer.Option(metavar="N", help="The seed of all that is drawn.")] = 0,
    measures: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SIGNS,
            metavar="LIST",
            help="Measures, separated by commas. Default: all, except measures that need a full matrix or a step.",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Other options: data.size=32, model.width=8, training.optimizer=sgd, training.lr=0.1.",
        ),
    ] = None,
    table: Annotated[
        bool,
        typer.Option("--table", rich_help_panel=OUTPUT, help="Print the values of all measures, by layer too."),
    ] = False,
    html: Annotated[Path, typer.Option(rich_help_panel=OUTPUT, metavar="FILE", help="The HTML page to write.")] = Path(
        "diagnosis.html"
    ),
    parquet: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, metavar="FILE", help="A Parquet file for the values.")
    ] = None,
) -> None:
    """Say whether a network has lost plasticity, which signs explain it, and what to try.

    Copies of the network learn the new data beside fresh networks, within --budget seconds. Then signs are measured,
    layer by layer. A page shows everything.

    With --before and --after: say whether a jump in the loss after a resume comes from lost optimizer or schedule
    state, from lost plasticity, or from the data.
    """
    _check_files(checkpoint, before, after, html, parquet)
    check_number("--budget", budget, above=True)
    chosen = [name.strip() for name in measures.split(",")] if measures is not None else None
    labeled = trial or any(measure.of_loss for measure in registry.select(chosen))
    options = read_options(setting or (), "data", "model", "training")
    make = _optimizer_maker(options["training"])
    if data is not None and (warning := datasets.tell_namesake(data)):
        _echo(f"warning: {warning}")
    dataset = datasets.load(data, **options["data"]) if data is not None else None

    def build() -> nn.Module:
        return _build(model, dataset, seed, options["model"])

    train, test = (_pair(each, seed) for each in (dataset.train, dataset.test)) if dataset else (None, None)
    if train is not None:
        _check_fit(build(), (train[0][:2], train[1][:2]), labeled, f"model {model!r}", f"data {data!r}")
    network = load_into(build(), checkpoint, key) if checkpoint is not None else None
    if trial and train is not None:
        long = f"at most {budget:g} seconds (--budget)" if steps is None else f"{steps} steps each (--steps)"
        _echo(f"letting copies of the network learn for {long}", err=True)
    learning: dict[str, Any] = {"optimizer": make, "test": test, "steps": steps, "budget": budget, "seed": seed}
    if checkpoint is None or network is None:
        assert before is not None
        assert after is not None
        resume = check_resume(before, after, build, train, key=key, hold_trial=trial, **learning)
        _echo(resume)
        if resume.cause == "plasticity":
            _echo(f"next: {_write_treat(after, model, data, key, setting)} finds the best remedy")
        elif resume.cause == "undecided":
            _echo(f"next: {_ask_again(data is not None, trial, budget)}")
        return
    found = diagnose(
        network, train, class_loss if train is not None else None,
        fresh=_seeded(model, dataset, options["model"]), labels="given" if labels == "own" else "random",
        reference=load_into(build(), reference, key) if reference != "fresh" else None,
        trial=trial, measures=chosen, samples=samples, **learning,
    )  # fmt: skip
    _echo(found)
    if table:
        _echo(f"\n{found.signs.table()}")
    found.save(html, f"{checkpoint.name}: {model}" + (f" on {data}" if data is not None else ""))
    _echo(f"\npage: {html}")
    if parquet is not None:
        found.signs.to_parquet(parquet)
        _echo(f"table: {parquet}")
    advice = {
        "plastic": f"nothing to repair; {html} shows the learning curves",
        "lost": f"{_write_treat(checkpoint, model, data, key, setting)} finds the best remedy",
    }
    again = _ask_again(data is not None, trial, budget)
    _echo(f"next: {advice.get(found.verdict or '', again)}")


def _write_treat(checkpoint: Path | None, model: str, data: str | None, key: str, settings: list[str] | None) -> str:
    """Write the command that finds the best remedy for a checkpoint."""
    command = ["pliant", "treat", str(checkpoint), "--model", model, "--data", str(data)]
    command += ["--key", key] if key else []
    return shlex.join([*command, *(part for each in settings or () for part in ("--set", each))])


def _ask_again(with_data: bool, trial: bool, budget: float) -> str:
    """Say which command may give a verdict, if this one gave none."""
    if not with_data:
        return "the same command with --data, the new data to learn, gives a verdict"
    if not trial:
        return "the same command without --no-trial gives a verdict"
    return f"the same command with --budget {4 * budget:g}, or with more data, may decide"


def _check_files(
    checkpoint: Path | None, before: Path | None, after: Path | None, html: Path, parquet: Path | None
) -> None:
    if (before is None) != (after is None) or (checkpoint is None) == (before is None):
        raise ValueError("give a checkpoint, or two checkpoints around a resume as --before and --after")
    for option, path in (("--html", html), ("--parquet", parquet)):
        if path is not None and path.is_dir():
            raise ValueError(f"{option} is {str(path)!r}, which is a folder; it must be a file")
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{option} is {str(path)!r}; there is no folder {str(path.parent)!r}")


def _optimizer_maker(options: dict[str, Any]) -> Callable[[Any], torch.optim.Optimizer]:
    check_names("--set training", options, _OPTIMIZER)
    settings = Settings(**options)
    return lambda parameters: make_optimizer(nn.ParameterList(parameters), settings)


def _seeded(name: str, dataset: Dataset | None, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return a builder that draws other weights at every call, from torch's generator."""
    return lambda: _build(name, dataset, int(torch.randint(2**31, ())), options)


def _build(name: str, dataset: Dataset | None, seed: int, options: dict[str, Any]) -> nn.Module:
    try:
        if ":" in name:
            known = () if dataset is None else (dataset.shape, len(dataset.classes))
            return models.create_own(name, known, options, seed)
        if dataset is None:
            raise ValueError(f"model {name!r} needs --data, which gives the shape of its inputs and its classes")
        return models.create(name, dataset.shape, len(dataset.classes), seed=seed, **options)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # a user's function may raise anything
        without = " without --data" if dataset is None else ""
        raise ValueError(f"model {name!r} cannot be built{without}: {_reason(error)}") from error


def _check_fit(network: nn.Module, batch: tuple[Tensor, Tensor], labeled: bool, model: str, data: str) -> None:
    """Raise a ValueError if the network does not run on the batch, or its outputs do not fit the labels."""
    x, y = batch
    with undisturbed(network), torch.no_grad():
        try:
            output = network(x)
        except Exception as error:
            shape = tuple(x.shape[1:])
            raise ValueError(f"{model} does not take {data}, inputs of shape {shape}: {_reason(error)}") from error
        try:
            if labeled:
                class_loss(output, y)
        except Exception as error:
            raise ValueError(f"the outputs of {model} do not fit the labels of {data}: {_reason(error)}") from error


def _echo(text: object, err: bool = False) -> None:
    typer.echo(printable(str(text)), err=err)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _pair(examples: Examples, seed: int) -> tuple[Tensor, Tensor]:
    return examples.batch(permutation(len(examples), "diagnose", seed)[:EXAMPLES])
