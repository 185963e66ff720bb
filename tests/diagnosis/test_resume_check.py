"""Jumps in the loss after a resume, each made by real training and found from the files alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from pliant.diagnosis.resume_check import check_resume, compare_states

Data = tuple[Tensor, Tensor]
QUICK: dict[str, Any] = {"steps": 120, "stress": False, "progress": False}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


class Run:
    """A training that can be saved and resumed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = Adam(self.model.parameters(), lr=3e-3)
        self.scheduler = CosineAnnealingLR(self.optimizer, 400)

    def train(self, data: Data, steps: int, shuffled: bool = True) -> None:
        draws = torch.Generator().manual_seed(steps)
        order = torch.randperm(len(data[0]), generator=draws) if shuffled else data[1].argsort()
        for step in range(steps):
            index = order[torch.arange(step * 32, (step + 1) * 32) % len(order)]
            self.optimizer.zero_grad()
            cross_entropy(self.model(data[0][index]), data[1][index]).backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, path: Path) -> Path:
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
             "scheduler": self.scheduler.state_dict()}, path,
        )  # fmt: skip
        return path

    def load(self, path: Path, *parts: str) -> None:
        state = torch.load(path, weights_only=True)
        for part in parts:
            getattr(self, part).load_state_dict(state[part])


@pytest.fixture(scope="module")
def digits() -> Data:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, digits: Data) -> Path:
    run = Run()
    run.train(digits, 300)
    return run.save(tmp_path_factory.mktemp("before") / "before.pt")


@pytest.mark.parametrize(
    ("parts", "cause", "says"),
    [
        (("model", "scheduler"), "optimizer state", "the optimizer started over: 300 steps before, 60 after"),
        (("model", "optimizer"), "schedule", "the schedule started over: at 300 before, 60 after"),
        (("model",), "optimizer state", "the schedule started over: at 300 before, 60 after"),
    ],
)
def test_lost_state_is_found_in_the_files(
    before: Path, digits: Data, tmp_path: Path, parts: tuple[str, ...], cause: str, says: str
) -> None:
    run = Run()
    run.load(before, *parts)
    run.train(digits, 60)
    found = check_resume(before, run.save(tmp_path / "after.pt"), build, digits)
    assert found.cause == cause
    assert says in found.evidence
    assert found.trial is None, "the files decide"
    assert str(found).startswith(f"{cause}: ")


def test_sorted_data_after_a_complete_resume_is_the_data(before: Path, digits: Data, tmp_path: Path) -> None:
    run = Run()
    run.load(before, "model", "optimizer", "scheduler")
    run.train(digits, 20, shuffled=False)
    found = check_resume(before, run.save(tmp_path / "after.pt"), build, digits, **QUICK)
    assert found.cause == "data"
    assert (
        "the optimizer continued: 300 steps before, 320 after, unless all 320 were made after the resume"
        in found.evidence
    )
    assert any("the weights are worse than before" in line for line in found.evidence)
    assert found.trial is not None


def test_an_undisturbed_resume_is_not_worse_on_the_same_data(before: Path, digits: Data, tmp_path: Path) -> None:
    run = Run()
    run.load(before, "model", "optimizer", "scheduler")
    run.train(digits, 60)
    found = check_resume(before, run.save(tmp_path / "after.pt"), build, digits, **QUICK)
    assert found.cause == "data"
    assert any("the weights are not worse than before" in line for line in found.evidence)


def test_a_worn_network_on_new_data_has_lost_plasticity(digits: Data, tmp_path: Path) -> None:
    """Everything was restored, the data is new, and the loss stays up: a worn network cannot learn it."""
    run = Run()
    run.train(digits, 100)
    with torch.no_grad():
        run.model[0].bias[:46] = -100.0  # most units die, and stay dead
    path = run.save(tmp_path / "before.pt")
    again = Run()
    again.load(path, "model", "optimizer", "scheduler")
    again.train(digits, 60)
    found = check_resume(path, again.save(tmp_path / "after.pt"), build, digits, **QUICK)
    assert found.cause == "plasticity"
    assert found.trial is not None
    assert found.trial.verdict == "lost"


def test_weights_alone_mean_a_new_optimizer(before: Path, tmp_path: Path) -> None:
    torch.save(build().state_dict(), tmp_path / "weights.pt")
    found = check_resume(tmp_path / "weights.pt", before, build)
    assert found.cause == "optimizer state"
    assert found.evidence[0].startswith("the checkpoint before holds no optimizer state")
    assert check_resume(before, before, build).cause == "undecided", "without data nothing is learned"


def test_optimizers_without_counts_and_lightnings_lists_are_read() -> None:
    model = build()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    cross_entropy(model(torch.ones(2, 64)), torch.zeros(2).long()).backward()
    empty = {"optimizer_states": [optimizer.state_dict()]}
    optimizer.step()
    full = {"optimizer_states": [optimizer.state_dict()]}
    assert compare_states(full, full)[0] == []
    assert "does not count its steps" in compare_states(full, full)[1][0]
    assert compare_states(full, empty)[0] == ["optimizer state"]


def test_a_learning_rate_that_rises_is_lost_schedule_unless_the_schedule_raised_it() -> None:
    def state(lr: float, epoch: int | None) -> dict[str, Any]:
        content: dict[str, Any] = {"optimizer": {"state": {0: {"step": 5}}, "param_groups": [{"lr": lr}]}}
        return content if epoch is None else {**content, "scheduler": {"last_epoch": epoch}}

    assert compare_states(state(0.1, None), state(0.2, None))[0] == ["schedule"]
    lost, evidence = compare_states(state(0.1, 5), state(0.2, 6))
    assert lost == []
    assert "the learning rate rose from 0.1 to 0.2" in evidence
