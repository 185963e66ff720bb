"""`pliant diagnose`: a checkpoint, a way to build its network and data, in; a table and a page, out."""

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pliant import data as datasets
from pliant import models
from pliant.data.dataset import Dataset
from pliant.diagnostics.checkpoint import load_into
from pliant.diagnostics.diagnosing import diagnose
from pliant.diagnostics.page import write_page
from pliant.importing import import_object
from pliant.seeding import generator, permutation


def diagnose_command(
    checkpoint: Annotated[
        Path, typer.Argument(help="Weights: a safetensors file, or a state dict that torch.save wrote.")
    ],
    model: Annotated[str, typer.Option(help="The network: a name (`pliant list models`) or module:function.")],
    data: Annotated[
        str | None, typer.Option(help="Data to measure on: a name (`pliant list data`), a folder, or module:function.")
    ] = None,
    reference: Annotated[
        str, typer.Option(help="What to compare with: `fresh` (a new network), a checkpoint, or `none`.")
    ] = "fresh",
    labels: Annotated[
        Literal["own", "random"], typer.Option(help="The data's own labels, or random ones: a task that is new.")
    ] = "own",
    split: Annotated[Literal["train", "test"], typer.Option(help="Which examples.")] = "train",
    samples: Annotated[int, typer.Option(min=1, help="How many of them.")] = 256,
    seed: Annotated[int, typer.Option(help="Decides which examples, random labels and the fresh network.")] = 0,
    measures: Annotated[str | None, typer.Option(help="Measures, with commas between; all by default.")] = None,
    layers: Annotated[bool, typer.Option(help="Show every layer in the terminal.")] = False,
    html: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("diagnosis.html"),
    parquet: Annotated[Path | None, typer.Option(help="Where to write the values as a table.")] = None,
) -> None:
    """Say whether a network shows signs of lost plasticity, where, and what they are known to explain."""
    dataset = datasets.load(data) if data is not None else None
    network = load_into(_build(model, dataset, seed), checkpoint)
    other = None
    if reference != "none":
        other = _build(model, dataset, seed)
        if reference != "fresh":
            load_into(other, reference)
    batch = _examples(dataset, split, labels, samples, seed) if dataset is not None else None
    chosen = measures.split(",") if measures is not None else None
    found = diagnose(network, batch, cross_entropy, other, measures=chosen)
    typer.echo(f"{found.table()}\n\n{found.verdict}" if layers else str(found))
    write_page(found, html, f"{checkpoint.name}: {model}" + (f" on {data}" if data is not None else ""))
    typer.echo(f"page: {html}")
    if parquet is not None:
        found.to_parquet(parquet)
        typer.echo(f"table: {parquet}")


def _build(name: str, dataset: Dataset | None, seed: int) -> nn.Module:
    if dataset is not None:
        return models.create(name, dataset.shape, len(dataset.classes), seed=seed)
    if ":" not in name:
        raise ValueError(f"model {name!r} needs --data, which tells the shape of its inputs and its classes")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = import_object(name)()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} returned {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _examples(dataset: Dataset, split: str, labels: str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    examples = dataset.train if split == "train" else dataset.test
    x, y = examples.batch(permutation(len(examples), "diagnose", seed)[:samples])
    if labels == "random":
        y = torch.randint(0, len(dataset.classes), y.shape, generator=generator("diagnose", "labels", seed))
    return x, y
