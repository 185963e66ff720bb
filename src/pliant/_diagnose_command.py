"""`pliant diagnose`: diagnose a checkpoint, print a table and a verdict, and write a page."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pliant import data as datasets
from pliant import models
from pliant._key_values import read_options
from pliant._seeding import generator, permutation
from pliant.data.dataset import Dataset
from pliant.diagnostics import measures as registry
from pliant.diagnostics.checkpoints import load_into
from pliant.diagnostics.diagnosis import diagnose
from pliant.diagnostics.diagnosis_page import write_diagnosis
from pliant.running import undisturbed


def diagnose_command(
    checkpoint: Annotated[
        Path, typer.Argument(help="The weights: a safetensors file, or a state dict written by torch.save.")
    ],
    model: Annotated[
        str,
        typer.Option(help="The network: a name (`pliant list models`), file.py:function or package.module:function."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="The data: a name (`pliant list data`), a path, file.py:function or package.module:function."
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            help="The place of the weights in a checkpoint that holds several networks, e.g. q_network or agent.actor."
        ),
    ] = "",
    reference: Annotated[
        str, typer.Option(help="The network to compare with: `fresh` (a new network), a checkpoint, or `none`.")
    ] = "fresh",
    labels: Annotated[
        Literal["own", "random"], typer.Option(help="The labels of the data, or random labels as a new task.")
    ] = "own",
    split: Annotated[Literal["train", "test"], typer.Option(help="The split to take examples from.")] = "train",
    samples: Annotated[int, typer.Option(min=1, help="How many examples to measure on.")] = 256,
    seed: Annotated[
        int, typer.Option(help="The seed of the choice of examples, the random labels and the fresh network.")
    ] = 0,
    measures: Annotated[
        str | None,
        typer.Option(
            help="Measures, separated by commas. By default, all except those that need a full matrix or a step."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="An option of the data or the network, e.g. data.size=32 or model.width=8. May be repeated."
        ),
    ] = None,
    layers: Annotated[
        bool | None,
        typer.Option(help="Print every layer. By default, layers are printed if there are few."),
    ] = None,
    html: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("diagnosis.html"),
    parquet: Annotated[Path | None, typer.Option(help="A Parquet file to write the values to.")] = None,
) -> None:
    """Show the signs of lost plasticity in a network, the layers that have them, and what they are known to explain."""
    _check_file("--html", html)
    if parquet is not None:
        _check_file("--parquet", parquet)
    chosen = [name.strip() for name in measures.split(",")] if measures is not None else None
    labeled = any(measure.of_loss for measure in registry.select(chosen))
    options = read_options(setting or (), "data", "model")
    if data is not None and (warning := datasets.tell_namesake(data)):
        typer.echo(f"warning: {warning}")
    dataset = datasets.load(data, **options["data"]) if data is not None else None
    network = load_into(_build(model, dataset, seed, options["model"]), checkpoint, key)
    other = None
    if reference != "none":
        other = _build(model, dataset, seed, options["model"])
        if reference != "fresh":
            load_into(other, reference, key)
    batch = None
    if dataset is not None:
        batch = _examples(dataset, split, labels, samples, seed)
        _check_fit(network, batch, labeled, f"model {model!r}", f"data {data!r}")
    found = diagnose(network, batch, cross_entropy, other, measures=chosen)
    if batch is not None and labeled:
        note = f"the loss is cross-entropy on {labels} labels; pliant.diagnose(model, batch, loss_fn) takes any loss"
        found = replace(found, notes=(*found.notes, note))
    typer.echo(found.show(layers=layers))
    write_diagnosis(found, html, f"{checkpoint.name}: {model}" + (f" on {data}" if data is not None else ""))
    typer.echo(f"page: {html}")
    if parquet is not None:
        found.to_parquet(parquet)
        typer.echo(f"table: {parquet}")


def _check_file(option: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, which is a folder; it must be a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} is {str(path)!r}; there is no folder {str(path.parent)!r}")


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
                cross_entropy(output, y)
        except Exception as error:
            raise ValueError(f"the outputs of {model} do not fit the labels of {data}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _examples(dataset: Dataset, split: str, labels: str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    examples = dataset.train if split == "train" else dataset.test
    x, y = examples.batch(permutation(len(examples), "diagnose", seed)[:samples])
    if labels == "random":
        y = torch.randint(0, len(dataset.classes), y.shape, generator=generator("diagnose", "labels", seed))
    return x, y
