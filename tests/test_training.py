"""The training loop: equal to a loop written by hand, and bit-equal when resumed at any epoch."""

import io
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pliant import methods, models, streams
from pliant._seeding import permutation, seed_everything
from pliant.data.dataset import Dataset, from_tensors
from pliant.streams.stream import Stream
from pliant.training import (
    DivergedError,
    Learner,
    OptimizerName,
    Reference,
    Settings,
    evaluate,
    learning_rate,
    make_optimizer,
    summarize,
    train,
)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(130) % 4
    x = torch.randint(256, (130, 1, 6, 6), generator=draw, dtype=torch.uint8) // 2
    x[torch.arange(130), 0, y] += 100
    return from_tensors("made", (x[:97], y[:97]), (x[97:], y[97:]))


class Noisy(nn.Sequential):
    """A network that draws from every global generator as it runs."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(36, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x * (1 + 0.01 * random.random() + 0.01 * float(numpy.random.rand()))
        return super().forward(x)


def make_learner(settings: Settings, method_names: tuple[str, ...] = (), renews_head: bool = False) -> Learner:
    seed_everything(3)
    model = Noisy()
    example = torch.zeros(2, 1, 6, 6)
    attached = [methods.create(name, model, example=example, seed=5) for name in method_names]
    head = methods.HeadReset(model, head=["5"], seed=7) if renews_head else None
    return Learner(model, settings, attached, head)


def reload(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


CASES: list[tuple[str, dict[str, Any], Settings, tuple[str, ...]]] = [
    ("warm_start", {"first_epochs": 2, "epochs": 2}, Settings(batch_size=16), ("swr", "l2")),
    (
        "continual_full",
        {"chunks": 3, "epochs": 2},
        Settings(batch_size=16, warmup=0.3, clip=0.5, new_optimizer=True),
        ("shrink_perturb", "l2_init"),
    ),
    (
        "label_flip",
        {"tasks": 3, "epochs": 2},
        Settings(optimizer="sgd", lr=0.1, momentum=0.9, decay_epochs=(1,), batch_size=16),
        ("head_reset",),
    ),
    ("binary_pairs", {"tasks": 3, "epochs": 2}, Settings(optimizer="adamw", weight_decay=0.1, batch_size=16), ()),
    ("random_labels", {"tasks": 3, "epochs": 1}, Settings(batch_size=16), ("full_reset",)),
]


@pytest.mark.parametrize(("name", "options", "settings", "method_names"), CASES, ids=[case[0] for case in CASES])
def test_a_resumed_run_is_bit_equal_from_every_epoch(
    dataset: Dataset, name: str, options: dict[str, Any], settings: Settings, method_names: tuple[str, ...]
) -> None:
    stream = streams.create(name, dataset, 1, **options)
    learner = make_learner(settings, method_names, stream.renews_head)
    records, states = [], []
    for record in train(learner, stream, 1):
        records.append(record)
        states.append(reload(learner.state_dict()))
    final = reload(learner.state_dict())
    for done, state in enumerate(states, start=1):
        resumed = make_learner(settings, method_names, stream.renews_head)
        random.random(), numpy.random.rand(), torch.rand(3)  # The resuming process is in another random state.
        resumed.load_state_dict(state)
        assert list(train(resumed, stream, 1)) == records[done:]
        assert_equal(reload(resumed.state_dict()), final)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


def test_the_loop_equals_a_plain_pytorch_loop(dataset: Dataset) -> None:
    stream = streams.create("warm_start", dataset, 2, first_epochs=2, epochs=1)
    model, twin = (models.create("mlp", dataset.shape, 4, seed=1) for _ in range(2))
    records = list(train(Learner(model, Settings(batch_size=32)), stream, 9))

    optimizer = torch.optim.Adam(twin.parameters(), 1e-3, fused=True)
    losses = []
    for task in stream:
        x, y = task.train.batch(torch.arange(len(task.train)))
        for epoch in range(task.epochs):
            order = permutation(len(y), "order", 9, task.index, epoch)
            total, hits = 0.0, 0
            for start in range(0, len(y), 32):
                index = order[start : start + 32]
                if len(index) == 1:
                    continue
                optimizer.zero_grad()
                logits = twin(x[index])
                loss = cross_entropy(logits, y[index])
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(index)
                hits += int((logits.argmax(1) == y[index]).sum())
            seen = len(y) - (len(y) % 32 == 1)
            losses.append((total / seen, hits / seen))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)
    for record, (loss, accuracy) in zip(records, losses, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-6)
        assert record["online_accuracy"] == accuracy


def test_a_last_batch_of_one_example_is_dropped(dataset: Dataset) -> None:
    stream = streams.create("single", dataset, epochs=1)
    assert len(dataset.train) % 32 == 1
    learner = make_learner(Settings(batch_size=32))
    list(train(learner, stream, 0))
    assert learner.step == 3
    one_by_one = Learner(nn.Sequential(nn.Flatten(), nn.Linear(36, 10)), Settings(batch_size=1))
    list(train(one_by_one, stream, 0))
    assert one_by_one.step == len(dataset.train)


def test_learning_rate_warms_up_and_decays() -> None:
    warm = Settings(lr=1.0, warmup=0.25)
    rates = [learning_rate(warm, 4, epoch, place, 2) for epoch in range(4) for place in range(2)]
    assert rates == [0.5, 1, 1, 1, 1, 1, 1, 1]
    decaying = Settings(lr=1e-3, decay_epochs=(100, 150))
    assert [learning_rate(decaying, 200, epoch, 0, 5) for epoch in (0, 99, 100, 149, 150)] == pytest.approx(
        [1e-3, 1e-3, 1e-4, 1e-4, 1e-5]
    )
    linear = Settings(lr=1.0, warmup=0.5, decay="linear", decay_to=0.2)
    assert [learning_rate(linear, 4, epoch, 0, 1) for epoch in range(4)] == pytest.approx([0.5, 1, 0.6, 0.2])
    cosine = Settings(lr=1.0, decay="cosine", decay_to=0.0)
    assert [learning_rate(cosine, 1, 0, place, 4) for place in range(4)] == pytest.approx(
        [(1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0], abs=1e-15
    )
    halving = Settings(lr=1.0, decay_epochs=(1, 2), decay_factor=0.5)
    assert [learning_rate(halving, 3, epoch, 0, 1) for epoch in range(3)] == [1, 0.5, 0.25]


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_the_optimizer_follows_the_settings(name: str) -> None:
    rates = {"lr": 0.25, "weight_decay": 0.125} | ({"momentum": 0.75} if name == "sgd" else {"betas": (0.5, 0.25)})
    optimizer = make_optimizer(nn.Linear(2, 2), Settings(optimizer=name, **rates))
    assert type(optimizer).__name__.lower() == name
    assert optimizer.defaults.items() >= rates.items()


def test_warmup_and_decay_restart_at_every_task(dataset: Dataset) -> None:
    stream = streams.create("label_flip", dataset, tasks=2, epochs=2)
    settings = Settings(batch_size=97, warmup=0.75, decay_epochs=(1,))
    records = list(train(Learner(models.create("mlp", dataset.shape, 4), settings), stream, 0))
    assert [record["lr"] for record in records] == pytest.approx([1e-3 / 1.5, 1e-4] * 2)


def test_parts_of_a_batch_give_the_gradient_of_the_whole() -> None:
    x, y = torch.randn(97, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(97) % 4
    stream = streams.create("label_flip", from_tensors("made", (x, y), (x, y)), tasks=2, epochs=1)

    def run(accumulate: int) -> tuple[list[dict[str, Any]], nn.Module]:
        model = models.create("mlp", (6,), 4, seed=0).double()
        return list(
            train(Learner(model, Settings("sgd", lr=0.1, batch_size=32, accumulate=accumulate)), stream, 0)
        ), model

    (whole, one), (parts, other) = run(1), run(5)
    assert [record["loss"] for record in parts] == pytest.approx([record["loss"] for record in whole], rel=1e-6)
    assert [record["online_accuracy"] for record in parts] == [record["online_accuracy"] for record in whole]
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_bfloat16_computes_under_autocast_and_keeps_float32_weights(dataset: Dataset) -> None:
    seen = set()
    model = models.create("mlp", dataset.shape, 4, seed=0)
    model[-1].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    stream = streams.create("single", dataset, epochs=1)
    (record,) = train(Learner(model, Settings(batch_size=32, precision="bfloat16")), stream, 0)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    (exact,) = train(Learner(models.create("mlp", dataset.shape, 4, seed=0), Settings(batch_size=32)), stream, 0)
    assert record["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert record["loss"] != exact["loss"]


def test_clipping_bounds_the_gradient_norm(dataset: Dataset) -> None:
    model = models.create("mlp", dataset.shape, 4)
    learner = Learner(model, Settings(batch_size=32, clip=0.01))
    norms: list[float] = []
    learner.optimizer.register_step_pre_hook(
        lambda *_: norms.append(
            math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
        )
    )
    list(train(learner, streams.create("single", dataset, epochs=1), 0))
    assert norms == pytest.approx([0.01] * 3, rel=1e-4)


def test_a_nan_loss_raises(dataset: Dataset) -> None:
    model = models.create("mlp", dataset.shape, 4)
    stream = streams.create("single", dataset, epochs=5)
    with pytest.raises(DivergedError, match="the training loss is nan in epoch 1 of task 0"):
        list(train(Learner(model, Settings(optimizer="sgd", lr=1e30, batch_size=16)), stream, 0))


def test_divergence_in_the_last_step_raises(dataset: Dataset) -> None:
    model = models.create("mlp", dataset.shape, 4)
    settings = Settings(optimizer="sgd", lr=1e38, batch_size=97)  # A single step; its own loss is finite.
    with pytest.raises(DivergedError, match="the test loss is nan after epoch 1 of task 0"):
        list(train(Learner(model, settings), streams.create("single", dataset, epochs=1), 0))


def test_divergence_at_a_task_boundary_raises(dataset: Dataset) -> None:
    model = models.create("mlp", dataset.shape, 4)
    stream = streams.create("warm_start", dataset, first_epochs=1, epochs=1)
    method = methods.create("shrink_perturb", model, example=torch.zeros(2, 1, 6, 6), lam=0.5)
    records = train(Learner(model, Settings(), [method]), stream, 0)
    next(records)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(DivergedError, match="the test loss is nan after epoch 0 of task 1"):
        next(records)


def test_evaluation_covers_every_example_and_restores_the_mode(dataset: Dataset) -> None:
    model = Noisy()
    x, y = dataset.test.batch(torch.arange(33))
    frozen = next(module for module in model.modules() if module is not model)
    frozen.eval()
    accuracy, loss = evaluate(model, dataset.test, batch_size=10)
    assert model.training
    assert not frozen.training
    model.eval()
    assert accuracy == int((model(x).argmax(1) == y).sum()) / 33
    assert loss == pytest.approx(float(cross_entropy(model(x), y).detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("side", "batch_size", "largest"), [(64, 8, 1000), (224, 8, 111), (224, 128, 128), (8, 2000, 1000)]
)
def test_evaluation_batches_shrink_with_input_size(side: int, batch_size: int, largest: int) -> None:
    count = 1100 if side < 224 else 140
    x, y = torch.zeros(count, 3, side, side, dtype=torch.uint8), torch.arange(count) % 2
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    sizes = []
    model.register_forward_pre_hook(lambda module, inputs: None if module.training else sizes.append(len(inputs[0])))
    stream = streams.create("single", from_tensors("own", (x, y), (x, y)), epochs=1)
    list(train(Learner(model, Settings(batch_size=batch_size)), stream, 0))
    assert sizes == 2 * [largest, count - largest]


def test_records_of_a_task_and_its_end(dataset: Dataset) -> None:
    stream = streams.create("continual_limited", dataset, chunks=3, epochs=4)
    settings = Settings(batch_size=32, evaluate_every=3)
    records = list(train(Learner(models.create("mlp", dataset.shape, 4), settings), stream, 0))
    assert [(record["task"], record["epoch"]) for record in records] == [(t, e + 1) for t in range(3) for e in range(4)]
    assert [record["epoch"] for record in records if "test_accuracy" in record] == [3, 4] * 3
    assert [record["epoch"] for record in records if "train_accuracy" in record] == [4] * 3
    assert [record["progress"] for record in records][-1] == 1.0
    assert all(a["progress"] < b["progress"] for a, b in pairwise(records))
    for task in range(3):
        mine = [record for record in records if record["task"] == task]
        expected = sum(record["online_accuracy"] for record in mine) / 4
        assert mine[-1]["task_online_accuracy"] == pytest.approx(expected)


def test_summarize_uses_the_ends_of_tasks() -> None:
    end = {"task_online_accuracy": 0.5, "train_accuracy": 1.0}
    records = [
        {"test_accuracy": 0.9},
        end | {"test_accuracy": 0.2},
        {"test_accuracy": 0.8},
        end | {"test_accuracy": 0.6, "task_online_accuracy": 0.7},
    ]
    result = summarize(records)
    assert (result["final_test_accuracy"], result["mean_test_accuracy"]) == (0.6, 0.4)
    assert result["mean_task_online_accuracy"] == 0.6
    assert "mean_test_accuracy" not in summarize([end])


def test_methods_act_at_boundaries_only_if_announced(dataset: Dataset) -> None:
    stream = streams.create("label_flip", dataset, tasks=3, epochs=1)
    told = list(train(make_learner(Settings(batch_size=32), ("shrink_perturb",)), stream, 0))
    assert [[receipt["method"] for receipt in record["receipts"]] for record in told] == [
        [],
        ["shrink_perturb"],
        ["shrink_perturb"],
    ]
    untold = list(train(make_learner(Settings(batch_size=32, announce=False), ("shrink_perturb",)), stream, 0))
    plain = list(train(make_learner(Settings(batch_size=32)), stream, 0))
    assert untold == plain


def test_entry_accuracy_is_measured_before_training_on_the_new_task(dataset: Dataset) -> None:
    stream = streams.create("warm_start", dataset, first_epochs=20, epochs=20)
    last_of_first, entry = {}, {}
    for name in ("vanilla", "full_reset"):
        learner = make_learner(Settings(batch_size=32), () if name == "vanilla" else (name,))
        records = list(train(learner, stream, 0))
        assert [record["epoch"] for record in records if "entry_test_accuracy" in record] == [1]
        last_of_first[name], entry[name] = records[19]["test_accuracy"], records[20]["entry_test_accuracy"]
    assert entry["vanilla"] == last_of_first["vanilla"]
    assert entry["full_reset"] < last_of_first["full_reset"] - 0.2


def test_a_new_optimizer_has_no_state_and_keeps_the_methods(dataset: Dataset) -> None:
    stream = streams.create("label_flip", dataset, tasks=2, epochs=1)
    learner = make_learner(Settings(batch_size=32, new_optimizer=True), ("l2",))
    optimizers = []
    for _ in train(learner, stream, 0):
        optimizers.append(learner.optimizer)
        assert learner.methods[0].optimizers == (learner.optimizer,)
        state = learner.optimizer.state_dict()["state"]
        assert {int(entry["step"]) for entry in state.values()} == {3}
    assert optimizers[0] is not optimizers[1]


def test_fresh_networks_train_as_if_each_task_were_alone(dataset: Dataset) -> None:
    stream = streams.create("label_flip", dataset, 4, tasks=3, epochs=2)

    def fresh(task: int) -> nn.Module:
        return models.create("mlp", dataset.shape, 4, seed=100 + task)

    together = list(train(Learner(fresh(0), Settings(batch_size=32)), stream, 6, fresh=fresh))

    class OneTask(Stream):
        paper = ""

        def __len__(self) -> int:
            return 3

        def _task(self, index: int) -> streams.Task:
            return stream[index]

    for task in range(3):
        learner = Learner(fresh(task), Settings(batch_size=32))
        learner.task = task
        alone = next(iter_task(train(learner, OneTask(dataset, 4), 6), task))
        end = next(record for record in together if record["task"] == task and record["epoch"] == 2)
        assert alone["test_loss"] == end["test_loss"]
        assert alone["train_loss"] == end["train_loss"]


def iter_task(records: Iterator[dict[str, Any]], task: int) -> Iterator[dict[str, Any]]:
    return (record for record in records if record["task"] == task and record["epoch"] == 2)


def test_a_head_reset_changes_only_the_output_layer(dataset: Dataset) -> None:
    stream = streams.create("binary_pairs", dataset, tasks=2, epochs=1)
    learner = make_learner(Settings(lr=1e-30, batch_size=32), renews_head=True)
    states = [reload(learner.model.state_dict()) for _ in train(learner, stream, 0)]
    changed = {
        name for name, _ in learner.model.named_parameters() if (states[0][name] - states[1][name]).abs().max() > 1e-20
    }
    assert changed == {"5.weight", "5.bias"}
    with pytest.raises(ValueError, match="task 1 comes with a new output layer"):
        list(train(make_learner(Settings(batch_size=32)), stream, 0))


MEASURES = ("weight_l2", "distance_l2", "update_l2", "gradient_l2", "feature_rank", "error")


def test_measures_are_taken_at_the_first_step_and_do_not_change_training(dataset: Dataset) -> None:
    stream = streams.create("label_flip", dataset, tasks=2, epochs=4)
    settings = Settings(batch_size=32, evaluate_every=2)
    plain = list(train(make_learner(settings, ("l2",)), stream, 1))
    learner = make_learner(settings, ("l2",))
    learner.measure(MEASURES, stream[0])
    start = float(torch.cat([p.detach().flatten() for p in learner.model.parameters()]).norm())
    records = list(train(learner, stream, 1))
    assert [record["epoch"] for record in records if "measures" in record] == [1, 3] * 2
    measured = [record.pop("measures") for record in records if "measures" in record]
    assert records == plain
    assert measured[0]["weight_l2"] == pytest.approx(start, rel=1e-6)
    assert measured[0]["distance_l2"] == 0
    assert all(values["distance_l2"] > 0 for values in measured[1:])
    assert {name for values in measured for name in values} >= set(MEASURES)


@pytest.mark.parametrize("reference", get_args(Reference))
def test_measures_compare_with_the_chosen_reference(dataset: Dataset, reference: Reference) -> None:
    stream = streams.create("continual_limited", dataset, chunks=3, epochs=2)
    learner = make_learner(Settings(batch_size=16), ("shrink_perturb",))
    learner.measure(("distance_l2",), stream[0], reference)

    def weights() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])

    before_steps: list[torch.Tensor] = []
    learner.optimizer.register_step_pre_hook(lambda *_: before_steps.append(weights()))
    starts, ends, measured = [], [], []
    for record in train(learner, stream, 1):
        if record["epoch"] == 1:
            measured.append(record["measures"]["distance_l2"])
            starts.append(before_steps[0])
        else:
            ends.append(weights())
            before_steps.clear()
    compared = {
        "initial": [starts[0]] * 3,
        "boundary": [starts[0], *ends[:2]],
        "previous_task": [starts[0], *starts[:2]],
    }
    expected = [(start - other).norm().item() for start, other in zip(starts, compared[reference], strict=True)]
    assert measured == pytest.approx(expected, rel=1e-5)
    assert all(value > 0 for value in measured[1:])


@pytest.mark.parametrize("reference", get_args(Reference))
def test_measures_of_a_resumed_run_are_equal(dataset: Dataset, reference: Reference) -> None:
    stream = streams.create("continual_limited", dataset, chunks=3, epochs=3)
    settings = Settings(batch_size=16, new_optimizer=True)

    def fresh_learner() -> Learner:
        learner = make_learner(settings, ("shrink_perturb",))
        learner.measure(MEASURES, stream[0], reference)
        return learner

    learner = fresh_learner()
    records, states = [], []
    for record in train(learner, stream, 1):
        records.append(record)
        states.append(reload(learner.state_dict()))
    for done, state in enumerate(states, start=1):
        resumed = fresh_learner()
        resumed.load_state_dict(state)
        assert list(train(resumed, stream, 1)) == records[done:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0}, "lr: 0 is not allowed; it must be a number that is finite and > 0"),
        ({"batch_size": 0}, "batch_size: 0 is not allowed; it must be an integer ≥ 1"),
        ({"weight_decay": -1}, "weight_decay: -1 is not allowed; it must be a number that is finite and ≥ 0"),
        ({"warmup": 1.0}, r"warmup: 1\.0 is not allowed; it must be a number that is in \[0, 1\)"),
        ({"clip": 0.0}, r"clip: 0\.0 is not allowed; it must be a number that is finite and > 0, or None"),
        ({"lr": math.nan}, "lr: nan is not allowed"),
        ({"lr": True}, "lr: True is not allowed"),
        ({"evaluate_every": 1.5}, r"evaluate_every: 1\.5 is not allowed; it must be an integer ≥ 1"),
        ({"decay_epochs": (5, -3)}, "decay_epochs: -3 is not allowed; it must be an integer ≥ 1"),
        ({"optimizer": "adm"}, "optimizer: 'adm' is not allowed; it must be one of 'adam', 'adamw', 'sgd'"),
        ({"betas": (0.9,)}, r"betas is \(0\.9,\); it must hold 2 numbers"),
        ({"decay": "slow"}, "decay"),
        ({"precision": "float16"}, "precision"),
        ({"layout": "nhwc"}, "layout: 'nhwc' is not allowed; it must be one of 'default', 'channels_last'"),
        ({"momentum": 0.9}, r"momentum is 0\.9; it needs optimizer sgd, not adam"),
    ],
)
def test_invalid_settings_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)


def test_each_fresh_network_is_its_own_initial_reference(dataset: Dataset) -> None:
    stream = streams.create("label_flip", dataset, 4, tasks=3, epochs=2)

    def fresh(task: int) -> nn.Module:
        return models.create("mlp", dataset.shape, 4, seed=100 + task)

    def begin() -> Learner:
        learner = Learner(fresh(0), Settings(batch_size=32))
        learner.measure(["distance_l2"], stream[0])
        return learner

    learner = begin()
    records, states = [], []
    for record in train(learner, stream, 6, fresh=fresh):
        records.append(record)
        states.append(reload(learner.state_dict()))
    distances = [record["measures"]["distance_l2"] for record in records]
    assert [distance == 0 for distance in distances] == [True, False] * 3
    for done, state in enumerate(states, start=1):
        resumed = begin()
        resumed.load_state_dict(state)
        assert list(train(resumed, stream, 6, fresh=fresh)) == records[done:]


def test_real_targets_are_trained_by_squared_error(dataset: Dataset) -> None:
    stream = streams.create("teacher_regression", dataset, seed=1, tasks=2, epochs=2)
    torch.manual_seed(0)
    learner = Learner(nn.Sequential(nn.Flatten(), nn.Linear(36, 1)), Settings(batch_size=97, lr=0.01))
    weight, bias = (p.detach().double().clone().requires_grad_() for p in learner.model.parameters())
    optimizer = torch.optim.Adam([weight, bias], lr=0.01)
    records = list(train(learner, stream, 5))
    losses = []
    for task in stream:
        x, y = (part.double() for part in task.train.batch(torch.arange(97)))
        for _ in range(2):
            loss = ((x.flatten(1) @ weight.T + bias - y) ** 2).mean()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert not any("accuracy" in name for record in records for name in record)
    with torch.no_grad():
        assert records[-1]["train_loss"] == pytest.approx(
            float(((x.flatten(1) @ weight.T + bias - y) ** 2).mean()), rel=1e-5
        )
    result = summarize(records)
    assert result["mean_task_online_loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert set(result) == {f"{a}_{b}_loss" for a in ("final", "mean") for b in ("test", "train", "task_online")}
