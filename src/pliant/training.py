"""One supervised loop over a stream of tasks, readable from top to bottom.

`train` yields a record after every epoch, and the `Learner` can be saved at each of them: a resumed run is
bit-equal to one never interrupted. The order of the data depends on seed, task and epoch alone, so nothing
is replayed.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer

from pliant._seeding import permutation, random_state, set_random_state
from pliant._validation import check_choice, check_number, check_positive_int, require_positive
from pliant.data.dataset import Examples
from pliant.diagnostics.monitor import Monitor
from pliant.methods._core.method import Method
from pliant.running import eval_mode
from pliant.streams.stream import Stream, Task

Record = dict[str, Any]
"""What is known after an epoch, in plain types."""


Reference = Literal["initial", "boundary", "previous_task"]
"""What measures compare a network with: see `Learner.measure`."""


OptimizerName = Literal["adam", "adamw", "sgd"]


@dataclass(frozen=True)
class Settings:
    """How a network is trained. The defaults are those of the soft weight rescaling paper, appendix D.

    Args:
        optimizer: adam, adamw or sgd.
        lr: Learning rate.
        momentum: Momentum of sgd.
        weight_decay: The optimizer's own weight decay.
        batch_size: Examples a step; the last batch of an epoch holds what is left, which is
            dropped if it is a single example: BatchNorm has no variance of that.
        warmup: Part of every task's steps over which the learning rate rises linearly from 0, in [0, 1).
        decay_epochs: Epochs of a task at whose start the learning rate is multiplied by `decay_factor`.
        decay_factor: By how much.
        clip: Largest norm of the loss's gradient; no clipping if None.
        new_optimizer: Whether every task starts with a new optimizer.
        announce: Whether methods are told that a task is new. Without that, those that act at boundaries do
            not act.
        evaluate_every: Epochs between two evaluations on the test examples; a task's last epoch is always
            evaluated.
    """

    optimizer: OptimizerName = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 256
    warmup: float = 0.0
    decay_epochs: tuple[int, ...] = ()
    decay_factor: float = 0.1
    clip: float | None = None
    new_optimizer: bool = False
    announce: bool = True
    evaluate_every: int = 1

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        check_number("lr", self.lr, above=True)
        check_number("momentum", self.momentum)
        check_number("weight_decay", self.weight_decay)
        require_positive(batch_size=self.batch_size, evaluate_every=self.evaluate_every)
        check_number("warmup", self.warmup, high=1.0, below=True)
        for epoch in self.decay_epochs:
            check_positive_int("decay_epochs", epoch)
        check_number("decay_factor", self.decay_factor, above=True)
        if self.clip is not None:
            check_number("clip", self.clip, above=True, otherwise=", or None")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is {self.momentum}; it is for sgd, and the optimizer is {self.optimizer}")


class DivergedError(ArithmeticError):
    """The loss is no longer a finite number."""


class Learner:
    """A network, its optimizer and its methods, and how far they are: what a checkpoint holds.

    Args:
        model: The network.
        settings: How it is trained.
        methods: What keeps it plastic; attached here to the optimizer.
        head: What renews the output layer, for streams whose tasks come with a new one.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        methods: Sequence[Method] = (),
        head: Method | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.methods = list(methods)
        self.head = head
        self.monitor: Monitor | None = None
        self.references: References | None = None
        self.task = 0
        self.epoch = 0
        self.step = 0
        self.examples = 0
        self.online_correct = 0
        self.optimizer = make_optimizer(model, settings)
        for method in self.methods:
            method.attach(self.optimizer)

    def measure(self, names: Sequence[str], task: Task, reference: Reference = "initial") -> None:
        """Take measures on the way, which are in the records then.

        They are taken at the first step of a task and of every `evaluate_every`th epoch of it.

        Args:
            names: Some of `pliant.diagnostics.measures.names()`.
            task: The first task, on whose examples measures are taken until the next.
            reference: What to compare with, where a measure does: the network as it is now, or as it was when its task
                began if each begins with a fresh one ("initial"); as it was at the end of the task before, before any
                method acted ("boundary"); or as it was when the task before began ("previous_task").
        """
        self.references = References(reference, self.model)
        probe = probe_batch(task)
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            every=1,
            measures=names,
            probe=probe,
            loss_fn=cross_entropy,
            reference=self.references.model,
            budget=None,
        )
        self.monitor.detach()

    def renew_optimizer(self) -> None:
        """Replace the optimizer; the methods and what they remember stay."""
        for method in self.methods:
            method.detach(self.optimizer)
        self.optimizer = make_optimizer(self.model, self.settings)
        for method in self.methods:
            method.attach(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, the random generators included."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "methods": [method.state_dict() for method in self._stateful()],
            "position": {name: getattr(self, name) for name in _POSITION},
            "references": None if self.references is None else self.references.state_dict(),
            "random": random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()` of a learner with the same model, settings and methods.

        Raises:
            ValueError: If it does not fit.
        """
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())) from error
        self.optimizer.load_state_dict(state["optimizer"])
        for method, saved in zip(self._stateful(), state["methods"], strict=True):
            method.load_state_dict(saved)
        for name in _POSITION:
            setattr(self, name, state["position"][name])
        if self.references is not None and state.get("references"):
            self.references.load_state_dict(state["references"])
        set_random_state(state["random"])

    def _stateful(self) -> list[Method]:
        return self.methods if self.head is None else [*self.methods, self.head]


class References:
    """What measures compare a network with, as tasks go by.

    Args:
        kind: Which network it is; see `Learner.measure`.
        model: The network in its first state.
    """

    def __init__(self, kind: Reference, model: nn.Module) -> None:
        self.kind = kind
        self.model = copy.deepcopy(model)
        self.start = copy.deepcopy(model) if kind == "previous_task" else None

    def leave_task(self, model: nn.Module) -> None:
        """Take note of a network at the end of a task."""
        if self.kind == "boundary":
            self.model.load_state_dict(model.state_dict())

    def enter_task(self, model: nn.Module) -> None:
        """Take note of a network at the beginning of a task, when the methods have acted."""
        if self.start is not None:
            self.model.load_state_dict(self.start.state_dict())
            self.start.load_state_dict(model.state_dict())

    def begin_anew(self, make: Callable[[], nn.Module]) -> None:
        """Take note of a task that starts from a network of its own: that one is its initial network."""
        if self.kind == "initial":
            self.model.load_state_dict(make().state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return what changes on the way; nothing if it is the initial network, which every start makes anew."""
        if self.kind == "initial":
            return {}
        return {name: part.state_dict() for name, part in (("model", self.model), ("start", self.start)) if part}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict()` returned."""
        self.model.load_state_dict(state["model"])
        if self.start is not None:
            self.start.load_state_dict(state["start"])


_EVALUATED = 1000
"""How many examples to evaluate at a time."""
_EVALUATED_NUMBERS = 2**24
"""How many numbers their inputs may have, if that is not fewer examples than are trained on at a time."""

_POSITION = ("task", "epoch", "step", "examples", "online_correct")


def train(
    learner: Learner,
    stream: Stream,
    seed: int,
    *,
    fresh: Callable[[int], nn.Module] | None = None,
) -> Iterator[Record]:
    """Train over a stream, from wherever the learner is to the end.

    Args:
        learner: What learns; its state may be saved whenever a record is yielded.
        stream: What it meets.
        seed: Decides the order of the examples.
        fresh: Makes an untrained network for a task. If given, every task starts from it with a new
            optimizer: the network without a past that plasticity is measured against.

    Yields:
        A record after every epoch. The first one of a new task also tells the test accuracy before any step on
        it, when the methods have acted; the last one the accuracy on the task's training examples and the
        average online accuracy.

    Raises:
        DivergedError: If the loss is not finite.
    """
    work = stream.workload()
    for index in range(learner.task, len(stream)):
        task = stream[index]
        learner.task = index
        if learner.monitor is not None:
            learner.monitor.set_probe(probe_batch(task))
        if learner.references is not None and fresh is not None and index > 0:
            learner.references.begin_anew(partial(fresh, index))
        entry: Record = {"receipts": []}
        if learner.epoch == 0 and index > 0:
            if learner.references is not None:
                learner.references.leave_task(learner.model)
            entry["receipts"] = enter_task(learner, task, fresh)
            if learner.references is not None:
                learner.references.enter_task(learner.model)
            if task.test is not None:
                entry["entry_test_accuracy"], _ = _evaluate(learner, task, task.test, "test")
        while learner.epoch < task.epochs:
            record = train_epoch(learner, task, seed)
            learner.epoch += 1
            record |= {"task": index, "epoch": learner.epoch, "step": learner.step} | entry
            record["progress"] = (sum(work[:index]) + work[index] * learner.epoch / task.epochs) / sum(work)
            record |= evaluate_epoch(learner, task)
            entry = {"receipts": []}
            yield record
        learner.epoch = learner.examples = learner.online_correct = 0


def enter_task(learner: Learner, task: Task, fresh: Callable[[int], nn.Module] | None = None) -> list[dict[str, Any]]:
    """Do what happens between two tasks: reset the head, tell the methods, renew the optimizer.

    Args:
        learner: What learns.
        task: The task that begins.
        fresh: Makes an untrained network to start from.

    Returns:
        The receipts of the methods that acted.
    """
    receipts = []
    if "head" in task.changed:
        if learner.head is None:
            raise ValueError(f"task {task.index} comes with a new output layer, but the learner has no head=")
        receipts.append(learner.head.apply(learner.optimizer).as_dict())
    if fresh is not None:
        learner.model.load_state_dict(fresh(task.index).state_dict())
    elif learner.settings.announce:
        for method in learner.methods:
            if method.kind == "reinitializer":
                pairs = batches(task.train, learner.settings.batch_size, _device(learner.model))
                receipts.append(method.apply(learner.optimizer, batches=pairs, loss_fn=cross_entropy).as_dict())
    if fresh is not None or learner.settings.new_optimizer:
        learner.renew_optimizer()
    return receipts


def train_epoch(learner: Learner, task: Task, seed: int) -> Record:
    """Go once through the training examples of a task.

    Returns:
        The mean loss and the online accuracy, both of each batch before the step on it; measures if due.
    """
    model, optimizer, settings = learner.model, learner.optimizer, learner.settings
    device = _device(model)
    order = permutation(len(task.train), "order", seed, task.index, learner.epoch).to(device)
    indices = torch.split(order, settings.batch_size)
    if len(indices) > 1 and len(indices[-1]) == 1 < settings.batch_size:
        indices = indices[:-1]
    # Attached for a single step: the others cost nothing, and need no memory of when it was their turn.
    monitor = learner.monitor if learner.epoch % settings.evaluate_every == 0 else None
    if monitor is not None:
        monitor.attach(optimizer)
    loss_sum, correct = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
    model.train()
    for position, index in enumerate(indices):
        lr = learning_rate(settings, task.epochs, learner.epoch, position, len(indices))
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = task.train.batch(index)
        optimizer.zero_grad()
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        if monitor is not None:
            monitor.detach()
        loss_sum += loss.detach() * len(y)
        correct += (logits.argmax(1) == y).sum()
    seen = sum(len(index) for index in indices)
    mean_loss = float(loss_sum) / seen
    if not math.isfinite(mean_loss):
        raise DivergedError(f"the training loss is {mean_loss} in epoch {learner.epoch + 1} of task {task.index}")
    learner.step += len(indices)
    learner.examples += seen
    learner.online_correct += int(correct)
    record: Record = {"loss": mean_loss, "online_accuracy": int(correct) / seen, "lr": lr}
    if monitor is not None:
        values = monitor.records.pop().values
        record["measures"] = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return record


def evaluate_epoch(learner: Learner, task: Task) -> Record:
    """Measure what an epoch's record needs beyond the training itself."""
    record: Record = {}
    last = learner.epoch == task.epochs
    if task.test is not None and (last or learner.epoch % learner.settings.evaluate_every == 0):
        record["test_accuracy"], record["test_loss"] = _evaluate(learner, task, task.test, "test")
    if last:
        record["train_accuracy"], record["train_loss"] = _evaluate(learner, task, task.train, "training")
        record["task_online_accuracy"] = learner.online_correct / learner.examples
    return record


def _evaluate(learner: Learner, task: Task, examples: Examples, which: str) -> tuple[float, float]:
    """Evaluate, and notice what the last step has done: the loss before it does not tell."""
    # No more at a time than fits wherever training does, unless inputs are small.
    size = min(_EVALUATED, max(learner.settings.batch_size, _EVALUATED_NUMBERS // math.prod(examples.shape)))
    accuracy, loss = evaluate(learner.model, examples, size)
    if not math.isfinite(loss):
        raise DivergedError(f"the {which} loss is {loss} after epoch {learner.epoch} of task {task.index}")
    return accuracy, loss


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, batch_size: int = _EVALUATED) -> tuple[float, float]:
    """Return accuracy and mean cross-entropy over examples, the model in evaluation mode meanwhile."""
    device = _device(model)
    correct, loss = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
    with eval_mode(model):
        for x, y in batches(examples, batch_size, device):
            logits = model(x)
            correct += (logits.argmax(1) == y).sum()
            loss += cross_entropy(logits, y, reduction="sum")
    return int(correct) / len(examples), float(loss) / len(examples)


def batches(examples: Examples, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Go once through examples in their own order."""
    for index in torch.split(torch.arange(len(examples), device=device), size):
        yield examples.batch(index)


def probe_batch(task: Task, size: int = 256) -> tuple[Tensor, Tensor]:
    """Take some training examples of a task to measure on, the same ones for every network."""
    order = permutation(len(task.train), "probe", task.index)[:size]
    return task.train.batch(order.to(task.train.y.device))


def learning_rate(settings: Settings, epochs: int, epoch: int, position: int, per_epoch: int) -> float:
    """Return the learning rate of one step of a task.

    Args:
        settings: Base rate, warm-up and decays.
        epochs: Epochs of the task.
        epoch: The present epoch, from 0.
        position: The step in this epoch, from 0.
        per_epoch: Steps of an epoch.

    Example:
        >>> settings = Settings(lr=1.0, warmup=0.5, decay_epochs=(3,))
        >>> [learning_rate(settings, 4, epoch, 0, 1) for epoch in range(4)]
        [0.5, 1.0, 1.0, 0.1]
    """
    lr = settings.lr * settings.decay_factor ** sum(epoch >= start for start in settings.decay_epochs)
    rising = settings.warmup * epochs * per_epoch
    step = epoch * per_epoch + position + 1
    return lr * step / rising if step < rising else lr


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """Make the optimizer, in its fused form where the parameters allow it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "adam":
        return Adam(parameters, lr, weight_decay=decay, fused=fused)
    if settings.optimizer == "adamw":
        return AdamW(parameters, lr, weight_decay=decay, fused=fused)
    # Not fused: that form fails once a method has dropped the momentum of some parameters and not of others.
    return SGD(parameters, lr, momentum=settings.momentum, weight_decay=decay)


_AT_ENDS = ("test_accuracy", "train_accuracy", "task_online_accuracy")
RESULTS = tuple(f"{which}_{name}" for name in _AT_ENDS for which in ("final", "mean"))
"""What a run's result may tell."""


def summarize(records: Sequence[Record]) -> dict[str, float]:
    """Condense a run's records into its result.

    Args:
        records: What `train` yielded.

    Returns:
        `final_…`: at the end of the last task that has it; `mean_…`: over the ends of all tasks that do. Test
        accuracies are missing where the stream has no test.
    """
    ends = [record for record in records if "task_online_accuracy" in record]
    result: dict[str, float] = {}
    for name in _AT_ENDS:
        values = [record[name] for record in ends if name in record]
        if values:
            result[f"final_{name}"] = values[-1]
            result[f"mean_{name}"] = math.fsum(values) / len(values)
    return result


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
