"""`pliant.diagnose`: the trial first, the signs that explain it, and what to try."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pliant
from pliant.diagnosis.remedies import _ACTS_ON, _CODE, choose_remedies
from pliant.diagnostics import Finding, measures
from pliant.methods import registry
from tests.loops import assert_same, snapshot

QUICK: dict[str, Any] = {
    "measures": ["dormant_fraction", "weight_l2", "feature_rank"],
    "steps": 120,
    "progress": False,
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))


def learned(data: tuple[Tensor, Tensor]) -> nn.Module:
    """Return a network that knows the data already."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def dead() -> nn.Module:
    model = build()
    with torch.no_grad():
        model[0].bias[:94] = -100
    return model


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:600], dtype=torch.float32) / 16, torch.tensor(labels[:600])


@pytest.mark.parametrize("verdict", ["plastic", "lost"])
def test_the_verdict_comes_first_then_signs_then_what_to_try(digits: tuple[Tensor, Tensor], verdict: str) -> None:
    model = learned(digits) if verdict == "plastic" else dead()
    before = snapshot(model)
    found = pliant.diagnose(model, digits, cross_entropy, fresh=build, budget=None, **QUICK)
    assert_same(snapshot(model), before)
    assert found.verdict == verdict
    lines = str(found).splitlines()
    assert lines[0].startswith(f"{verdict}: ")
    if verdict == "plastic":
        assert found.explanation == "No sign of lost plasticity was found: all 3 are in the range of healthy networks."
        assert "Nothing needs to be done" in str(found)
        assert found.remedies == []
    else:
        signs = next(place for place, line in enumerate(lines) if line.startswith("  severe: units have gone dormant"))
        remedies = lines.index("What to try:")
        assert 0 < signs < remedies < lines.index("    redo.attach(optimizer)")
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["verdict"] == verdict


def test_signs_without_loss_and_loss_without_signs_are_sentences(digits: tuple[Tensor, Tensor]) -> None:
    plastic = pliant.diagnose(learned(digits), digits, cross_entropy, fresh=build, budget=None, **QUICK)
    lost = pliant.diagnose(dead(), digits, cross_entropy, fresh=build, budget=None, **QUICK)
    signs_alone = pliant.Diagnosis(plastic.trial, lost.signs)
    assert signs_alone.explanation.startswith("Signs without loss: Of 3 signs of lost plasticity, ")
    assert signs_alone.remedies == []
    loss_alone = pliant.Diagnosis(lost.trial, plastic.signs)
    assert loss_alone.explanation.endswith("So no sign explains the loss.")
    assert [remedy.method for remedy in loss_alone.remedies] == ["shrink_perturb", "full_reset"]


def test_data_sets_and_loaders_are_measured_and_learned(digits: tuple[Tensor, Tensor]) -> None:
    some = TensorDataset(*digits)
    for data in (some, DataLoader(some, batch_size=50)):
        found = pliant.diagnose(dead(), data, cross_entropy, fresh=build, samples=30, budget=None, **QUICK)
        assert (found.verdict, found.signs.samples) == ("lost", 30)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "there is no data; give the new data, with labels, to get a verdict"),
        ({"data": torch.ones(4, 64)}, "there is no loss_fn; give one to get a verdict"),
        ({"data": torch.ones(4, 64), "loss_fn": cross_entropy}, "data: its batches are not pairs"),
        ({"data": (torch.ones(4, 64), torch.ones(4).long()), "loss_fn": {"a": cross_entropy}}, "several losses"),
        (
            {"data": (torch.ones(4, 64), torch.ones(4).long()), "loss_fn": cross_entropy, "trial": False},
            "trial=False was given",
        ),
        (
            {
                "data": (torch.ones(40, 64), torch.ones(40).long()),
                "loss_fn": cross_entropy,
                "budget": 1e-6,
                "steps": None,
            },
            "budget: 1e-06 seconds are too few",
        ),
    ],
)
def test_without_a_trial_only_signs_are_shown_and_the_reason_is_told(arguments: dict[str, Any], why: str) -> None:
    found = pliant.diagnose(build(), **{**QUICK, "measures": ["weight_l2"], **arguments})
    assert found.verdict is None
    assert found.answer.startswith("not decided: there was no trial (")
    assert why in found.answer
    assert found.signs.reference["weight_l2"] > 0, "a fresh network is drawn"


def test_a_network_that_cannot_be_drawn_again_is_measured_alone() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.scale

    found = pliant.diagnose(Own(), measures=["weight_l2"])
    assert found.signs.reference == {}
    assert "there is no fresh network to compare with" in found.signs.notes[-1]
    assert "pass fresh= or reference=" in str(found)
    assert pliant.diagnose(Own(), fresh=Own, measures=["weight_l2"]).signs.reference["weight_l2"] == 3


def test_a_network_given_as_its_builder_is_refused() -> None:
    with pytest.raises(ValueError, match="fresh: a Sequential is not allowed; it must be a function"):
        pliant.diagnose(build(), fresh=build(), measures=["weight_l2"])


@pytest.mark.parametrize("method", _CODE)
def test_the_lines_to_paste_run(method: str) -> None:
    names = {
        "pliant": pliant, "model": build(), "x": torch.rand(8, 64),
    }  # fmt: skip
    names["optimizer"] = torch.optim.Adam(names["model"].parameters())
    assert method in registry.names()
    _, *lines = _CODE[method]
    assert len(lines) == 2
    for main in registry.info(method).tunables[:1]:
        assert f"{main.name}=" not in lines[0], "the default is a value that worked"
    for line in lines:
        exec(line, names)
    cross_entropy(names["model"](names["x"]), torch.zeros(8).long()).backward()
    names["optimizer"].step()


def test_every_sign_has_remedies_and_each_is_named_once() -> None:
    with_sign = [name for name in measures.names() if measures.info(name).sign]
    assert set(with_sign) == set(_ACTS_ON)
    findings = [Finding(name, measures.info(name).sign, *worst) for name, worst in _worst(with_sign)]
    for finding in findings:
        found = choose_remedies([finding], lost=True)
        assert [remedy.method for remedy in found] == list(_ACTS_ON[finding.measure])
        assert all(remedy.measures == (finding.measure,) for remedy in found)
    found = choose_remedies(findings, lost=True)
    assert len({remedy.method for remedy in found}) == len(found) == 4
    assert choose_remedies([], lost=False) == []


def _worst(names: list[str]) -> list[tuple[str, tuple[float, float]]]:
    """Return values far beyond a fresh network's."""
    found = []
    for name in names:
        sign = measures.info(name).sign
        assert sign is not None
        found.append(
            (name, (0.9999, 0.0) if sign.lost_share else (1e9, 1.0) if sign.worse == "higher" else (1e-9, 1.0))
        )
    return found
