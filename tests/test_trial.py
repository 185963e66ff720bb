"""The trial: copies of a network learn new data beside fresh twins."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pliant
from pliant.diagnostics import measure
from pliant.trial import trial
from pliant.trial_result import NOTICEABLE, Gap, Pair, Trial, decide, have_learned, measure_gap
from tests.loops import assert_same, snapshot

QUICK: dict[str, Any] = {"steps": 120, "stress": False, "progress": False}


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(48), nn.Linear(48, 10))


def dead() -> nn.Module:
    model = build()
    with torch.no_grad():
        model[0].bias.fill_(-1e6)
    return model


@pytest.mark.parametrize(("make", "verdict"), [(build, "plastic"), (dead, "lost")])
def test_a_fresh_network_is_plastic_and_a_dead_one_is_not(
    digits: tuple[Tensor, Tensor], make: Callable[[], nn.Module], verdict: str
) -> None:
    found = trial(make(), digits, fresh=build, **QUICK)
    assert found.verdict == verdict
    assert (found.gap > 0.5) == (verdict == "lost")
    assert found.value == "accuracy"
    assert len(found.pairs[0].aged) == len(found.steps)
    assert found.steps[0] == 0
    assert found.steps[-1] == 120


def learned(data: tuple[Tensor, Tensor]) -> nn.Module:
    model = build()
    optimizer = Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def test_a_network_that_knows_the_data_needs_fewer_steps(digits: tuple[Tensor, Tensor]) -> None:
    found = trial(learned(digits), digits, **QUICK)
    assert found.verdict == "plastic"
    assert found.interval[1] < 0
    assert found.relative_steps < 0.5
    assert "the fresh network's final level" in str(found)


def test_model_optimizer_and_generators_stay_as_they_were(digits: tuple[Tensor, Tensor]) -> None:
    model = build().train()
    model[3].eval()
    optimizer = Adam(model.parameters())
    redo = pliant.ReDo(model, digits[0][:2]).attach(optimizer)
    cross_entropy(model(digits[0]), digits[1]).backward()
    optimizer.step()
    before = snapshot(model), copy.deepcopy(optimizer.state_dict()), copy.deepcopy(redo.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trial(model, digits, optimizer=optimizer, steps=20, progress=False)
    assert_same(snapshot(model), before[0])
    assert_same(gradients, {name: p.grad for name, p in model.named_parameters()})
    assert [module.training for module in model.modules()] == modes
    assert str(optimizer.state_dict()) == str(before[1])
    assert str(redo.state_dict()) == str(before[2])
    assert torch.get_rng_state().equal(draws[0])
    assert random.getstate() == draws[1]
    assert np.random.get_state()[1].tolist() == draws[2]


def test_pair_data_set_and_loader_are_the_same_data(digits: tuple[Tensor, Tensor]) -> None:
    some = TensorDataset(digits[0][:200], digits[1][:200])
    held_out = digits[0][200:300], digits[1][200:300]
    forms = [(some.tensors[0], some.tensors[1]), DataLoader(some, batch_size=32)]
    found = [trial(build(), form, test=held_out, fresh=build, max_seeds=3, **QUICK) for form in forms]
    assert [pair.fresh for pair in found[0].pairs] == [pair.fresh for pair in found[1].pairs]
    assert (
        trial(build(), some, test=held_out, fresh=build, max_seeds=3, **QUICK).pairs[0].fresh[0]
        == found[0].pairs[0].fresh[0]
    )


def test_equal_seeds_give_equal_trials(digits: tuple[Tensor, Tensor]) -> None:
    model = build()
    first, second, other = (trial(model, digits, seed=seed, max_seeds=3, **QUICK) for seed in (0, 0, 1))
    assert first.pairs == second.pairs != other.pairs


def test_fresh_twins_are_redrawn_without_a_builder(digits: tuple[Tensor, Tensor]) -> None:
    found = trial(dead(), digits, **QUICK)
    assert found.verdict == "lost"
    assert max(found.pairs[0].fresh) > 0.7


def test_regression_is_judged_by_its_loss() -> None:
    inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken[0].bias.fill_(-1e6)
    targets = inputs.sum(1, keepdim=True)
    found = trial(broken, (inputs, targets), mse_loss, **QUICK)
    assert (found.value, found.verdict) == ("loss", "lost")
    assert trial(model, (inputs, targets), mse_loss, **QUICK).verdict != "lost"


@pytest.mark.parametrize("width", [1, 3])
def test_real_targets_need_a_loss_of_their_own(width: int) -> None:
    """Cross-entropy takes them for probabilities; over a single class it is zero whatever the network computes."""
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, width))
    with pytest.raises(ValueError, match=r"are real numbers.*pass loss_fn=torch\.nn\.functional\.mse_loss"):
        trial(model, (inputs, inputs[:, :width]), **QUICK)


def test_probabilities_of_classes_are_targets_too() -> None:
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert trial(model, (inputs, inputs[:, :3].softmax(1)), **QUICK).value == "loss"


def test_networks_that_diverge_are_lost_and_not_an_error(digits: tuple[Tensor, Tensor]) -> None:
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e30)
    found = trial(model, digits, fresh=build, **QUICK)
    assert found.verdict == "lost"
    assert all(np.isfinite(found.pairs[0].aged))


def test_random_labels_are_reported_apart(digits: tuple[Tensor, Tensor]) -> None:
    found = trial(build(), digits, fresh=build, steps=60, progress=False)
    assert set(found.stress) == {"aged", "fresh"}
    assert "not part of the verdict" in str(found)
    for inputs in (digits[0][:200], DataLoader(digits[0][:200], batch_size=50)):
        memorizing = trial(build(), inputs, labels="random", max_seeds=3, **QUICK)
        assert memorizing.pairs[0].fresh[-1] > memorizing.pairs[0].fresh[0]
    with pytest.raises(ValueError, match="labels: 'random' needs a model that returns scores of classes"):
        trial(nn.Linear(64, 1), digits[0], labels="random", **QUICK)


def test_the_settings_of_an_optimizer_are_used_and_its_state_is_not(digits: tuple[Tensor, Tensor]) -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    same = [
        trial(model, digits, optimizer=given, **QUICK).pairs
        for given in (optimizer, lambda parameters: SGD(parameters, lr=0.05, momentum=0.9))
    ]
    assert same[0] == same[1]


def test_no_further_pair_begins_after_the_budget(digits: tuple[Tensor, Tensor]) -> None:
    found = trial(build(), digits, fresh=build, seeds=2, budget=1e-6, **QUICK)
    assert len(found.pairs) == 2


def test_a_budget_shortens_default_steps_only(digits: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"budget: 1e-06 seconds are too few; 3 pairs of 50 steps take about"):
        trial(build(), digits, fresh=build, budget=1e-6, progress=False)
    unhurried = trial(build(), digits, fresh=build, budget=1e6, seeds=2, max_seeds=2, stress=False, progress=False)
    assert unhurried.steps[-1] == 400
    assert unhurried.shortened_from is None


def test_data_that_fresh_networks_do_not_learn_decides_nothing(digits: tuple[Tensor, Tensor]) -> None:
    noise = torch.randn(400, 64, generator=torch.Generator().manual_seed(0))
    found = trial(dead(), (noise, digits[1][:400]), fresh=build, **QUICK)
    assert (found.verdict, found.learned) == ("undecided", False)
    assert "fresh networks do not learn this data" in str(found)


def test_few_equal_accuracies_do_not_make_an_interval_narrow() -> None:
    equal = [Pair(i, (0.1, 0.88, 0.88), (0.1, 0.9, 0.9), 0.9, 0.9) for i in range(3)]
    assert decide(equal, 3, resolution=1 / 50) == "undecided"
    assert decide(equal, 3, resolution=1 / 5000) == "lost"


def test_an_unlucky_draw_is_not_called_lost() -> None:
    """Twelve fresh networks differ by as much as this one lies behind them, however certain its mean is."""
    gaps = [0.06, 0.0, 0.05, 0.02, 0.04, 0.03] * 2
    unlucky = [Pair(i, (0.0, 0.9 - gap), (0.0, 0.9), 0.9, 0.9) for i, gap in enumerate(gaps)]
    assert measure_gap(unlucky, "best", 3, 0.0).low > NOTICEABLE
    assert decide(unlucky, 3, resolution=0.0) == "undecided"
    worn = [Pair(i, (0.0, 0.85 - gap), (0.0, 0.9), 0.9, 0.9) for i, gap in enumerate(gaps)]
    assert decide(worn, 3, resolution=0.0) == "lost"


def test_each_pair_holds_out_its_own_part(digits: tuple[Tensor, Tensor]) -> None:
    model = learned(digits)
    found = trial(model, digits, fresh=build, **QUICK)
    assert len({pair.aged[0] for pair in found.pairs}) > 1, "the same network on other held-out examples"
    given = trial(model, digits, fresh=build, test=digits, **QUICK)
    assert len({pair.aged[0] for pair in given.pairs}) == 1


def test_results_can_be_written_and_shown(digits: tuple[Tensor, Tensor]) -> None:
    found = trial(build(), digits, fresh=build, **QUICK)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"] == found.verdict
    assert found.interval[0] < found.gap < found.interval[1]
    for part in ("held-out accuracy at its best", "training accuracy at the end", "in area", "cost: "):
        assert part in str(found)
    assert found._repr_html_().startswith(f"<p><b>{found.verdict}: ")


def test_gaps_of_known_curves() -> None:
    pair = Pair(0, aged=(0.0, 0.2, 0.4), fresh=(0.0, 0.8, 0.8), aged_training=0.4, fresh_training=0.8)
    assert pair.gain == pytest.approx(0.8)
    assert pair.best_gap == pair.final_gap == pytest.approx(0.5)
    assert pair.area_gap == pytest.approx((0.6 - 0.2) / 0.8)
    assert pair.relative_steps == float("inf")


def test_the_bar_goes_to_stderr(digits: tuple[Tensor, Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    trial(build(), digits, fresh=build, **{**QUICK, "progress": True})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "of at most 12 pairs" in shown.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": 3}, "data: its batches are not pairs"),
        ({"data": torch.zeros(3)}, "data: its batches are not pairs"),
        ({"data": (torch.zeros(3, 64), torch.zeros(2))}, r"data: inputs and targets have \[2, 3\] examples"),
        ({"data": (torch.zeros(1, 64), torch.zeros(1).long())}, "data: a single example cannot be split"),
        ({"seeds": 1}, "seeds: 1 is not allowed; an interval needs 2 pairs"),
        ({"steps": -1}, "steps: -1"),
        ({"labels": "none"}, "labels"),
        ({"budget": 0}, "budget"),
        ({"fresh": build()}, "fresh: a Sequential is not allowed; it must be a function that returns a new network"),
        ({"optimizer": "adam"}, "optimizer: 'adam' is not allowed; it must be an optimizer, or a function"),
    ],
)
def test_bad_arguments_are_named(digits: tuple[Tensor, Tensor], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trial(build(), **{"data": digits, **QUICK, **change})


def test_no_network_is_named() -> None:
    for ask in (pliant.trial, pliant.diagnose, measure):
        with pytest.raises(ValueError, match=r"model: None is not allowed; it must be a torch.nn.Module"):
            ask(None, (torch.zeros(4, 64), torch.zeros(4).long()))


def test_the_public_names() -> None:
    assert pliant.trial is trial
    assert pliant.Trial is Trial
    assert str(Gap(0.1, 0.05, 0.15)) == "+10.0% [+5.0%, +15.0%]"


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))


def test_an_injection_tells_a_dead_head_from_dead_features(digits: tuple[Tensor, Tensor]) -> None:
    found = {}
    for place in (0, 2):
        model = three_layers()
        with torch.no_grad():
            model[place].bias.fill_(-1e6)
        found[place] = trial(model, digits, inject=True, **QUICK)
        assert found[place].verdict == "lost"
    restored = {place: result.restored for place, result in found.items()}
    assert restored[2] is not None
    assert restored[2] > 0.9  # the head of two layers was dead, and its features were fine
    assert restored[0] is not None
    assert restored[0] < 0.1  # no head can learn from features that are all zero
    assert f"injecting fresh plasticity into the head restores {restored[2]:.0%} of the gap" in str(found[2])
    assert trial(three_layers(), digits, inject=True, **QUICK).restored is None
    with pytest.raises(ValueError, match="head: 'body' is not a module of the model"):
        trial(three_layers(), digits, inject="body", **QUICK)


def test_tokens_are_compared_by_their_next_token_loss() -> None:
    texts = pliant.data.load("python_docs", characters=3000, window=16)
    model = pliant.models.create("gpt", texts.shape, len(texts.classes), depth=1, width=16, heads=2, seed=0)
    windows = texts.train.batch(torch.arange(80))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # nothing but biases of norm layers gets a gradient
    found = trial(model, windows, seeds=2, max_seeds=2, batch_size=16, **QUICK)
    assert (found.value, found.verdict) == ("loss", "lost")
    assert max(found.pairs[0].fresh) > -3.2 > max(found.pairs[0].aged) - 0.2


class Pictures(Dataset[tuple[Tensor, int]]):
    """A data set whose examples are drawn anew, as augmentation does."""

    def __init__(self, digits: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = digits

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + 0.01 * torch.rand(64) + random.random() + np.random.rand(), int(self.y[index])


@pytest.mark.parametrize("form", ["data set", "shuffled", "own generator", "one by one"])
def test_reading_data_leaves_all_generators_as_they_were(digits: tuple[Tensor, Tensor], form: str) -> None:
    own = torch.Generator().manual_seed(7)
    pictures = Pictures(digits)
    data: Any = {
        "data set": pictures,
        "shuffled": DataLoader(pictures, batch_size=30, shuffle=True),
        "own generator": DataLoader(pictures, batch_size=30, shuffle=True, generator=own),
        "one by one": OneByOne(pictures),
    }[form]

    def draws() -> list[Any]:
        states = torch.get_rng_state().tolist(), own.get_state().tolist()
        return [*states, random.getstate(), np.random.get_state()[1].tolist()]

    model, before = build(), draws()
    first = trial(model, data, fresh=build, max_seeds=3, **(QUICK | {"steps": 4})).pairs
    assert draws() == before
    torch.rand(3)
    random.random()
    again = trial(model, data, fresh=build, max_seeds=3, **(QUICK | {"steps": 4})).pairs
    assert [pair.fresh for pair in again] == [pair.fresh for pair in first]


class OneByOne(IterableDataset[tuple[Tensor, int]]):
    """A data set without length, in random order."""

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (self.pictures[i] for i in torch.randperm(120).tolist())


def test_dictionaries_hold_arguments_and_targets(digits: tuple[Tensor, Tensor]) -> None:
    x, y = digits[0][:200], digits[1][:200]
    batches = [{"input": x[i : i + 50], "labels": y[i : i + 50]} for i in range(0, 200, 50)]
    settings: dict[str, Any] = {"fresh": build, "max_seeds": 3, **QUICK}
    assert trial(build(), batches, **settings).pairs[0].fresh == trial(build(), (x, y), **settings).pairs[0].fresh
    inputs = [{"input": batch["input"]} for batch in batches]
    unlabeled = [DataLoader(TensorDataset(x), batch_size=50), inputs, x]
    curves = [trial(build(), each, labels="random", **settings).pairs[0].fresh for each in unlabeled]
    assert curves[0] == curves[1] == curves[2]


def test_random_labels_say_so(digits: tuple[Tensor, Tensor]) -> None:
    found = trial(dead(), digits[0][:200], labels="random", fresh=build, **(QUICK | {"steps": 200}))
    assert found.verdict == "lost"
    assert found.answer == "this network learns random labels worse than a fresh one"
    assert "may fail this test" in str(found)
    assert "held-out" not in str(found)
    assert "may fail" not in str(trial(dead(), digits, fresh=build, **QUICK))


def test_gaps_are_not_shown_if_a_fresh_network_gains_nothing() -> None:
    good, none = Pair(0, (0.1, 0.5), (0.1, 0.6), 1.0, 1.0), Pair(1, (0.3, 0.3), (0.3, 0.3), 1.0, 1.0)
    assert have_learned([good, good, good], 1)
    assert not have_learned([good, good, none], 1)
    assert decide([good, good, none], 1, 0.0) == "undecided"


def test_inputs_get_the_precision_of_the_network(digits: tuple[Tensor, Tensor]) -> None:
    double = trial(build().double(), digits, max_seeds=3, **QUICK)
    assert double.learned


def test_a_frozen_network_cannot_be_tried(digits: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        trial(build().requires_grad_(False), digits, **QUICK)
    with pytest.raises(ValueError, match="there is no batch"):
        trial(build(), [], **QUICK)
    with pytest.raises(ValueError, match="pass labels='random'"):
        trial(build(), digits[0], **QUICK)


@pytest.mark.parametrize(("low", "word"), [(0.005, "nearly as well as"), (-0.005, "data as well as")])
def test_a_small_gap_that_is_sure_is_not_hidden(low: float, word: str) -> None:
    gap = Gap(0.01, low, 0.015)
    assert word in Trial("plastic", 0.0, (0.0, 0.0), gap, gap, 1.0, True, "accuracy", (0, 1), ()).answer
