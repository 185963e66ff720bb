"""Try out what is asked for before anything runs: what cannot work is said once, not by every run."""

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from pliant._importing import tell_failure
from pliant.experiments.provenance import Sources, find_sources
from pliant.experiments.recipe import Entry, Recipe
from pliant.experiments.run import make_methods, make_model, make_stream, take_example
from pliant.experiments.run_config import RunConfig
from pliant.running import eval_mode
from pliant.streams.stream import Stream


def rehearse(recipe: Recipe) -> list[tuple[RunConfig, Sources]]:
    """Load the data, make the streams, and build every network with its methods once; nothing is trained.

    On the CPU: a cluster's devices need not be here.

    Args:
        recipe: The experiment.

    Returns:
        A run of every entry, and what it is made of.

    Raises:
        ValueError: If something in it cannot work.
    """
    made: dict[str, Stream] = {}
    tried: set[str] = set()
    used: list[tuple[RunConfig, Sources]] = []
    for entry in recipe.methods:
        config = replace(recipe.config(entry, (), recipe.seeds[0], "result"), device="cpu")
        key = json.dumps([asdict(config.data), asdict(config.stream)])
        if key not in made:
            made[key] = make_stream(config)
            _check_stream(made[key], recipe)
        if key not in tried and len(entry.variants()) > 1 and recipe.selection.on == "validation":
            tried.add(key)
            for seed in recipe.selection.drawn:
                drawn = replace(recipe.config(entry, (), seed, "selection"), device="cpu")
                _check_stream(make_stream(drawn, made[key].dataset), recipe)
        _rehearse_entry(entry, config, made[key], elsewhere=recipe.device != "cpu")
        used.append((config, find_sources(config, made[key].dataset)))
    return used


def check_device(name: str) -> None:
    """Raise a ValueError if torch cannot compute there, on this machine."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is {name!r}, which cannot be used on this machine: {reason}") from error


def _check_stream(stream: Stream, recipe: Recipe) -> None:
    stream.workload()  # Makes every task, where tasks differ in size.
    if "test" in recipe.deciding and all(task.test is None for task in stream):
        raise ValueError(
            f"headline is {recipe.deciding!r}, but {recipe.stream.name} has no test examples to tell it by"
        )


def _rehearse_entry(entry: Entry, config: RunConfig, stream: Stream, *, elsewhere: bool) -> None:
    try:
        example = take_example(stream)
        # What fails on the CPU may work on the device that it is meant for.
        with contextlib.nullcontext() if elsewhere else _naming_model(config.model.name):
            model = make_model(config, stream)
            _check_outputs(config, model, example, stream.classes)
        for parts in entry.variants():
            make_methods(replace(config, methods=parts), copy.deepcopy(model), example)
    except ValueError as error:
        raise ValueError(f"{entry.label}: {error}") from error
    except Exception:
        return  # The runs will tell, with the traceback.


@contextlib.contextmanager
def _naming_model(name: str) -> Iterator[None]:
    """Say which network it is that cannot be built or called, and where."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"model {name!r} fails: {tell_failure(error)}") from error


def _check_outputs(config: RunConfig, model: nn.Module, example: Tensor, classes: int) -> None:
    with eval_mode(model), torch.no_grad():
        shape = tuple(model(example).shape)
    if len(shape) != 2 or shape[1] < classes:
        raise ValueError(
            f"model {config.model.name!r} gives outputs of shape {shape}; "
            f"it must be (examples, classes), and there are {classes} classes"
        )
