"""The supervised training loop over a stream of tasks.

`train` yields a record after every epoch. The `Learner` can be saved at each record and after each step, and a resumed
run is bit-equal to an uninterrupted one. The order of the examples depends only on seed, task and epoch.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer

from pliant._losses import class_loss
from pliant._optimizer_state import load_optimizer_state
from pliant._seeding import permutation, random_state, set_random_state
from pliant._validation import check_choice, check_number, check_positive_int, require_positive
from pliant.data.dataset import Examples
from pliant.diagnostics.monitor import Monitor
from pliant.methods._core.method import Method
from pliant.running import eval_mode
from pliant.streams.stream import OTHERS, Stream, Task

Record = dict[str, Any]
"""The metrics of an epoch, in plain types."""

Reference = Literal["initial", "boundary", "previous_task"]
"""The network that measures compare with; see `Learner.measure`."""

OptimizerName = Literal["adam", "adamw", "sgd"]
Decay = Literal["none", "linear", "cosine"]
Precision = Literal["float32", "bfloat16"]
Layout = Literal["default", "channels_last"]


@dataclass(frozen=True)
class Settings:
    """Training settings. The defaults come from the soft weight rescaling paper, appendix D.

    Args:
        optimizer: adam, adamw or sgd.
        lr: Learning rate.
        momentum: Momentum of sgd.
        betas: The memories of adam's and adamw's averages.
        weight_decay: The optimizer's own weight decay.
        batch_size: Examples per step. The last batch of an epoch may be smaller. It is dropped if it has a single
            example, whose variance BatchNorm cannot compute.
        accumulate: Parts of a batch that are computed one after the other, to save memory.
        precision: "bfloat16" computes outputs and losses under autocast; weights stay in float32.
        layout: "channels_last" keeps the channels of a pixel together in memory. Results agree with the default layout
            up to rounding. Small convolutional networks train faster with it on a CPU; see
            `python -m benchmarks layouts`.
        warmup: Fraction of every task's steps over which the learning rate rises linearly from 0, in [0, 1).
        decay: How the learning rate falls after the warm-up, to `decay_to` times `lr` at the end of the task: "linear",
            "cosine" or "none".
        decay_to: Where `decay` ends, as a fraction of `lr`.
        decay_epochs: Epochs of a task at whose start the learning rate is multiplied by `decay_factor`.
        decay_factor: Factor of the learning rate at each of `decay_epochs`.
        clip: Largest norm of the loss's gradient; no clipping if None.
        new_optimizer: Whether every task starts with a new optimizer.
        announce: Whether methods are told about new tasks. If not, methods that act at task boundaries do nothing.
        evaluate_every: Epochs between evaluations on the test set. The last epoch of a task is always evaluated.
    """

    optimizer: OptimizerName = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    batch_size: int = 256
    accumulate: int = 1
    precision: Precision = "float32"
    layout: Layout = "default"
    warmup: float = 0.0
    decay: Decay = "none"
    decay_to: float = 0.1
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
        if len(self.betas) != 2:
            raise ValueError(f"betas is {self.betas}; it must hold 2 numbers")
        for beta in self.betas:
            check_number("betas", beta, high=1.0, below=True)
        check_number("weight_decay", self.weight_decay)
        require_positive(batch_size=self.batch_size, accumulate=self.accumulate, evaluate_every=self.evaluate_every)
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("layout", self.layout, get_args(Layout))
        check_number("warmup", self.warmup, high=1.0, below=True)
        check_choice("decay", self.decay, get_args(Decay))
        check_number("decay_to", self.decay_to, high=1.0)
        for epoch in self.decay_epochs:
            check_positive_int("decay_epochs", epoch)
        check_number("decay_factor", self.decay_factor, above=True)
        if self.clip is not None:
            check_number("clip", self.clip, above=True, otherwise=", or None")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is {self.momentum}; it needs optimizer sgd, not {self.optimizer}")


class DivergedError(ArithmeticError):
    """The loss is not finite."""


class Learner:
    """A network with its optimizer, its methods and its position in the stream: the content of a checkpoint.

    Args:
        model: The network.
        settings: Training settings.
        methods: Methods to attach to the optimizer.
        head: Resets the output layer, for streams whose tasks come with a new one.
        trained: Whether the network was trained before. The first task is then new data for it, as later tasks are.
        old_test: Examples that the network learned before; evaluated whenever the test examples are.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        methods: Sequence[Method] = (),
        head: Method | None = None,
        *,
        trained: bool = False,
        old_test: Examples | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.methods = list(methods)
        self.head = head
        self.trained = trained
        self.old_test = old_test
        self.monitor: Monitor | None = None
        self.reference: ReferenceNetwork | None = None
        self.task = 0
        self.epoch = 0
        self.step = 0
        self.answers = 0
        self.online_correct = 0
        self.online_loss = 0.0
        self.start: Record = {}
        self.begin_epoch()
        self.after_step: Callable[[], None] = lambda: None
        self.optimizer = make_optimizer(model, settings)
        for method in self.methods:
            method.attach(self.optimizer)

    def measure(self, names: Sequence[str], task: Task, reference: Reference = "initial") -> None:
        """Record measures at the first step of a task, and of every n-th epoch, n = `evaluate_every`.

        Args:
            names: Some of `pliant.diagnostics.measures.names()`.
            task: The first task; measures use its examples until the next task.
            reference: The network that measures compare with. "initial": the network at the first step, or at the
                start of the task if every task starts from a fresh network. "boundary": the network at the end of the
                previous task, before any method acted. "previous_task": the network at the start of the previous task.
        """
        self.reference = ReferenceNetwork(reference, self.model)
        self.monitor = Monitor(
            self.model,
            self.optimizer,
            every=1,
            measures=names,
            probe=probe_batch(task),
            loss_fn=loss_between,
            reference=self.reference.model,
            budget=None,
        )
        self.monitor.detach()

    def begin_epoch(self) -> None:
        """Set what an epoch sums up to zero: steps, losses, correct answers, and the measures of its first step."""
        device = _device(self.model)
        self.batch = 0
        self.loss_sum = torch.zeros((), device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.measured: dict[str, float | None] | None = None

    def renew_optimizer(self) -> None:
        """Replace the optimizer and attach the methods to the new one; their state stays."""
        for method in self.methods:
            method.detach(self.optimizer)
        self.optimizer = make_optimizer(self.model, self.settings)
        for method in self.methods:
            method.attach(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, including the random generators'."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "methods": [method.state_dict() for method in self._stateful()],
            "position": {name: getattr(self, name) for name in _POSITION},
            "reference": None if self.reference is None else self.reference.state_dict(),
            "random": random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict()` of a learner with the same model, settings, methods and measures.

        Raises:
            ValueError: If the state does not fit.
        """
        position = state["position"]
        for name in _COUNTS:
            if type(position[name]) is not int or position[name] < 0:
                raise ValueError(f"{name} is {position[name]!r}; it must be an integer ≥ 0")
        if not isinstance(position["start"], dict) or not isinstance(position["measured"], dict | None):
            raise ValueError("start and measured must be records")
        check_number("online_loss", position["online_loss"])
        for name in ("loss_sum", "correct"):
            if not isinstance(position[name], Tensor) or position[name].ndim or not position[name].isfinite():
                raise ValueError(f"{name} is {position[name]!r}; it must be a finite number")
        json.dumps([position["start"], position["measured"]], allow_nan=False)  # They become a line of the metrics.
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())) from error
        load_optimizer_state(self.optimizer, state["optimizer"], "the optimizer's state", with_rate=True)
        for method, saved in zip(self._stateful(), state["methods"], strict=True):
            method.load_state_dict(saved)
        for name in _POSITION:
            setattr(self, name, position[name])
        self.loss_sum, self.correct = (each.to(_device(self.model)) for each in (self.loss_sum, self.correct))
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        set_random_state(state["random"])

    def _stateful(self) -> list[Method]:
        return self.methods if self.head is None else [*self.methods, self.head]


class ReferenceNetwork:
    """The network that measures compare with, updated at task boundaries.

    Args:
        kind: When to update it; see `Learner.measure`.
        model: The network in its initial state.
    """

    def __init__(self, kind: Reference, model: nn.Module) -> None:
        self.kind = kind
        self.model = copy.deepcopy(model)
        self.task_start = copy.deepcopy(model) if kind == "previous_task" else None

    def end_task(self, model: nn.Module) -> None:
        """Update at the end of a task, before any method acts."""
        if self.kind == "boundary":
            self.model.load_state_dict(model.state_dict())

    def start_task(self, model: nn.Module) -> None:
        """Update at the start of a task, after the methods acted."""
        if self.task_start is not None:
            self.model.load_state_dict(self.task_start.state_dict())
            self.task_start.load_state_dict(model.state_dict())

    def start_fresh(self, make: Callable[[], nn.Module]) -> None:
        """Update for a task that starts from a fresh network, also when a run resumes within the task."""
        if self.kind == "initial":
            self.model.load_state_dict(make().state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state; empty for "initial", which a resumed run makes again."""
        if self.kind == "initial":
            return {}
        parts = {"model": self.model, "task_start": self.task_start}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict()`."""
        for name, saved in state.items():
            getattr(self, name).load_state_dict(saved)


_COUNTS = ("task", "epoch", "step", "answers", "batch", "online_correct")
_POSITION = (*_COUNTS, "online_loss", "start", "loss_sum", "correct", "measured")


def train(
    learner: Learner,
    stream: Stream,
    seed: int,
    *,
    fresh: Callable[[int], nn.Module] | None = None,
) -> Iterator[Record]:
    """Train from the learner's position to the end of a stream.

    Args:
        learner: The learner. Its state may be saved whenever a record is yielded or `after_step` is called.
        stream: The stream of tasks.
        seed: Seed of the order of the examples.
        fresh: Makes an untrained network for a task. If given, every task starts from it with a new optimizer: the
            baseline that plasticity is measured against.

    Yields:
        A record after every epoch. The first record of a new task also has the test accuracies before the first step,
        after the methods acted. The last record of a task also has accuracy and loss on its training examples and the
        online accuracy and loss over the task. Tasks with real targets have losses only.

    Raises:
        DivergedError: If the loss is not finite.
    """
    workload = stream.workload()
    for index in range(learner.task, len(stream)):
        task = stream[index]
        learner.task = index
        begun = begin_task(learner, task, fresh)
        learner.start = learner.start if learner.batch else begun
        while learner.epoch < task.epochs:
            record = train_epoch(learner, task, seed)
            learner.epoch += 1
            record |= {"task": index, "epoch": learner.epoch, "step": learner.step} | learner.start
            record["progress"] = (sum(workload[:index]) + workload[index] * learner.epoch / task.epochs) / sum(workload)
            record |= evaluate_epoch(learner, task)
            learner.start = {"receipts": []}
            yield record
        learner.epoch = learner.answers = learner.online_correct = 0
        learner.online_loss = 0.0


def begin_task(learner: Learner, task: Task, fresh: Callable[[int], nn.Module] | None = None) -> Record:
    """Prepare a task: reset the head, tell the methods, renew the optimizer, update probe and reference.

    The first task of an untrained network, and a task in which a run resumes, need only the probe and the reference.

    Args:
        learner: The learner.
        task: The task that begins.
        fresh: Makes an untrained network to start from.

    Returns:
        The receipts of the methods that acted, and the test accuracy afterwards.
    """
    if learner.monitor is not None:
        learner.monitor.set_probe(probe_batch(task))
    begins_untrained = task.index == 0 and not learner.trained
    if learner.reference is not None and fresh is not None and not begins_untrained:
        learner.reference.start_fresh(partial(fresh, task.index))
    record: Record = {"receipts": []}
    if learner.epoch > 0 or learner.batch > 0 or begins_untrained:
        return record
    if learner.reference is not None:
        learner.reference.end_task(learner.model)
    record["receipts"] = _act_at_boundary(learner, task, fresh)
    if learner.reference is not None:
        learner.reference.start_task(learner.model)
    if task.test is not None:
        record |= _evaluate_entry(learner, task, task.test, "test")
    if learner.old_test is not None:
        record |= _evaluate_entry(learner, task, learner.old_test, "old_test")
    return record


def _act_at_boundary(learner: Learner, task: Task, fresh: Callable[[int], nn.Module] | None) -> list[dict[str, Any]]:
    receipts = []
    if "head" in task.changed:
        if learner.head is None:
            raise ValueError(f"task {task.index} comes with a new output layer; the learner needs head=")
        receipts.append(learner.head.apply(learner.optimizer).as_dict())
    if fresh is not None:
        learner.model.load_state_dict(fresh(task.index).state_dict())
    elif learner.settings.announce:
        for method in learner.methods:
            if method.acts_on_new_data:
                pairs = batches(task.train, learner.settings.batch_size, _device(learner.model))
                receipts.append(method.apply(learner.optimizer, batches=pairs, loss_fn=loss_between).as_dict())
    if fresh is not None or learner.settings.new_optimizer:
        learner.renew_optimizer()
    return receipts


def count_steps(task: Task, settings: Settings) -> int:
    """Return the steps of an epoch; a last batch of a single example is left out."""
    whole, rest = divmod(len(task.train), settings.batch_size)
    return whole + (rest > 1 or whole == 0)


def train_epoch(learner: Learner, task: Task, seed: int) -> Record:
    """Train on every example of a task once.

    Returns:
        The mean loss and the online accuracy, both computed on each batch before its step; measures if due.
    """
    model, optimizer, settings = learner.model, learner.optimizer, learner.settings
    device = _device(model)
    order = permutation(len(task.train), "order", seed, task.index, learner.epoch).to(device)
    indices = torch.split(order, settings.batch_size)[: count_steps(task, settings)]
    # The monitor is attached for the first step only, so it adds no cost and no state to the other steps.
    monitor = learner.monitor if learner.batch == 0 and learner.epoch % settings.evaluate_every == 0 else None
    if monitor is not None:
        monitor.attach(optimizer)
    model.train()
    for position, index in enumerate(indices[learner.batch :], learner.batch):
        lr = learning_rate(settings, task.epochs, learner.epoch, position, len(indices))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        for part in index.tensor_split(min(settings.accumulate, len(index))):
            x, y = task.train.batch(part)
            with autocast(settings, device):
                outputs = model(x)
                loss = loss_between(outputs, y)
            share = len(part) / len(index)
            (loss if share == 1 else share * loss).backward()  # type: ignore[no-untyped-call]
            learner.loss_sum += loss.detach() * len(y)
            learner.correct += count_correct(outputs, y)
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        if monitor is not None and position == 0:
            monitor.detach()
            values = monitor.records.pop().values
            learner.measured = {name: value if math.isfinite(value) else None for name, value in values.items()}
        learner.batch += 1
        if learner.batch < len(indices):
            learner.after_step()
    seen = sum(len(index) for index in indices)
    mean_loss = float(learner.loss_sum) / seen
    if not math.isfinite(mean_loss):
        raise DivergedError(f"the training loss is {mean_loss} in epoch {learner.epoch + 1} of task {task.index}")
    learner.step += len(indices)
    answers = seen * answers_per_example(task.train)
    learner.answers += answers
    learner.online_correct += int(learner.correct)
    learner.online_loss += mean_loss * answers
    record: Record = {"loss": mean_loss, "lr": lr}
    if has_classes(task.train):
        record["online_accuracy"] = int(learner.correct) / answers
    if learner.measured is not None:
        record["measures"] = learner.measured
    learner.begin_epoch()
    return record


def evaluate_epoch(learner: Learner, task: Task) -> Record:
    """Return test accuracies if due and, after a task's last epoch, training accuracy and online accuracy."""
    record: Record = {}
    last = learner.epoch == task.epochs
    due = last or learner.epoch % learner.settings.evaluate_every == 0
    if task.test is not None and due:
        record |= _evaluate(learner, task, task.test, "test")
    if learner.old_test is not None and due:
        record |= _evaluate(learner, task, learner.old_test, "old_test")
    for name, examples in task.others.items() if due else ():
        record |= _evaluate(learner, task, examples, f"{name}_test")
    if last:
        record |= _evaluate(learner, task, task.train, "train")
        record["task_online_loss"] = learner.online_loss / learner.answers
        if has_classes(task.train):
            record["task_online_accuracy"] = learner.online_correct / learner.answers
    return record


def _evaluate(learner: Learner, task: Task, examples: Examples, which: str) -> Record:
    """Return accuracy, if there are classes, and loss; raise if the last step diverged, which its own loss hides."""
    size = min(_EVALUATED, max(learner.settings.batch_size, _EVALUATED_NUMBERS // math.prod(examples.shape)))
    with autocast(learner.settings, _device(learner.model)):
        accuracy, loss = evaluate(learner.model, examples, size)
    if not math.isfinite(loss):
        raise DivergedError(f"the {which} loss is {loss} after epoch {learner.epoch} of task {task.index}")
    record: Record = ({f"{which}_accuracy": accuracy} if has_classes(examples) else {}) | {f"{which}_loss": loss}
    if examples.characters is not None:
        tokens = len(examples) * answers_per_example(examples)
        record[f"{which}_bits_per_character"] = loss * tokens / (math.log(2) * int(examples.characters.sum()))
    return record


def _evaluate_entry(learner: Learner, task: Task, examples: Examples, which: str) -> Record:
    """Return the accuracy before a task's first step, or the loss if there are no classes."""
    name, value = next(iter(_evaluate(learner, task, examples, which).items()))
    return {f"entry_{name}": value}


_EVALUATED = 1000
"""The most examples of an evaluation batch."""
_EVALUATED_NUMBERS = 2**24
"""The most numbers in an evaluation batch, unless a training batch has more: evaluation fits where training does."""


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, batch_size: int = _EVALUATED) -> tuple[float, float]:
    """Return accuracy (0 without classes) and mean loss over examples or their tokens, in evaluation mode."""
    device = _device(model)
    correct, loss = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
    with eval_mode(model):
        for x, y in batches(examples, batch_size, device):
            outputs = model(x)
            correct += count_correct(outputs, y)
            loss += loss_between(outputs, y, reduction="sum")
    answers = len(examples) * answers_per_example(examples)
    return int(correct) / answers, float(loss) / answers


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """Return the context in which outputs and losses are computed in the settings' precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")


def has_classes(examples: Examples) -> bool:
    """Return whether the targets are class indices, so that there is an accuracy."""
    return not examples.y.is_floating_point()


def answers_per_example(examples: Examples) -> int:
    """Return how many answers an example asks for: one, or one for each of its tokens."""
    return examples.y.shape[1] if has_classes(examples) and examples.y.ndim == 2 else 1


def loss_between(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of class indices, or the squared error of real targets, summed over their entries.

    There may be one class index per example, or one per token.

    Example:
        >>> loss_between(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [0.0]]))
        tensor(5.)
    """
    if not targets.is_floating_point():
        return class_loss(outputs, targets, reduction)
    if outputs.shape != targets.shape:
        raise ValueError(f"outputs have shape {tuple(outputs.shape)}, but the targets {tuple(targets.shape)}")
    errors = mse_loss(outputs, targets, reduction="none").sum(1)
    return errors.mean() if reduction == "mean" else errors.sum()


def count_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the number of examples or tokens whose class is predicted; 0 for real targets."""
    if targets.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=outputs.device)
    return (outputs.argmax(-1) == targets).sum()


def batches(examples: Examples, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all examples in order, in batches."""
    for index in torch.split(torch.arange(len(examples), device=device), size):
        yield examples.batch(index)


def probe_batch(task: Task, size: int = 256) -> tuple[Tensor, Tensor]:
    """Return random training examples of a task to measure on, the same ones for every network."""
    order = permutation(len(task.train), "probe", task.index)[:size]
    return task.train.batch(order.to(task.train.y.device))


def learning_rate(settings: Settings, epochs: int, epoch: int, position: int, per_epoch: int) -> float:
    """Return the learning rate of one step of a task.

    Args:
        settings: Base rate, warm-up and decays.
        epochs: Epochs of the task.
        epoch: The current epoch, from 0.
        position: The step in this epoch, from 0.
        per_epoch: Steps per epoch.

    Example:
        >>> settings = Settings(lr=1.0, warmup=0.5, decay_epochs=(3,))
        >>> [learning_rate(settings, 4, epoch, 0, 1) for epoch in range(4)]
        [0.5, 1.0, 1.0, 0.1]
        >>> settings = Settings(lr=1.0, warmup=0.25, decay="linear", decay_to=0.0)
        >>> [round(learning_rate(settings, 4, epoch, 0, 1), 2) for epoch in range(4)]
        [1.0, 0.67, 0.33, 0.0]
    """
    lr = settings.lr * settings.decay_factor ** sum(epoch >= start for start in settings.decay_epochs)
    whole = epochs * per_epoch
    rising = settings.warmup * whole
    step = epoch * per_epoch + position + 1
    if step < rising:
        return lr * step / rising
    if settings.decay == "none":
        return lr
    part = (step - rising) / (whole - rising)
    left = 1 - part if settings.decay == "linear" else (1 + math.cos(math.pi * part)) / 2
    return lr * (settings.decay_to + (1 - settings.decay_to) * left)


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """Make the optimizer, fused where the parameters allow it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "adam":
        return Adam(parameters, lr, settings.betas, weight_decay=decay, fused=fused)
    if settings.optimizer == "adamw":
        return AdamW(parameters, lr, settings.betas, weight_decay=decay, fused=fused)
    # Not fused: fused SGD fails if a method has dropped the momentum of only some parameters.
    return SGD(parameters, lr, momentum=settings.momentum, weight_decay=decay)


_AT_ENDS = (
    "test_accuracy", "old_test_accuracy", "train_accuracy", "task_online_accuracy",
    "test_loss", *(f"{name}_test_loss" for name in OTHERS), "old_test_loss", "train_loss", "task_online_loss",
    *(f"{name}_test_accuracy" for name in OTHERS),
    *(f"{name}_bits_per_character" for name in ("test", *(f"{other}_test" for other in OTHERS), "train")),
)  # fmt: skip
RESULTS = tuple(f"{which}_{name}" for name in _AT_ENDS for which in ("final", "mean"))
"""The metrics of a run's result."""


_LOWER_IS_BETTER = ("loss", "error", "perplexity", "per_character")


def direction(metric: str) -> int:
    """Return 1 if higher is better, −1 if lower is better, 0 if neither is."""
    if metric.endswith("overestimation"):
        return 0
    return -1 if metric.endswith(_LOWER_IS_BETTER) else 1


def summarize(records: Sequence[Record]) -> dict[str, float]:
    """Summarize a run's records in its result.

    Args:
        records: The records that `train` yielded.

    Returns:
        `final_…`: the value at the end of the last task; `mean_…`: the mean over the ends of all tasks. Tasks without
        the metric are skipped; a stream without a test set has no test accuracy, real targets have no accuracy.
    """
    ends = [record for record in records if any(name.startswith("task_online") for name in record)]
    result: dict[str, float] = {}
    for name in _AT_ENDS:
        values = [record[name] for record in ends if name in record]
        if values:
            result[f"final_{name}"] = values[-1]
            result[f"mean_{name}"] = math.fsum(values) / len(values)
    return result


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
