"""`pliant diagnose`: a checkpoint, a way to build its network and data, in; a table and a page, out."""

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
        Path, typer.Argument(help="Weights: a safetensors file, or a state dict that torch.save wrote.")
    ],
    model: Annotated[
        str,
        typer.Option(help="The network: a name (`pliant list models`), file.py:function or package.module:function."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Data to measure on: a name (`pliant list data`), a path, file.py:function or package.module:function."
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(
            help="Where the weights are in a checkpoint (and the reference's) that holds more: q_network, agent.actor."
        ),
    ] = "",
    reference: Annotated[
        str, typer.Option(help="What to compare with: `fresh` (a new network), a checkpoint, or `none`.")
    ] = "fresh",
    labels: Annotated[
        Literal["own", "random"], typer.Option(help="The data's own labels, or random ones: a task that is new.")
    ] = "own",
    split: Annotated[Literal["train", "test"], typer.Option(help="Which examples.")] = "train",
    samples: Annotated[int, typer.Option(min=1, help="How many of them.")] = 256,
    seed: Annotated[int, typer.Option(help="Decides which examples, random labels and the fresh network.")] = 0,
    measures: Annotated[
        str | None,
        typer.Option(
            help="Measures, with commas between; by default all but those of an optimizer's step and of a whole matrix."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="How data is loaded and the network built, e.g. data.size=32, model.width=8."),
    ] = None,
    layers: Annotated[
        bool | None,
        typer.Option(help="Show every layer in the terminal; by default if they are few."),
    ] = None,
    html: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("diagnosis.html"),
    parquet: Annotated[Path | None, typer.Option(help="Where to write the values as a table.")] = None,
) -> None:
    """Say whether a network shows signs of lost plasticity, where, and what they are known to explain."""
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
        note = f"the loss is cross-entropy on {labels} labels; pliant.diagnose(model, batch, loss_fn) takes any other"
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
            raise ValueError(f"model {name!r} needs --data, which tells the shape of its inputs and its classes")
        return models.create(name, dataset.shape, len(dataset.classes), seed=seed, **options)
    except (ValueError, ImportError):
        raise
    except Exception as error:  # what somebody's own function raises may be anything
        without = " without --data" if dataset is None else ""
        raise ValueError(f"model {name!r} cannot be built{without}: {_reason(error)}") from error


def _check_fit(network: nn.Module, batch: tuple[Tensor, Tensor], labeled: bool, model: str, data: str) -> None:
    """Try the network on the batch: what goes wrong there is a mistake in what was asked for."""
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
