"""`Monitor(log=…)` with the real trackio and TensorBoard, offline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.tensorboard import SummaryWriter

import pliant


def train(log: Any) -> pliant.Monitor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = pliant.Monitor(model, optimizer, every=2, measures=["weight_l2", "gradient_l2"], budget=None, log=log)
    for _ in range(5):
        optimizer.zero_grad()
        mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1)).backward()
        optimizer.step()
    return monitor


def test_log_is_called_with_values_and_step() -> None:
    calls: list[tuple[dict[str, float], int]] = []
    monitor = train(lambda values, step: calls.append((values, step)))
    assert [step for _, step in calls] == [0, 2, 4]
    assert [values["monitor/weight_l2"] for values, _ in calls] == [
        value for _, value in monitor.to_dict()["weight_l2"]
    ]
    assert "monitor/gradient_l2/0" in calls[0][0] or "monitor/gradient_l2" in calls[0][0]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio  # reads the folder when it is imported
    from trackio.sqlite_storage import SQLiteStorage

    trackio.init(project="pliant-tests", name="run", embed=False)
    monitor = train(trackio.log)
    trackio.finish()
    logged = SQLiteStorage.get_logs("pliant-tests", "run")
    for measure in ("weight_l2", "gradient_l2"):
        expected = monitor.to_dict()[measure]
        assert [(entry["step"], entry[f"monitor/{measure}"]) for entry in logged] == [tuple(each) for each in expected]


def test_tensorboard(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    monitor = train(lambda values, step: [writer.add_scalar(key, value, step) for key, value in values.items()])
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("monitor/weight_l2")]
    expected = monitor.to_dict()["weight_l2"]
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected])
