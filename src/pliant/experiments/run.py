"""Execute one run: from its configuration to its result, resuming from its last checkpoint."""

import contextlib
import importlib.util
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pliant import data, methods, models, streams
from pliant._files import BusyError
from pliant._seeding import derive_seed, seed_everything
from pliant.anatomy.layers import called_layers
from pliant.data.cache import digest_file
from pliant.data.dataset import Dataset, Examples
from pliant.diagnostics.checkpoints import load_into, load_optimizer_into
from pliant.experiments.run_config import Part, RunConfig, Start
from pliant.experiments.store import FINAL, RunFolder, Sources, Status, environment
from pliant.streams.stream import Stream
from pliant.training import (
    DivergedError,
    Learner,
    Record,
    answers_per_example,
    count_steps,
    summarize,
    train,
)


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a run ended.

    Args:
        status: How the run ended; None if another process executes it.
        error: The error with its traceback; empty without an error.
        notes: Further messages for the user.
    """

    status: Status | None
    error: str = ""
    notes: tuple[str, ...] = ()


def execute(config: RunConfig, root: Path, checkpoint_seconds: float = 30.0) -> Outcome:
    """Execute a run unless it is done; resume it if it was interrupted.

    An error in the run becomes its outcome, not an exception, so that other runs go on.

    Args:
        config: The run.
        root: The folder of the experiment.
        checkpoint_seconds: The least time between two checkpoints; they are saved after a step.

    Returns:
        How it ended.
    """
    folder = RunFolder(root, config)
    try:
        with folder.open():
            if (status := folder.status) in FINAL:
                return Outcome(status, notes=tuple(folder.troubles))
            return _attempt(config, root, folder, checkpoint_seconds)
    except BusyError:
        return Outcome(None)
    except Exception:
        return Outcome("failed", traceback.format_exc())


class Session(Protocol):
    """What one run trains. It may be saved whenever `run` says so."""

    sources: Sources
    """Digests of the user's own data and code."""
    notes: list[str]
    """Further messages for the user."""

    @property
    def position(self) -> dict[str, int]:
        """Task, epoch and step."""

    @property
    def age(self) -> int:
        """A number that grows from checkpoint to checkpoint."""

    def run(self, append: Callable[[Record], None], save: Callable[[], None]) -> None:
        """Train to the end; pass on every record, and call `save` wherever the run may be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; raise a KeyError, TypeError or ValueError if it does not fit."""

    def facts(self) -> dict[str, Any]:
        """Return what the log says of the run at its end."""

    def summarize(self, records: list[Record]) -> dict[str, float]:
        """Summarize the records in a result."""


class SupervisedSession:
    """A network that learns a stream of data.

    Args:
        config: The run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        seed_everything(config.seed)
        self.stream = make_stream(config)
        self.learner = make_learner(config, self.stream)
        seed_everything(config.seed)  # Again: the user's data and networks may draw, or seed.
        self.sources = find_sources(config, self.stream.dataset)
        self.notes: list[str] = []
        self.state_dict = self.learner.state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; raise a KeyError, TypeError or ValueError if it does not fit."""
        self._check_position(state["position"])
        self.learner.load_state_dict(state)

    def _check_position(self, position: Mapping[str, Any]) -> None:
        """Raise a ValueError if no run can be at this position."""
        task, epoch, batch, step = (position[name] for name in ("task", "epoch", "batch", "step"))
        if any(type(each) is not int for each in (task, epoch, batch, step)) or task not in range(len(self.stream)):
            raise ValueError(f"the stream has no step {step!r} in task {task!r}")
        tasks = [self.stream[index] for index in range(task + 1)]
        *before, (size, epochs) = [(count_steps(each, self.config.training), each.epochs) for each in tasks]
        begun = sum(size * epochs for size, epochs in before)
        if not (0 <= epoch <= epochs and 0 <= batch < size and step == begun + epoch * size):
            raise ValueError(f"step {step} is not in epoch {epoch} of task {task}, which has {epochs} epochs")

    @property
    def position(self) -> dict[str, int]:
        """Task, epoch and step."""
        return {"task": self.learner.task, "epoch": self.learner.epoch, "step": self.age}

    @property
    def age(self) -> int:
        """The steps so far."""
        return self.learner.step + self.learner.batch

    def run(self, append: Callable[[Record], None], save: Callable[[], None]) -> None:
        """Train to the end."""
        fresh = (lambda task: make_model(self.config, self.stream, task)) if self.config.fresh else None
        self.learner.after_step = save
        for record in train(self.learner, self.stream, self.config.seed, fresh=fresh):
            append(record)
            save()

    def facts(self) -> dict[str, Any]:
        """Return bytes of the state, test examples, the largest number of tokens in a step, and skipped measures."""
        state, stream = self.learner.state_dict(), self.stream
        told: dict[str, Any] = {"bytes": {name: count_bytes(state[name]) for name in ("model", "optimizer", "methods")}}
        tests = [task.test for task in (stream[0], stream[len(stream) - 1]) if task.test is not None]
        if tests:
            told["test_examples"] = min(map(len, tests))
        if (tokens := answers_per_example(stream[0].train)) > 1:
            told["tokens_per_step"] = tokens * self.config.training.batch_size
        if self.learner.monitor is not None and self.learner.monitor.skipped:
            told["measures_skipped"] = dict(self.learner.monitor.skipped)
        return told

    def summarize(self, records: list[Record]) -> dict[str, float]:
        """Summarize the records in a result."""
        return summarize(records)


def begin(config: RunConfig, root: Path) -> Session:
    """Begin a run of a network, or of an agent if the stream is one of environments."""
    if streams.is_of_environments(config.stream.name):
        from pliant.experiments.agent_run import AgentSession

        return AgentSession(config, root)
    if config.starts_shared:
        from pliant.experiments.shared_start import SharedStartSession

        return SharedStartSession(config, root)
    return SupervisedSession(config)


def _attempt(config: RunConfig, root: Path, folder: RunFolder, checkpoint_seconds: float) -> Outcome:
    status: Status = "finished"
    error = ""
    told: dict[str, Any] = {}
    try:
        folder.start(environment())
        session = begin(config, root)
        told["sources"] = session.sources
        told["methods"] = [asdict(effective_part(part)) for part in config.methods]
        told |= _train(config, root, folder, session, checkpoint_seconds)
        folder.finish(status, session.summarize(folder.records()))
    except DivergedError as problem:
        status, error = "diverged", str(problem)
    except Exception:
        status, error = "failed", traceback.format_exc()
    # This may fail on a full disk; the outcome is still returned.
    with contextlib.suppress(OSError):
        if error:
            folder.finish(status, {}, error)
        if status in FINAL:
            folder.drop_checkpoints()
    with contextlib.suppress(OSError):
        folder.note("end", status=status, **told)
    return Outcome(status, error, tuple(folder.troubles))


def _train(
    config: RunConfig, root: Path, folder: RunFolder, session: Session, checkpoint_seconds: float
) -> dict[str, Any]:
    """Train to the end; return seconds and steps of this attempt, and what the session tells of itself."""
    sources, known = session.sources, len(folder.troubles)
    if folder.load_checkpoint(session.load_state_dict, sources):
        folder.note("resume", **session.position)
    elif len(folder.troubles) > known:
        folder.troubles.append("no checkpoint is left: the run starts over")
        session = begin(config, root)  # The failed loading may have changed the session.
    begun = saved = time.monotonic()
    first_step = session.position["step"]

    def save() -> None:
        nonlocal saved
        if time.monotonic() - saved >= checkpoint_seconds:
            folder.save_checkpoint(session.state_dict(), session.age, sources)
            saved = time.monotonic()

    try:
        session.run(folder.append, save)
    finally:
        folder.troubles += session.notes
    seconds, steps = time.monotonic() - begun, session.position["step"] - first_step
    told = {"seconds": seconds, "steps": steps} | session.facts()
    if "tokens_per_step" in told:  # At most: the last batch of an epoch may be smaller.
        told["tokens_per_second"] = round(told["tokens_per_step"] * steps / seconds)
    return told


def count_bytes(state: Any) -> int:
    """Return the bytes of all tensors in a state."""
    leaves = tree_leaves(state)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def make_stream(config: RunConfig, dataset: Dataset | None = None) -> Stream:
    """Make the stream of a run, from its data set if that is loaded already."""
    if dataset is None:
        dataset = data.load(config.data.name, **config.data.options)
    seen = None
    if config.old_data is not None:
        old = data.load(config.old_data.name, **config.old_data.options)
        seen, dataset = dataset.train.are_in(old.train), _without_seen(dataset, old)
    if config.purpose == "selection":
        dataset = dataset.holdout(config.holdout, config.seed, seen)
    dataset = dataset.to(config.device)
    return streams.create(config.stream.name, dataset, config.seed, **config.stream.options)


def _without_seen(dataset: Dataset, old: Dataset) -> Dataset:
    """Drop the test examples that the checkpoint has learned: they would favor going on from it."""
    unseen = torch.nonzero(~dataset.test.are_in(old.train)).flatten()
    if not len(unseen):
        raise ValueError(
            f"old_data: all test examples of {dataset.name} are training examples of {old.name}, so none shows how "
            "well new data is learned; add a folder `test` with other images"
        )
    return dataset if len(unseen) == len(dataset.test) else replace(dataset, test=dataset.test.select(unseen))


def make_model(config: RunConfig, stream: Stream, task: int = 0) -> nn.Module:
    """Make the untrained network of a run; each task has its own."""
    seed = config.seed if task == 0 else derive_seed("task", config.seed, task)
    model = models.create(config.model.name, stream.dataset.shape, stream.outputs, seed=seed, **config.model.options)
    model = model.to(config.device)
    if config.training.layout == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    return model


def make_learner(config: RunConfig, stream: Stream) -> Learner:
    """Make the network with its methods and its optimizer."""
    model, example = make_model(config, stream), take_example(stream)
    attached = make_methods(config, model, example)  # Before the optimizer, as some methods change the network.
    if config.start is not None:
        load_start(model, config.start)  # After the methods: their initial values come from an untrained network.
    head = None
    if stream.renews_head:
        output = called_layers(model, example)[-1].name
        head = methods.HeadReset(model, head=[output], seed=derive_seed("head", config.seed))
    learner = Learner(
        model, config.training, attached, head, trained=config.start is not None, old_test=load_old_test(config, stream)
    )
    if config.start is not None and config.start.optimizer:
        load_optimizer_into(learner.optimizer, config.start.path, config.start.optimizer)
    if config.measures:
        learner.measure(config.measures, stream[0], config.reference)
    return learner


def load_start(model: nn.Module, start: Start) -> None:
    """Load the weights of the checkpoint that a run starts from.

    Raises:
        ValueError: If the file is not there, has changed, or does not fit the network.
    """
    path = Path(start.path)
    if path.is_file() and digest_file(path) != start.digest:
        raise ValueError(f"start: {start.path!r} has changed since these runs were asked for; ask for them again")
    load_into(model, path, start.key)


def load_old_test(config: RunConfig, stream: Stream) -> Examples | None:
    """Load the test examples of a run's old data, as the network sees its new data; None without old data.

    Raises:
        ValueError: If the checkpoint's inputs or classes differ from the new data's.
    """
    if config.old_data is None:
        return None
    new, old = stream.dataset, data.load(config.old_data.name, **config.old_data.options)
    if old.shape != new.shape or old.test.x.dtype != new.train.x.dtype:
        raise ValueError(
            f"old_data: inputs of {old.name} are {old.test.x.dtype} of shape {old.shape}, inputs of {new.name} are "
            f"{new.train.x.dtype} of shape {new.shape}; shapes and types must be equal"
        )
    if unknown := [name for name in old.classes if name not in new.classes]:
        raise ValueError(f"old_data: {old.name} has a class {unknown[0]!r} that {new.name} does not have")
    labels = torch.tensor([new.classes.index(name) for name in old.classes])
    # Its images are scaled like the new ones: the network that learns these sees all images in that way.
    test = replace(old.test, y=labels[old.test.y], scale=new.test.scale, shift=new.test.shift)
    return test.to(config.device)


def take_example(stream: Stream) -> Tensor:
    """Take the first two inputs of the first task, which methods trace through the network."""
    train = stream[0].train
    return train.batch(torch.arange(min(2, len(train)), device=train.y.device))[0]


def make_methods(config: RunConfig, model: nn.Module, example: Tensor) -> list[methods.Method]:
    """Make the methods of a run."""

    def make_method(position: int, part: Part) -> methods.Method:
        # Each method has its own seed; the first has the seed that it has alone.
        seed = derive_seed("method", config.seed, *([position] if position else []))
        return methods.create(part.name, model, example=example, **{"seed": seed} | part.options)

    return [make_method(position, part) for position, part in enumerate(config.methods)]


def effective_part(part: Part) -> Part:
    """Return a method with the settings that it runs with: those given, and the defaults of those worth tuning.

    Example:
        >>> effective_part(Part("shrink_perturb", {"toward": "noise"}))
        Part(name='shrink_perturb', options={'lam': 0.8, 'toward': 'noise'})
    """
    defaults = methods.options(part.name)
    tunables = {each.name: defaults[each.name] for each in methods.info(part.name).tunables}
    return Part(part.name, {name: value for name, value in tunables.items() if value is not None} | part.options)


def find_sources(config: RunConfig, dataset: Dataset) -> Sources:
    """Return the digests of the user's own data and code that a run uses.

    Args:
        config: The run.
        dataset: Its data set.

    Returns:
        The digests of the data's content, and of the file with the function that builds the network.
    """
    found = {"data": dataset.fingerprint, "model": _digest_code(config.model.name)}
    if config.old_data is not None:
        found["old_data"] = data.load(config.old_data.name, **config.old_data.options).fingerprint
    return {kind: digest for kind, digest in found.items() if digest}


def _digest_code(reference: str) -> str:
    """Return the digest of the file of `module:name` or `file.py:name`; empty for a built-in name."""
    module, colon, _ = reference.rpartition(":")
    if not colon:
        return ""
    spec = None if module.endswith(".py") else importlib.util.find_spec(module)
    file = Path(module if spec is None else spec.origin or "")
    return digest_file(file) if file.is_file() else ""
