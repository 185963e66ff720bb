"""The test that decides whether a network has lost plasticity: let it learn, beside a fresh network.

Throwaway copies of the network and fresh twins of it learn the new data in the same order, with the same optimizer and
the same number of steps. What counts is what they reach on held-out data, and how fast. Each pair of copy and twin has
its own seed: its own order of the data, fresh weights and held-out part. Pairs are added until the verdict is clear or
the budget is spent.

Random labels are a stress test. They are reported apart and never decide: a long-trained, healthy network learns random
labels more slowly than a fresh one, and real labels faster.
"""

import contextlib
import copy
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils._pytree import tree_map

from pliant._examples import Examples, gather
from pliant._losses import class_loss
from pliant._seeding import drawing_for, generator, permutation
from pliant._validation import check_choice, check_number, check_positive_int, check_seed
from pliant.distributed import unwrap_model
from pliant.methods import FullReset, PlasticityInjection
from pliant.running import call_with, check_callable, eval_mode, left_as_it_was
from pliant.trial_result import (
    Labels,
    Pair,
    Trial,
    Value,
    Verdict,
    area,
    decide,
    have_learned,
    list_looks,
    mean,
    measure_gap,
)  # fmt: skip

LossFunction = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_POINTS, _FEWEST_POINTS = 20, 8
"""How often each network is evaluated while it learns; less often if the budget is short."""
EXAMPLES = 20_000
"""How many examples a trial takes at most."""
_HELD_OUT = 0.2
_EVALUATED = 2_000
_STRESSED = 512
_FEWEST_STEPS = 50


def trial(
    model: nn.Module,
    data: Any,
    loss_fn: LossFunction = class_loss,
    *,
    fresh: Callable[[], nn.Module] | None = None,
    optimizer: MakeOptimizer | Optimizer | None = None,
    test: Any = None,
    labels: Labels = "given",
    steps: int | None = None,
    batch_size: int = 64,
    seeds: int = 3,
    max_seeds: int = 12,
    budget: float | None = None,
    stress: bool = True,
    inject: bool | str = False,
    seed: int = 0,
    progress: bool | None = None,
) -> Trial:
    """Decide whether a network has lost plasticity: let copies of it learn new data beside fresh twins.

    The model, its modes, gradients and hooks and the random generators stay as they are, to the last bit.

    Args:
        model: The network.
        data: New data to learn: a pair (inputs, targets), a data set of such pairs, or an iterable of such batches.
            Inputs are a tensor, a tuple of arguments or a dictionary of keyword arguments.
        loss_fn: `loss_fn(model(inputs), targets)`; by default the cross-entropy of classes, or of every token's next
            token if outputs are [examples, tokens, vocabulary].
        fresh: Builds an untrained network of the same kind. By default the parameters of a copy are drawn again.
        optimizer: Makes the optimizer from parameters, or an optimizer whose class and settings are used. Its state is
            not used: both networks start with a new one. Adam with learning rate 1e-3 by default.
        test: Held-out data in the form of `data`. By default, each pair holds out a fifth of the data.
        labels: "random" learns random classes instead of the targets, where only inputs exist.
        steps: Optimizer steps of each network; by default ten epochs, at least 400 and at most 2000.
        batch_size: Examples a step.
        seeds: Pairs before the first verdict; two or more. If it is undecided, their number is doubled.
        max_seeds: Pairs to train at most.
        budget: Seconds that the trial may take. It shortens the default `steps`, and no further pair begins after
            `seeds` pairs if it would probably end too late.
        stress: Whether to report the stress test on random labels too (only for classes, and within the budget).
        inject: If the verdict is "lost", also train copies with a fresh head on top of the frozen one (plasticity
            injection), and report how much of the gap that restores. True if the model is an `nn.Sequential`, otherwise
            the name of the `nn.Sequential` that ends in the head.
        seed: Decides the order of the data, the fresh weights and the held-out parts.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.

    Returns:
        The verdict with the numbers behind it.

    Raises:
        ValueError: If an argument does not fit, or the budget does not suffice for a trial.

    Example:
        >>> inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> _ = nn.init.constant_(model[0].bias, -1e6)  # every unit is dead
        >>> trial(model, (inputs, (inputs[:, 0] > 0).long()), steps=200, stress=False).verdict
        'lost'
    """
    model = unwrap_model(model)
    check_callable(model)
    check_builder(fresh)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model: no parameter requires a gradient, so there is nothing to train")
    if not (optimizer is None or isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise ValueError(
            f"optimizer: {optimizer!r} is not allowed; it must be an optimizer, or a function that makes one"
        )
    check_choice("labels", labels, ("given", "random"))
    if check_positive_int("seeds", seeds) < 2:
        raise ValueError(f"seeds: {seeds} is not allowed; an interval needs 2 pairs at least")
    head = inject if isinstance(inject, str) else None
    if inject:
        PlasticityInjection(copy.deepcopy(model), head=head)  # raises before anything is trained
    looks = list_looks(seeds, check_positive_int("max_seeds", max_seeds))
    deadline = time.monotonic() + check_number("budget", budget, above=True) if budget is not None else math.inf
    begun, seed = time.monotonic(), check_seed(seed) or 0
    training = gather_new("data", data, model, labels, seed)
    held_out = gather_new("test", test, model, labels, seed) if test is not None else None
    whole = check_positive_int("steps", steps) if steps is not None else _default_steps(len(training), batch_size)
    value = _kind_of_value(model, training)
    if loss_fn is class_loss:
        _check_probabilities(training)
    setup = _Setup(model, fresh, loss_fn, _optimizer_maker(optimizer), training, held_out, value, labels, whole,
                   check_positive_int("batch_size", batch_size), seed)  # fmt: skip
    with left_as_it_was(model), drawing_for("trial", seed), _progress(max(looks), progress) as show:
        if steps is None and budget is not None:
            setup = setup.within(budget, seeds)
        pairs: list[Pair] = []
        verdict: Verdict = "undecided"
        for look in looks:
            while len(pairs) < look and (len(pairs) < seeds or _time_left(begun, deadline, len(pairs))):
                number = len(pairs)
                pairs.append(setup.learn_pair(number, lambda part, n=number: show(n, part)))  # type: ignore[misc]
            verdict = decide(pairs, len(looks), setup.resolution)
            if verdict != "undecided" or len(pairs) < look:
                break
        show(len(pairs), 0.0)
        areas: dict[str, float] = {}
        if stress and value == "accuracy" and labels == "given" and _time_left(begun, deadline, len(pairs)):
            areas = setup.stress(2)
        restored = None
        if inject and verdict == "lost" and _time_left(begun, deadline, len(pairs)):
            restored = setup.inject(head, pairs)
    speed, best, final = (measure_gap(pairs, name, len(looks), setup.resolution) for name in ("area", "best", "final"))
    ratio = sorted(pair.relative_steps for pair in pairs)[(len(pairs) - 1) // 2]
    return Trial(
        verdict, speed.mean, (speed.low, speed.high), best, final, ratio, have_learned(pairs, len(looks)), value,
        setup.points, tuple(pairs), areas, time.monotonic() - begun, whole if setup.steps < whole else None,
        restored, labels,
    )  # fmt: skip


def check_builder(fresh: object) -> None:
    """Raise a ValueError if `fresh` is not a function that builds a network: a network itself cannot be drawn again."""
    if fresh is not None and (isinstance(fresh, nn.Module) or not callable(fresh)):
        raise ValueError(
            f"fresh: a {type(fresh).__name__} is not allowed; it must be a function that returns a new network"
        )


@dataclass(frozen=True)
class _Setup:
    """What all networks of a trial have in common."""

    model: nn.Module
    build: Callable[[], nn.Module] | None
    loss_fn: LossFunction
    make_optimizer: MakeOptimizer
    data: Examples
    test: Examples | None
    value: Value
    labels: Labels
    steps: int
    batch_size: int
    seed: int
    evaluations: int = _POINTS

    @property
    def points(self) -> tuple[int, ...]:
        """The steps at which held-out data is evaluated; the first is before any step."""
        count = min(self.evaluations, self.steps)
        return tuple(round(i * self.steps / count) for i in range(count + 1))

    @property
    def resolution(self) -> float:
        """The smallest difference of two values: one example for an accuracy, nothing for a loss."""
        return 1 / min(len(self.split(0)[1]), _EVALUATED) if self.value == "accuracy" else 0.0

    def split(self, number: int) -> tuple[Examples, Examples]:
        """Return what a pair trains on and what it holds out."""
        if self.test is not None:
            return self.data, self.test
        if self.labels == "random":
            return self.data, self.data  # nothing about random labels can be learned from other examples
        order = permutation(len(self.data), "held out", self.seed, number)
        count = max(1, round(_HELD_OUT * len(self.data)))
        if count == len(self.data):
            raise ValueError("data: a single example cannot be split; pass more examples, or held-out data as test=")
        return self.data.take(order[count:]), self.data.take(order[:count])

    def aged(self) -> nn.Module:
        """Return a copy of the network that shares nothing with it."""
        return copy.deepcopy(self.model)

    def fresh(self, *purpose: str | int) -> nn.Module:
        """Return an untrained twin of the network."""
        with drawing_for("fresh", self.seed, *purpose):
            if self.build is not None:
                return self.build().to(next(self.model.parameters()).device)
            twin = self.aged()
            FullReset(twin, optimizer_state="keep").apply()
        return twin

    def within(self, budget: float, pairs: int) -> "_Setup":
        """Return a setup with fewer steps, if the pairs would take longer than the budget.

        Evaluations may take half of the time; if they would take more, there are fewer.
        """
        training, held_out = self.split(0)
        twin, few = self.fresh("timing"), replace(self, steps=4)
        few.learn(twin, 0, training, held_out.take(torch.arange(1)))  # the first steps in a process load code
        begun = time.monotonic()
        self.evaluate(twin, held_out)
        evaluated = time.monotonic()
        few.learn(twin, 0, training, held_out.take(torch.arange(1)))
        a_step, an_evaluation = (time.monotonic() - evaluated) / few.steps, evaluated - begun
        share = budget / (2 * pairs)
        # Two more evaluations: before the first step, and of the training data at the end.
        evaluations = min(max(int(share / 2 / an_evaluation) - 2, _FEWEST_POINTS), _POINTS)
        affordable = int((share - (evaluations + 2) * an_evaluation) / a_step)
        if affordable < min(_FEWEST_STEPS, self.steps):
            raise ValueError(
                f"budget: {budget:g} seconds are too few; {pairs} pairs of {_FEWEST_STEPS} steps take about "
                f"{2 * pairs * (_FEWEST_STEPS * a_step + (_FEWEST_POINTS + 2) * an_evaluation):.0f}"
            )
        return replace(self, steps=min(self.steps, affordable), evaluations=evaluations)

    def learn_pair(self, number: int, show: Callable[[float], None]) -> Pair:
        """Train a copy and a fresh twin on the same batches."""
        training, held_out = self.split(number)
        aged, aged_end = self.learn(self.aged(), number, training, held_out, lambda part: show(part / 2))
        fresh, fresh_end = self.learn(self.fresh(number), number, training, held_out, lambda part: show((1 + part) / 2))
        floor = fresh[0]
        return Pair(
            number, tuple(max(v, floor) for v in aged), tuple(max(v, floor) for v in fresh), aged_end, fresh_end
        )

    def learn(
        self,
        model: nn.Module,
        number: int,
        training: Examples,
        held_out: Examples,
        show: Callable[[float], None] = lambda part: None,
    ) -> tuple[list[float], float]:
        """Train a network; return its held-out value at each evaluation, and its training value at the end."""
        optimizer = self.make_optimizer([p for p in model.parameters() if p.requires_grad])
        batches = self._batches(len(training), number)
        curve = [self.evaluate(model, held_out)]
        with drawing_for("training", self.seed, number):
            for begin, end in pairwise(self.points):
                model.train()
                for index in batches[begin:end]:
                    batch = training.take(index)
                    optimizer.zero_grad()
                    self.loss_fn(call_with(model, batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                curve.append(self.evaluate(model, held_out))
                show(end / self.steps)
        return curve, self.evaluate(model, training)

    def inject(self, head: str | None, pairs: Sequence[Pair]) -> float:
        """Return how much of the gap in area copies with an injected head make up, as a fraction."""
        gained, missing = [], []
        for pair in pairs:
            model = self.aged()
            with drawing_for("inject", self.seed, pair.seed):
                PlasticityInjection(model, head=head, optimizer_state="keep").apply()
            curve, _ = self.learn(model, pair.seed, *self.split(pair.seed))
            gained.append(area([max(value, pair.fresh[0]) for value in curve]) - area(pair.aged))
            missing.append(area(pair.fresh) - area(pair.aged))
        return mean(gained) / mean(missing) if mean(missing) > 0 else math.nan

    def stress(self, count: int) -> dict[str, float]:
        """Return the mean area under the training curve on random labels, of copies and of fresh twins."""
        some = self.data.take(permutation(len(self.data), "stress", self.seed)[:_STRESSED])
        areas: dict[str, list[float]] = {"aged": [], "fresh": []}
        for number in range(count):
            shuffled = _with_random_labels(some, int(some.targets.max()) + 1, self.seed, number)
            for name, model in (("aged", self.aged()), ("fresh", self.fresh("stress", number))):
                areas[name].append(area(self.learn(model, number, shuffled, shuffled)[0]))
        return {name: mean(values) for name, values in areas.items()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: Examples) -> float:
        """Return the accuracy, or the negative mean loss, on some examples at most."""
        total, seen = 0.0, 0
        with eval_mode(model):
            for index in torch.split(torch.arange(min(len(examples), _EVALUATED)), max(self.batch_size, 500)):
                batch = examples.take(index)
                output = call_with(model, batch.inputs)
                if self.value == "accuracy":
                    total += float((output.argmax(1) == batch.targets).sum())
                else:
                    total -= float(self.loss_fn(output, batch.targets)) * len(index)
                seen += len(index)
        return total / seen if math.isfinite(total) else -math.inf

    def _batches(self, count: int, number: int) -> list[Tensor]:
        """Return the examples of each step: whole epochs in random order, incomplete batches left out."""
        size = min(self.batch_size, count)
        epochs = math.ceil(self.steps / (count // size))
        orders = [permutation(count, "order", self.seed, number, epoch) for epoch in range(epochs)]
        return [order[i * size : (i + 1) * size] for order in orders for i in range(count // size)][: self.steps]


def gather_new(argument: str, data: Any, model: nn.Module, labels: Labels, seed: int, most: int = EXAMPLES) -> Examples:
    """Bring the new data of a trial into memory, on the model's device; with random labels if they are asked for."""
    device = next(model.parameters()).device
    examples = gather(argument, data, most, unlabeled=labels == "random", seed=seed, device=device)
    held = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if len(held) == 1:  # torch does not multiply two floating types
        examples = Examples(tree_map(lambda leaf: _cast(leaf, *held), examples.inputs), examples.targets)
    if labels == "given":
        return examples
    output = _output_of(model, examples)
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        raise ValueError("labels: 'random' needs a model that returns scores of classes, [examples, classes]")
    return _with_random_labels(examples, output.shape[1], seed, 0)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _with_random_labels(examples: Examples, classes: int, seed: int, number: int) -> Examples:
    drawn = torch.randint(classes, (len(examples),), generator=generator("labels", seed, number))
    return Examples(examples.inputs, drawn.to(examples.targets.device))


def _output_of(model: nn.Module, examples: Examples) -> Any:
    with torch.no_grad(), left_as_it_was(model), eval_mode(model):
        return call_with(model, examples.take(torch.arange(min(2, len(examples)))).inputs)


def _kind_of_value(model: nn.Module, examples: Examples) -> Value:
    """Say what to measure: accuracy if the outputs are scores of classes, the loss otherwise."""
    output = _output_of(model, examples)
    scores = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1
    return "accuracy" if scores and examples.are_classes else "loss"


def _check_probabilities(examples: Examples) -> None:
    """Raise a ValueError if real targets are not probabilities of classes, which the default loss takes them for."""
    targets = examples.take(torch.arange(min(64, len(examples)))).targets
    if not isinstance(targets, Tensor) or not targets.is_floating_point():
        return
    if targets.ndim < 2 or targets.shape[1] < 2 or (targets < 0).any() or ((targets.sum(1) - 1).abs() > 1e-2).any():
        raise ValueError(
            f"data: targets of shape {list(targets.shape)} are real numbers, and the default loss is that of classes; "
            "pass loss_fn=torch.nn.functional.mse_loss"
        )


def _optimizer_maker(optimizer: MakeOptimizer | Optimizer | None) -> MakeOptimizer:
    if optimizer is None:
        return lambda parameters: Adam(parameters, lr=1e-3)
    if not isinstance(optimizer, Optimizer):
        return optimizer
    kind = type(optimizer)
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name in known and name != "params"}
    return lambda parameters: kind(parameters, **settings)


def _default_steps(examples: int, batch_size: int) -> int:
    return min(max(400, 10 * examples // min(batch_size, examples)), 2000)


def _time_left(begun: float, deadline: float, pairs: int) -> bool:
    """Return whether one more pair would probably end before the deadline."""
    now = time.monotonic()
    return now + (now - begun) / pairs < deadline


@contextlib.contextmanager
def _progress(most: int, shown: bool | None) -> Iterator[Callable[[int, float], None]]:
    """Show the number of finished pairs and the progress of the next pair, on one line of stderr."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda done, part: None
        return

    def show(done: int, part: float) -> None:
        text = f"trial: {done} of at most {most} pairs" + (f", {part:.0%} of the next" if part else "")
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)

    show(0, 0.0)
    yield show
    print(file=sys.stderr)
