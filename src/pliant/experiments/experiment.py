"""From a recipe to results: try everything out, choose settings, then do the runs that count."""

import contextlib
import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pliant import data
from pliant._files import is_foreign, read_regular, set_aside, write_atomically
from pliant._importing import tell_failure
from pliant._json import seal
from pliant.experiments.recipe import Entry, Recipe
from pliant.experiments.run import (
    find_sources,
    make_learner,
    make_methods,
    make_model,
    make_stream,
    take_example,
)
from pliant.experiments.run_config import RunConfig
from pliant.experiments.selection import choose
from pliant.experiments.store import FINAL, Sources, Status, load_run, read_sources
from pliant.running import eval_mode
from pliant.streams.stream import Stream

RunAll = Callable[[Sequence[RunConfig]], dict[str, Status]]


def run_experiment(
    recipe: Recipe, root: Path, run_all: RunAll, tell: Callable[[str], None] = lambda line: None
) -> dict[str, Status]:
    """Do all runs of a recipe that are not done yet.

    Args:
        recipe: The experiment.
        root: Its folder.
        run_all: Does runs and returns how they ended.
        tell: Gets one line for every choice of settings, as soon as it is made.

    Returns:
        How every run ended, by its id.
    """
    check_folder(recipe, root)
    root.mkdir(parents=True, exist_ok=True)
    (root / "runs").mkdir(exist_ok=True)
    candidates = {entry.label: entry.variants() for entry in recipe.methods}
    contested = [entry for entry in recipe.methods if len(candidates[entry.label]) > 1]
    _write_recipe(recipe, root, keep_choice=bool(contested))
    statuses: dict[str, Status] = {}
    if recipe.selection.on == "validation":
        trials = [
            recipe.config(entry, parts, seed, "selection")
            for entry in contested
            for parts in candidates[entry.label]
            for seed in recipe.selection.drawn
        ]
        if trials:
            statuses |= run_all(trials)
            choice = choose(recipe, contested, trials, root, tell)
            candidates |= {label: [parts] for label, parts in choice.items()}
    # Seed by seed, so that an interrupted experiment compares all methods on the seeds that are done.
    results = [
        recipe.config(entry, parts, seed, "result")
        for seed in recipe.seeds
        for entry in recipe.methods
        for parts in candidates[entry.label]
    ]
    statuses |= run_all(results)
    if recipe.selection.on == "test" and contested:
        choose(recipe, contested, results, root, tell)
    return statuses


def check_folder(recipe: Recipe, root: Path) -> None:
    """Raise a ValueError if the results would lie in a folder of images, where they would become a class."""
    for entry in recipe.methods:
        name = recipe.config(entry, (), 0, "result").data.name
        if name not in data.names() and Path(name).is_dir() and root.resolve().is_relative_to(Path(name).resolve()):
            raise ValueError(f"the folder of results {str(root)!r} is inside the data {name!r}; choose another (--out)")


def _write_recipe(recipe: Recipe, root: Path, *, keep_choice: bool) -> None:
    """Write `recipe.json`; remove the choice of another recipe."""
    path, content = root / "recipe.json", seal(recipe.model_dump(mode="json"), indent=1)
    for file in (path, root / "selection.json"):
        if is_foreign(file):
            set_aside(file)
    if path.exists() and read_regular(path) == content and keep_choice:
        return
    (root / "selection.json").unlink(missing_ok=True)
    write_atomically(path, content)


def rehearse(recipe: Recipe) -> list[tuple[RunConfig, Sources]]:
    """Load the data, make the streams, and build every network with its methods once; nothing is trained.

    Everything is on the CPU, as the devices of a cluster need not be here.

    Args:
        recipe: The experiment.

    Returns:
        One run of every entry, and the digests of its data and code.

    Raises:
        ValueError: If something in it cannot work.
    """
    if recipe.domain == "rl":
        return _rehearse_agents(recipe)
    made: dict[str, Stream] = {}
    tried: set[str] = set()
    used: list[tuple[RunConfig, Sources]] = []
    for entry in recipe.methods:
        config = replace(recipe.config(entry, (), recipe.seeds[0], "result"), device="cpu")
        key = json.dumps([asdict(config.data), asdict(config.stream)])
        if key not in made:
            made[key] = make_stream(config)
            _check_stream(made[key], recipe)
            if config.start is not None or config.old_data is not None:
                with _naming_model(config.model.name):
                    make_learner(replace(config, methods=(), measures=()), made[key])
        if key not in tried and len(entry.variants()) > 1 and recipe.selection.on == "validation":
            tried.add(key)
            for seed in recipe.selection.drawn:
                drawn = replace(recipe.config(entry, (), seed, "selection"), device="cpu")
                _check_stream(make_stream(drawn, made[key].dataset), recipe)
        _rehearse_entry(entry, config, made[key], elsewhere=recipe.device != "cpu")
        used.append((config, find_sources(config, made[key].dataset)))
    return used


def _rehearse_agents(recipe: Recipe) -> list[tuple[RunConfig, Sources]]:
    """Make the environment and the agent of every entry with its methods."""
    from pliant.experiments.agent_run import make_agent_learner

    used: list[tuple[RunConfig, Sources]] = []
    for entry in recipe.methods:
        for parts in entry.variants():
            config = replace(recipe.config(entry, parts, recipe.seeds[0], "result"), device="cpu")
            try:
                make_agent_learner(config)
            except ValueError as error:
                raise ValueError(f"{entry.label}: {error}") from error
            except ImportError:
                raise
            except Exception as error:  # Gymnasium and Stable-Baselines3 raise anything for a wrong option.
                raise ValueError(f"{entry.label}: the agent cannot be made: {tell_failure(error)}") from error
        used.append((config, {}))
    return used


def _check_stream(stream: Stream, recipe: Recipe) -> None:
    stream.workload()  # Makes every task if tasks differ in size.
    if "test" in recipe.deciding and all(task.test is None for task in stream):
        raise ValueError(f"headline is {recipe.deciding!r}, but {recipe.stream.name} has no test examples")


def _rehearse_entry(entry: Entry, config: RunConfig, stream: Stream, *, elsewhere: bool) -> None:
    try:
        example = take_example(stream)
        # A network that fails on the CPU may work on its own device.
        with contextlib.nullcontext() if elsewhere else _naming_model(config.model.name):
            model = make_model(config, stream)
            _check_outputs(config, model, example, stream)
        for parts in entry.variants():
            make_methods(replace(config, methods=parts), copy.deepcopy(model), example)
    except ValueError as error:
        raise ValueError(f"{entry.label}: {error}") from error
    except Exception:
        return  # The run will fail in the same way, and records the traceback.


@contextlib.contextmanager
def _naming_model(name: str) -> Iterator[None]:
    """Name the network that cannot be built or called, and the line that fails."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"model {name!r} fails: {tell_failure(error)}") from error


def _check_outputs(config: RunConfig, model: nn.Module, example: Tensor, stream: Stream) -> None:
    with eval_mode(model), torch.no_grad():
        shape = tuple(model(example).shape)
    tokens = example.shape[1:] if example.dtype == torch.int64 else ()
    if shape[:-1] != (len(example), *tokens) or shape[-1] < stream.outputs:
        raise ValueError(
            f"model {config.model.name!r} gives outputs of shape {shape}; it must be "
            f"({'examples, tokens, outputs' if tokens else 'examples, outputs'}), "
            f"and the stream needs {stream.outputs} outputs"
        )


def check_device(name: str) -> None:
    """Raise a ValueError if torch cannot compute on this device of this machine."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is {name!r}, which cannot be used on this machine: {reason}") from error


def find_outdated(root: Path, present: Iterable[tuple[RunConfig, Sources]]) -> list[str]:
    """Find ended runs whose data or code has changed since.

    Args:
        root: The folder of the experiment.
        present: Configurations with the digests of their data and code now.

    Returns:
        A sentence for each change.
    """
    now = {(kind, str(getattr(config, kind))): digest for config, found in present for kind, digest in found.items()}
    if not now:
        return []  # Built-in data and networks cannot change: no need to read thousands of runs.
    outdated: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted((root / "runs").glob("*")):
        with contextlib.suppress(ValueError):  # Damaged runs are done again.
            run = load_run(path)
            if run is None or run.status not in FINAL:
                continue  # An unfinished run compares its checkpoint's digests itself.
            for key, digest in read_sources(run).items():
                if now.get(key, digest) != digest:
                    outdated[key].append(run.id)
    return [
        f"{kind} {name} has changed since {len(runs)} of the runs here ended ({runs[0]}, …); they are not done again, "
        "and would be compared with new runs: choose another folder (--out), or remove theirs"
        for (kind, name), runs in outdated.items()
    ]
