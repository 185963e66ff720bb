import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import pliant
from pliant.diagnostics import Monitor, Record, measure, measures
from pliant.diagnostics import monitor as monitoring
from tests import zoo

EVERYTHING = measures.names()


def data(name: str, size: int = 16) -> tuple[Tensor, Tensor]:
    return zoo.batch(name, size=size, dtype=torch.float32)


class Dropping(nn.Module):
    """A network with dropout and BatchNorm: random numbers and buffers that a measurement could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.net = zoo.build("cnn_bn", dtype=torch.float32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.drop(x))


def train(
    model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor], steps: int, seed: int | None = 0
) -> list[float]:
    if seed is not None:
        torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("budget", [None, 1e6])
def test_training_is_bit_equal_with_and_without_every_measure(budget: float | None) -> None:
    batch = data("cnn_bn")
    plain, watched = Dropping(), Dropping()
    plain_optimizer, optimizer = Adam(plain.parameters()), Adam(watched.parameters())
    monitor = Monitor(
        watched, optimizer, every=2, measures=EVERYTHING, probe=batch, loss_fn=cross_entropy,
        reference=Dropping(), budget=budget,
    )  # fmt: skip
    assert train(plain, plain_optimizer, batch, 7) == train(watched, optimizer, batch, 7)
    assert len(monitor.records) == 4
    assert all(v.equal(watched.state_dict()[k]) for k, v in plain.state_dict().items())
    for ours, theirs in zip(plain.parameters(), watched.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.equal(theirs.grad)
    assert set(monitor.skipped) == {"balancedness", "attention_entropy"}, (
        "a model with BatchNorm is not a chain, and it has no attention"
    )


class Renormed(nn.Sequential):
    """An embedding whose rows a forward pass shortens, by rows that only the probe looks up too."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(50, 6, max_norm=1.0), nn.Flatten(), nn.Dropout(0.5), nn.Linear(18, 4))


def test_a_loader_as_probe_and_weights_that_a_forward_pass_writes_leave_training_bit_equal() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 25, (8, 3), generator=draw), torch.randint(0, 4, (8,), generator=draw)
    loader = DataLoader(TensorDataset(x + 25, y), batch_size=4, shuffle=True)
    runs = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Renormed()
        optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        if watched:
            monitor = Monitor(
                model, optimizer, every=1, measures=["loss"], probe=loader, loss_fn=cross_entropy, budget=None
            )
        losses = train(model, optimizer, (x, y), 2, seed=None)
        if watched:
            monitor.set_probe(loader)
        runs.append((losses + train(model, optimizer, (x, y), 2, seed=None), model.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(value.equal(runs[1][1][name]) for name, value in runs[0][1].items())


def test_a_parallel_model_is_measured_without_its_wrapper(tmp_path: Path) -> None:
    """A forward pass of the wrapper would wait for processes that do not measure."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        batch = data("cnn_bn")
        model = nn.parallel.DistributedDataParallel(zoo.build("cnn_bn", dtype=torch.float32))
        optimizer = SGD(model.parameters(), lr=0.1)
        reference = torch.compile(copy.deepcopy(model.module))
        names = ["weight_growth", "hessian_rank", "sharpness"]
        monitor = Monitor(model, optimizer, every=1, measures=names, probe=batch, loss_fn=cross_entropy,
                          reference=reference, budget=None)  # fmt: skip
        train(model, optimizer, batch, 2)
    finally:
        torch.distributed.destroy_process_group()
    assert monitor.skipped == {}
    assert monitor.records[0].values["weight_growth"] == 1


def test_gradients_of_few_rows_are_measured_as_they_are() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    names = ["gradient_l1", "gradient_l2", "update_l2", "hessian_rank", "sharpness"]
    batch = torch.tensor([[0, 0], [1, 2], [0, 3]]), torch.tensor([0, 1, 2])
    monitor = Monitor(model, optimizer, measures=names, probe=batch, loss_fn=cross_entropy, budget=None)
    twin = copy.deepcopy(model)
    twin[0].sparse = False
    expected = measure(twin, batch, cross_entropy, measures=[name for name in names if name != "update_l2"])
    assert measure(model, batch, cross_entropy, measures=names[:2]).values["gradient_l2/0"] > 0
    train(model, optimizer, batch, 1)
    assert monitor.skipped == {}
    values = {key: value for key, value in monitor.records[0].values.items() if not key.startswith("update")}
    assert values == pytest.approx(expected.values)


def test_values_before_the_step_are_those_of_a_diagnosis_then() -> None:
    model = zoo.build("mlp")
    batch, reference = zoo.batch("mlp"), zoo.build("mlp", seed=5)
    then = measure(model, batch, cross_entropy, reference)
    optimizer = SGD(model.parameters(), lr=0.1)
    chosen = [name for name in measures.names() if measures.info(name).cost not in ("backward", "matrix")]
    monitor = Monitor(
        model, optimizer, measures=chosen, probe=batch, loss_fn=cross_entropy, reference=reference, budget=None
    )
    train(model, optimizer, batch, 1)
    (record,) = monitor.records
    of_step = {name for name in measures.names() if measures.info(name).of_step}
    mine, expected = (
        {key: value for key, value in values.items() if key.partition("/")[0] not in of_step}
        for values in (record.values, then.values)
    )
    assert mine.keys() < record.values.keys()
    assert mine == pytest.approx(expected, nan_ok=True)


def test_gradients_and_updates_are_those_of_the_step() -> None:
    model, (x, y) = zoo.build("mlp"), zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    names = ["gradient_l1", "gradient_l2", "update_l1", "update_l2"]
    monitor = Monitor(model, optimizer, every=1, measures=names, budget=None)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))]
    )
    train(model, optimizer, (x, y), 1)
    values = monitor.records[0].values
    assert values["gradient_l2"] == pytest.approx(float(gradient.norm()))
    assert values["gradient_l1"] == pytest.approx(float(gradient.abs().sum()))
    assert values["update_l2"] == pytest.approx(0.5 * float(gradient.norm()))
    assert values["update_l1"] == pytest.approx(0.5 * float(gradient.abs().sum()))
    assert values["update_l2/0"] < values["update_l2"]


def test_a_closure_has_the_gradient_that_it_computed() -> None:
    model, (x, y) = zoo.build("mlp"), zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    monitor = Monitor(model, optimizer, measures=["gradient_l2"], budget=None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    expected = measure(model, (x, y), cross_entropy, measures=["gradient_l2"]).values["gradient_l2"]
    optimizer.step(closure)
    assert monitor.records[0].values["gradient_l2"] == pytest.approx(expected)


def test_a_grad_scaler_does_not_change_what_is_measured() -> None:
    for fused in (False, True):
        model, (x, y) = zoo.build("mlp", dtype=torch.float32), data("mlp")
        optimizer = Adam(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        monitor = Monitor(model, optimizer, measures=["gradient_l2"], budget=None)
        expected = measure(model, (x, y), cross_entropy, measures=["gradient_l2"]).values["gradient_l2"]
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        assert monitor.records[0].values["gradient_l2"] == pytest.approx(expected, rel=1e-4), f"fused={fused}"


def test_update_includes_the_changes_of_methods_attached_before() -> None:
    model, batch = zoo.build("mlp"), zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.0)
    swr = pliant.SWR(model, batch[0], lam=1.0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    swr.attach(optimizer)
    monitor = Monitor(model, optimizer, measures=["update_l2", "weight_l2"], budget=None)
    train(model, optimizer, batch, 1)
    values = monitor.records[0].values
    assert values["update_l2"] > 0.4 * values["weight_l2"], "the rescaling alone halves the weights"


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def clocked(
    monkeypatch: pytest.MonkeyPatch, measurement: float, step: float, steps: int, pause: float = 0.0, **settings: Any
) -> Monitor:
    """Train with steps and measurements that take a known time, and a pause after every fiftieth step."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    take: Callable[..., Any] = monitoring.take

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock.now += measurement / 2
        return take(*args, **kwargs)

    monkeypatch.setattr(monitoring, "take", slow)
    monitor = Monitor(model, optimizer, measures=["weight_l2", "update_l2"], **settings)
    for done in range(steps):
        clock.now += step + (pause if done % 50 == 49 else 0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return monitor


def test_budget_stretches_the_interval_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = clocked(monkeypatch, measurement=6.0, step=1.0, steps=2000, every=10, budget=0.03)
    gaps = {b.step - a.step for a, b in pairwise(monitor.records)}
    assert monitor.interval in (200, 201), "6 s are 3 % of 200 steps of 1 s; when the first step began is not known"
    assert max(gaps) <= 402, "the second measurement pays for the first one too"
    assert monitor.share <= 0.03
    assert len(monitor.records) >= 9
    assert f"every {monitor.interval} steps" in str(monitor)
    assert str(monitor).endswith(f" s, {100 * monitor.share:.1f} % of the training time")


def test_a_first_measurement_over_budget_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitor = clocked(monkeypatch, measurement=60.0, step=1.0, steps=30, every=10, budget=0.03)
    assert str(monitor).startswith("1 measurement in 30 steps, every ")
    assert str(monitor).endswith(f"{100 * monitor.share:.1f} % of the training time so far, 3 % in the long run")
    assert monitor.share > 1


def test_pauses_between_steps_do_not_add_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = clocked(monkeypatch, measurement=6.0, step=1.0, steps=2000, pause=500.0, every=10, budget=0.03)
    spent = sum(record.seconds for record in monitor.records)
    assert spent <= 0.033 * 2000, "a pause counts for one step more at most"
    assert len(monitor.records) >= 9


def test_cheap_measurements_are_taken_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = clocked(monkeypatch, measurement=0.01, step=1.0, steps=100, every=10, budget=0.03)
    assert [record.step for record in monitor.records] == list(range(0, 100, 10))


def test_without_a_budget_the_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = clocked(monkeypatch, measurement=1000.0, step=1.0, steps=21, every=5, budget=None)
    assert [record.step for record in monitor.records] == [0, 5, 10, 15, 20]
    assert monitor.records[0].seconds == 1000.0


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_resumed_monitor_measures_the_same_steps_and_values(stop: int) -> None:
    batch = data("mlp")

    def fresh() -> tuple[nn.Module, Optimizer, Monitor]:
        model = zoo.build("mlp", dtype=torch.float32)
        optimizer = Adam(model.parameters())
        names = ["weight_l2", "hessian_rank", "update_l1"]
        monitor = Monitor(model, optimizer, every=2, measures=names, probe=batch, loss_fn=cross_entropy, budget=None)
        return model, optimizer, monitor

    model, optimizer, whole = fresh()
    train(model, optimizer, batch, 9)
    model, optimizer, first = fresh()
    train(model, optimizer, batch, stop)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), first.state_dict()))
    torch.save(saved[2], buffer := io.BytesIO())
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    model, optimizer, second = fresh()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    second.load_state_dict(state)
    train(model, optimizer, batch, 9 - stop)
    assert [(r.step, r.values) for r in second.records] == [(r.step, r.values) for r in whole.records]


def test_a_new_optimizer_and_a_new_probe() -> None:
    model, batch = zoo.build("mlp"), zoo.batch("mlp")
    first, second = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, first, every=1, measures=["loss"], probe=batch, loss_fn=cross_entropy, budget=None)
    train(model, first, batch, 2)
    other = zoo.batch("mlp", seed=9)
    monitor.attach(second)
    monitor.set_probe(other)
    train(model, first, batch, 1)
    assert len(monitor.records) == 2, "the first optimizer is not watched any more"
    monitor_step = monitor.step
    expected = measure(model, other, cross_entropy, measures=["loss"]).values["loss"]
    train(model, second, batch, 1)
    assert monitor.records[-1].step == monitor_step == 2
    assert monitor.records[-1].values["loss"] == pytest.approx(expected)
    monitor.detach()
    assert not second._optimizer_step_pre_hooks
    assert not second._optimizer_step_post_hooks


def test_history_means_parquet_scalars_and_callback(tmp_path: Path) -> None:
    model, batch = zoo.build("mlp"), zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[Record] = []
    monitor = Monitor(model, optimizer, every=2, measures=["update_l1"], budget=None, on_record=seen.append)
    train(model, optimizer, batch, 6)
    assert seen == monitor.records
    history = monitor.to_dict()["update_l1"]
    assert [step for step, _ in history] == [0, 2, 4]
    assert monitor.mean("update_l1") == pytest.approx(sum(v for _, v in history) / 3)
    assert monitor.mean("update_l1", since=2) == pytest.approx(sum(v for _, v in history[1:]) / 2)
    assert math.isnan(monitor.mean("update_l1", since=100))
    monitor.to_parquet(tmp_path / "history.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "history.parquet").to_pylist()
    assert [(r["step"], r["value"]) for r in rows if not r["layer"]] == history
    assert {r["layer"] for r in rows} == {"", "0", "2", "4"}

    class Writer:
        def __init__(self) -> None:
            self.got: list[tuple[str, float, int | None]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            self.got.append((tag, scalar_value, global_step))

    writer = Writer()
    monitor.write_scalars(writer)
    assert ("monitor/update_l1", history[1][1], 2) in writer.got


def test_default_measures_are_cheap_and_fit_the_arguments() -> None:
    model, batch = zoo.build("mlp"), zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    bare = Monitor(model, optimizer)
    assert {m.name for m in bare.measures} >= {"weight_l2", "gradient_l2", "update_l1"}
    assert not any(m.cost in ("decomposition", "curvature", "forward") for m in bare.measures)
    bare.detach()
    probed = Monitor(model, optimizer, probe=batch, loss_fn=cross_entropy)
    assert {m.name for m in probed.measures} >= {"loss", "feature_rank", "dormant_fraction"}
    assert not any("reference" in m.needs for m in probed.measures)


def test_missing_needs_and_invalid_arguments_are_named() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="feature_rank needs a probe batch"):
        Monitor(model, optimizer, measures=["feature_rank"])
    with pytest.raises(ValueError, match="hessian_rank needs a loss_fn and labels in the probe batch"):
        Monitor(model, optimizer, measures=["hessian_rank"], probe=torch.ones(3, 12))
    with pytest.raises(ValueError, match="distance_l2 needs a reference"):
        Monitor(model, optimizer, measures=["distance_l2"])
    with pytest.raises(ValueError, match="every: 0 is not allowed; it must be an integer ≥ 1"):
        Monitor(model, optimizer, every=0)
    with pytest.raises(ValueError, match=r"every: 2\.5 is not allowed; it must be an integer ≥ 1"):
        Monitor(model, optimizer, every=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="statistics: 'runing' is not allowed; it must be one of 'batch', 'running'"):
        Monitor(model, optimizer, statistics="runing")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"budget: 0 is not allowed; it must be a number .* > 0, or None"):
        Monitor(model, optimizer, budget=0)
    assert not optimizer._optimizer_step_pre_hooks, "nothing is attached by a monitor that could not be made"


def test_a_measure_that_fails_on_the_way_does_not_stop_the_training() -> None:
    model, batch = zoo.build("mlp"), zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, every=1, measures=["balancedness", "weight_l2"], probe=batch, budget=None)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    train(model, optimizer, batch, 2)
    assert len(monitor.records) == 2
    assert "finite" in monitor.skipped["balancedness"]
    assert math.isnan(monitor.records[0].values["weight_l2"])
    assert f"Skipped: balancedness: {monitor.skipped['balancedness']}" in str(monitor)
    assert "Note: at step 0, not finite: weight_l2 is nan, weight_l2/0 is nan" in str(monitor)
    resumed = Monitor(model, SGD(model.parameters(), lr=0.1), measures=["weight_l2"])
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.notes == monitor.notes


def test_a_measure_that_succeeds_again_is_no_longer_skipped() -> None:
    model, batch = zoo.build("mlp", dtype=torch.float32), data("mlp")
    optimizer = SGD(model.parameters(), 0.1)
    monitor = Monitor(model, optimizer, every=1, budget=None, measures=["loss"], probe=batch, loss_fn=cross_entropy)
    monitor.set_probe(batch[0])
    train(model, optimizer, batch, 1)
    assert "loss" in monitor.skipped
    monitor.set_probe(batch)
    train(model, optimizer, batch, 1)
    assert monitor.skipped == {}
    assert "loss" in monitor.records[-1].values


def test_a_new_reference_loses_its_wrappers_as_the_first_did() -> None:
    model, batch = zoo.build("mlp", dtype=torch.float32), data("mlp")
    optimizer = SGD(model.parameters(), 0.1)
    monitor = Monitor(model, optimizer, every=1, budget=None, measures=["distance_l2"], reference=model)
    monitor.reference = nn.DataParallel(copy.deepcopy(model))
    train(model, optimizer, batch, 2)
    assert [r.values["distance_l2"] > 0 for r in monitor.records] == [False, True]
    with pytest.raises(ValueError, match="reference must be initialized"):
        monitor.reference = nn.LazyLinear(3)


def test_measuring_a_diverged_network_does_not_raise() -> None:
    model, batch = zoo.build("mlp", dtype=torch.float32), data("mlp")
    optimizer = SGD(model.parameters(), 1e30)
    names = [name for name in EVERYTHING if measures.info(name).cost == "matrix"]
    monitor = Monitor(model, optimizer, every=1, budget=None, measures=names, probe=batch, loss_fn=cross_entropy)
    train(model, optimizer, batch, 3)
    assert monitor.step == 3
    assert set(monitor.skipped) == set(names)
