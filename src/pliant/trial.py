"""The test that decides whether a network has lost plasticity: let it learn, beside a fresh network.

Throwaway copies of the network and fresh twins of it learn the new data in the same order, with the same optimizer and
the same number of steps. What counts is what they reach on held-out data, and how fast. Each seed is one pair; pairs
are added until the verdict is clear or the budget is spent.

Random labels are a stress test. They are reported apart and never decide: a long-trained, healthy network learns random
labels more slowly than a fresh one, and real labels faster.
"""

import contextlib
import copy
import html
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

from pliant._importing import naming_extra
from pliant._seeding import drawing_for, generator, permutation
from pliant._validation import check_choice, check_number, check_positive_int, check_seed
from pliant.methods import FullReset
from pliant.running import call_with, check_callable, eval_mode, left_as_it_was

Verdict = Literal["plastic", "lost", "undecided"]
Labels = Literal["given", "random"]
LossFunction = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

NOTICEABLE = 0.01
"""The smallest gap in held-out results that counts as a loss, as a fraction of what a fresh network gains."""
TOLERATED = 0.03
"""A network is called plastic only if its gap in held-out results is smaller than this for certain."""
SLOWER = 0.1
"""The gap in area under the learning curve that counts as a loss, and that a plastic network stays below."""
CONFIDENCE = 0.95

_POINTS = 20
_EXAMPLES = 20_000
_HELD_OUT = 0.2
_EVALUATED = 2_000
_STRESSED = 512


@dataclass(frozen=True)
class Gap:
    """By how much fresh networks were better than this one, over pairs.

    Attributes:
        mean: Fresh minus aged, as a fraction of what the fresh network gains.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1%} [{self.low:+.1%}, {self.high:+.1%}]"


@dataclass(frozen=True)
class Pair:
    """One copy of the network and one fresh twin that learned the same data.

    Attributes:
        seed: The seed of the fresh weights and of the order of the data.
        aged: Held-out value of the copy at each evaluation; higher is better.
        fresh: The same of the fresh twin.
        aged_training: Training value of the copy at the end.
        fresh_training: The same of the fresh twin.
    """

    seed: int
    aged: tuple[float, ...]
    fresh: tuple[float, ...]
    aged_training: float
    fresh_training: float

    @property
    def gain(self) -> float:
        """What the fresh twin gained, from its first evaluation to its best."""
        return max(max(self.fresh) - self.fresh[0], 1e-9)

    @property
    def final_gap(self) -> float:
        """Fresh minus aged at the end, as a fraction of the gain."""
        return (self.fresh[-1] - self.aged[-1]) / self.gain

    @property
    def best_gap(self) -> float:
        """Fresh minus aged, each at its best, as a fraction of the gain."""
        return (max(self.fresh) - max(self.aged)) / self.gain

    @property
    def area_gap(self) -> float:
        """Fresh minus aged, area under the learning curve, as a fraction of the gain."""
        return (_area(self.fresh) - _area(self.aged)) / self.gain

    @property
    def relative_steps(self) -> float:
        """Steps until the copy reaches the twin's final value, divided by the twin's own; infinite if never."""
        level = self.fresh[-1]
        own = next(i for i, value in enumerate(self.fresh) if value >= level)
        reached = next((i for i, value in enumerate(self.aged) if value >= level), math.inf)
        return reached / max(own, 1)


@dataclass(frozen=True)
class Trial:
    """What a trial found.

    Attributes:
        verdict: "plastic", "lost" or "undecided".
        gap: How much of a fresh network's area under the learning curve is missing.
        best_gap: How much of a fresh network's best held-out result is missing.
        final_gap: How much of its held-out result at the end is missing.
        relative_steps: Median over pairs of the steps to the fresh network's level, relative to the fresh network.
        value: What was measured: "accuracy", or "loss" with its sign changed.
        steps: The steps at which held-out data was evaluated.
        pairs: The learning curves, one pair for each seed.
        stress: Area under the training curve on random labels of this network ("aged") and of fresh ones ("fresh").
        seconds: How long the trial took.
    """

    verdict: Verdict
    gap: Gap
    best_gap: Gap
    final_gap: Gap
    relative_steps: float
    value: Literal["accuracy", "loss"]
    steps: tuple[int, ...]
    pairs: tuple[Pair, ...]
    stress: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the trial in plain types, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Write the verdict, then the numbers that it rests on."""
        title, *rest = self._sentences()
        return "\n".join([title, *(f"  {line}" for line in rest)])

    def _repr_html_(self) -> str:
        title, *rest = (html.escape(line) for line in self._sentences())
        return f"<p><b>{title}</b></p><ul>{''.join(f'<li>{line}</li>' for line in rest)}</ul>"

    def _sentences(self) -> list[str]:
        count = len(self.pairs)
        meaning = {
            "plastic": "this network learns the new data as well as a fresh one",
            "lost": "this network learns the new data worse than a fresh one",
            "undecided": f"{count} pairs do not tell whether a fresh network learns the new data better",
        }
        lines = [f"{self.verdict}: {meaning[self.verdict]} ({count} pairs, {self.steps[-1]} steps each)"]
        aged, fresh = _mean(max(p.aged) for p in self.pairs), _mean(max(p.fresh) for p in self.pairs)
        sign = -1 if self.value == "loss" else 1
        lines += [
            f"held-out {self.value} at its best: {sign * aged:.4g}, fresh network {sign * fresh:.4g}",
            f"missing of what a fresh network gains: {self.best_gap} at the best, {self.gap} of the area",
        ]
        if math.isfinite(self.relative_steps):
            lines.append(f"it reaches the fresh network's final level in {self.relative_steps:.0%} of the steps")
        else:
            lines.append("it does not reach the fresh network's final level within the trial")
        if self.stress:
            lines.append(
                f"stress test on random labels (not part of the verdict): area {self.stress['aged']:.2f}, "
                f"fresh network {self.stress['fresh']:.2f}"
            )
        return lines


def trial(
    model: nn.Module,
    data: Any,
    loss_fn: LossFunction = cross_entropy,
    *,
    fresh: Callable[[], nn.Module] | None = None,
    optimizer: MakeOptimizer | Optimizer | None = None,
    test: Any = None,
    labels: Labels = "given",
    steps: int | None = None,
    batch_size: int = 64,
    seeds: int = 3,
    max_seeds: int = 10,
    budget: float | None = None,
    stress: bool = True,
    seed: int = 0,
    progress: bool | None = None,
) -> Trial:
    """Decide whether a network has lost plasticity: let copies of it learn new data beside fresh twins.

    The model, its modes, gradients and hooks and the random generators stay as they are, to the last bit.

    Args:
        model: The network.
        data: New data to learn: a pair (inputs, targets), a data set of such pairs, or an iterable of such batches.
            Inputs are a tensor, a tuple of arguments or a dictionary of keyword arguments.
        loss_fn: `loss_fn(model(inputs), targets)`.
        fresh: Builds an untrained network of the same kind. By default the parameters of a copy are drawn again.
        optimizer: Makes the optimizer from parameters, or an optimizer whose class and settings are used. Its state is
            not used: both networks start with a new one. Adam with learning rate 1e-3 by default.
        test: Held-out data in the form of `data`; by default a fifth of the data is held out.
        labels: "random" learns random classes instead of the targets, where only inputs exist.
        steps: Optimizer steps of each network; by default ten epochs, at least 200 and at most 2000.
        batch_size: Examples a step.
        seeds: Pairs to train at least; two or more.
        max_seeds: Pairs to train at most.
        budget: Seconds after which no further pair begins once `seeds` pairs are done.
        stress: Whether to report the stress test on random labels too (only for classes).
        seed: Decides the order of the data, the fresh weights and the held-out part.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.

    Returns:
        The verdict with the numbers behind it.

    Raises:
        ValueError: If an argument does not fit.

    Example:
        >>> inputs = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> _ = nn.init.constant_(model[0].bias, -1e6)  # every unit is dead
        >>> trial(model, (inputs, (inputs[:, 0] > 0).long()), steps=200, stress=False).verdict
        'lost'
    """
    check_callable(model)
    check_choice("labels", labels, ("given", "random"))
    if check_positive_int("seeds", seeds) < 2:
        raise ValueError(f"seeds: {seeds} is not allowed; an interval needs 2 pairs at least")
    max_seeds = max(check_positive_int("max_seeds", max_seeds), seeds)
    if budget is not None:
        check_number("budget", budget, above=True)
    begun = time.monotonic()
    device = next(model.parameters()).device
    training, held_out = _split(data, test, labels, check_seed(seed) or 0, device)
    steps = check_positive_int("steps", steps) if steps else _default_steps(len(training), batch_size)
    setup = _Setup(model, fresh, loss_fn, _optimizer_maker(optimizer), steps, batch_size, seed)
    with left_as_it_was(model), drawing_for("trial", seed):
        value = setup.kind_of_value(held_out)
        pairs: list[Pair] = []
        verdict: Verdict = "undecided"
        with _progress(max_seeds, progress) as show:
            while len(pairs) < max_seeds and (verdict == "undecided" or len(pairs) < seeds):
                if len(pairs) >= seeds and budget is not None and time.monotonic() - begun > budget:
                    break
                pairs.append(setup.learn_pair(len(pairs), training, held_out, value))
                if len(pairs) >= seeds:
                    verdict = _decide(pairs, looks=max_seeds - seeds + 1)
                show(len(pairs), verdict)
        areas: dict[str, float] = {}
        if stress and value == "accuracy" and labels == "given":
            areas = setup.stress(training, min(seeds, 2))
    looks = max_seeds - seeds + 1
    best, area, final = (
        _interval([getattr(pair, name) for pair in pairs], looks) for name in ("best_gap", "area_gap", "final_gap")
    )
    ratio = sorted(pair.relative_steps for pair in pairs)[(len(pairs) - 1) // 2]
    seconds = time.monotonic() - begun
    return Trial(verdict, area, best, final, ratio, value, setup.points, tuple(pairs), areas, seconds)


def _decide(pairs: Sequence[Pair], looks: int) -> Verdict:
    """Return the verdict on the pairs so far, corrected for the number of times that it is asked for."""
    best = _interval([pair.best_gap for pair in pairs], looks)
    area = _interval([pair.area_gap for pair in pairs], looks)
    if (best.low > 0 and best.mean > NOTICEABLE) or (area.low > 0 and area.mean > SLOWER):
        return "lost"
    if best.high < TOLERATED and area.high < SLOWER:
        return "plastic"
    return "undecided"


def _interval(values: Sequence[float], looks: int) -> Gap:
    """Return mean and Student's t interval, its level divided among the looks (Bonferroni)."""
    with naming_extra("trial", "cli"):
        from scipy.stats import t

    mean, n = _mean(values), len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
    half = float(t.ppf(1 - (1 - CONFIDENCE) / 2 / looks, n - 1)) * spread
    return Gap(mean, mean - half, mean + half)


@dataclass(frozen=True)
class _Examples:
    """Inputs and targets in memory, on the model's device."""

    inputs: Any
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, index: Tensor) -> "_Examples":
        """Return some of the examples."""
        return _Examples(tree_map(lambda leaf: leaf[index], self.inputs), self.targets[index])


@dataclass(frozen=True)
class _Setup:
    """What all networks of a trial have in common."""

    model: nn.Module
    build: Callable[[], nn.Module] | None
    loss_fn: LossFunction
    make_optimizer: MakeOptimizer
    steps: int
    batch_size: int
    seed: int

    @property
    def points(self) -> tuple[int, ...]:
        """The steps at which held-out data is evaluated; the first is before any step."""
        count = min(_POINTS, self.steps)
        return tuple(round(i * self.steps / count) for i in range(count + 1))

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

    def kind_of_value(self, examples: _Examples) -> Literal["accuracy", "loss"]:
        """Say what to measure: accuracy if the outputs are scores of classes, the loss otherwise."""
        with torch.no_grad(), eval_mode(self.model):
            output = call_with(self.model, examples.take(torch.arange(min(2, len(examples)))).inputs)
        scores = isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] > 1
        return "accuracy" if scores and examples.targets.ndim == 1 and _is_whole(examples.targets) else "loss"

    def learn_pair(self, number: int, training: _Examples, held_out: _Examples, value: str) -> Pair:
        """Train a copy and a fresh twin on the same batches."""
        aged, aged_end = self.learn(self.aged(), number, training, held_out, value)
        fresh, fresh_end = self.learn(self.fresh(number), number, training, held_out, value)
        floor = fresh[0]  # A network that diverged, or starts far off, is not worse than an untrained one.
        return Pair(
            number, tuple(max(v, floor) for v in aged), tuple(max(v, floor) for v in fresh), aged_end, fresh_end
        )

    def learn(
        self, model: nn.Module, number: int, training: _Examples, held_out: _Examples, value: str
    ) -> tuple[list[float], float]:
        """Train a network; return its held-out value at each evaluation, and its training value at the end."""
        optimizer = self.make_optimizer([p for p in model.parameters() if p.requires_grad])
        batches = self._batches(len(training), number)
        curve = [self.evaluate(model, held_out, value)]
        with drawing_for("training", self.seed, number):
            for begin, end in pairwise(self.points):
                model.train()
                for index in batches[begin:end]:
                    batch = training.take(index)
                    optimizer.zero_grad()
                    self.loss_fn(call_with(model, batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                curve.append(self.evaluate(model, held_out, value))
        return curve, self.evaluate(model, training, value)

    def stress(self, training: _Examples, count: int) -> dict[str, float]:
        """Return the mean area under the training curve on random labels, of copies and of fresh twins."""
        some = training.take(permutation(len(training), "stress", self.seed)[:_STRESSED])
        classes = int(some.targets.max()) + 1
        areas: dict[str, list[float]] = {"aged": [], "fresh": []}
        for number in range(count):
            drawn = torch.randint(classes, (len(some),), generator=generator("labels", self.seed, number))
            shuffled = _Examples(some.inputs, drawn.to(some.targets))
            for name, model in (("aged", self.aged()), ("fresh", self.fresh("stress", number))):
                areas[name].append(_area(self.learn(model, number, shuffled, shuffled, "accuracy")[0]))
        return {name: _mean(values) for name, values in areas.items()}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, examples: _Examples, value: str) -> float:
        """Return the accuracy, or the negative mean loss, on some examples at most."""
        total, seen = 0.0, 0
        with eval_mode(model):
            for index in torch.split(torch.arange(min(len(examples), _EVALUATED)), max(self.batch_size, 500)):
                batch = examples.take(index)
                output = call_with(model, batch.inputs)
                if value == "accuracy":
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


def _split(data: Any, test: Any, labels: Labels, seed: int, device: torch.device) -> tuple[_Examples, _Examples]:
    """Return what is trained on and what is held out."""
    examples = _gather("data", data, labels, seed, device)
    if test is not None:
        return examples, _gather("test", test, labels, seed, device)
    if labels == "random":
        return examples, examples  # nothing about random labels can be learned from other examples
    order = permutation(len(examples), "held out", seed)
    count = max(1, round(_HELD_OUT * len(examples)))
    if count == len(examples):
        raise ValueError("data: a single example cannot be split; pass more examples, or held-out data as test=")
    return examples.take(order[count:]), examples.take(order[:count])


def _gather(argument: str, data: Any, labels: Labels, seed: int, device: torch.device) -> _Examples:
    """Bring a pair, a data set or batches into memory."""
    if labels == "random" and isinstance(data, Tensor):
        data = data, torch.zeros(len(data), dtype=torch.int64)
    if isinstance(data, Dataset):
        count = len(data)  # type: ignore[arg-type]
        some = permutation(count, "examples", seed)[:_EXAMPLES].tolist()
        data = default_collate([data[i] for i in some])
    elif not _is_pair(data):
        data = _concatenate(argument, data)
    if not _is_pair(data):
        raise ValueError(
            f"{argument}: a {type(data).__name__} is not allowed; pass a pair (inputs, targets), a data set of such "
            "pairs, or an iterable of such batches"
        )
    inputs, targets = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, tuple(data))
    lengths = {len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)} | {len(targets)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"{argument}: inputs and targets have {sorted(lengths)} examples; they must have equally many")
    if labels == "random":
        classes = max(int(targets.max()) + 1, 2) if _is_whole(targets) and targets.any() else 10
        targets = torch.randint(classes, (len(targets),), generator=generator("labels", seed)).to(device)
    return _Examples(inputs, targets)


def _concatenate(argument: str, batches: Any) -> Any:
    found: list[Any] = []
    try:
        for batch in batches:
            found.append(tuple(batch))
            if sum(len(targets) for _, targets in found) >= _EXAMPLES:
                break
        return tree_map(lambda *leaves: torch.cat(leaves), *found) if found else None
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{argument}: its batches are not pairs (inputs, targets) of equal form: {error}") from error


def _is_pair(data: Any) -> bool:
    return isinstance(data, list | tuple) and len(data) == 2 and isinstance(data[1], Tensor)


def _is_whole(targets: Tensor) -> bool:
    return not targets.is_floating_point() and not targets.is_complex()


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
    return min(max(200, 10 * examples // min(batch_size, examples)), 2000)


@contextlib.contextmanager
def _progress(most: int, shown: bool | None) -> Iterator[Callable[[int, str], None]]:
    """Show how many pairs are done on one line of stderr."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda done, verdict: None
        return
    print(f"trial: training the first of at most {most} pairs", end="", file=sys.stderr, flush=True)
    yield lambda done, verdict: print(
        f"\rtrial: {done} of at most {most} pairs, {verdict}\033[K", end="", file=sys.stderr, flush=True
    )
    print(file=sys.stderr)


def _area(curve: Sequence[float]) -> float:
    """Return the area under a curve over evenly spaced points, as its mean height.

    Example:
        >>> _area([0.0, 1.0, 1.0])
        0.75
    """
    return math.fsum((a + b) / 2 for a, b in pairwise(curve)) / (len(curve) - 1)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
