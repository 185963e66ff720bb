"""Selective weight reinitialization: the entries of least utility are drawn again."""

from typing import Any

import pytest
import torch
from torch.optim import SGD

from pliant import SelectiveReinit
from pliant.methods._core.initial import draw_fresh, seeded
from pliant.methods.selective_reinit import least_useful_entries
from tests import zoo
from tests.loops import steady_adam, train
from tests.methods.trajectories import assert_close
from tests.reference import rules

SETTINGS: dict[str, dict[str, Any]] = {
    "gradient, fraction": {"utility": "gradient", "fraction": 0.2},
    "magnitude, threshold": {"utility": "magnitude", "fraction": None, "threshold": 0.4},
    "gradient, averaged": {"utility": "gradient", "fraction": 0.1, "beta": 0.9},
}


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_of_equal_utilities_the_first_are_chosen_and_nan_last(fraction: float) -> None:
    generator = torch.Generator().manual_seed(0)
    utility = torch.randint(0, 4, (6, 50), generator=generator).double()
    utility[torch.rand(6, 50, generator=generator) < 0.3] = torch.nan
    expected = torch.zeros(300, dtype=torch.bool)
    expected[utility.flatten().argsort(stable=True)[: round(fraction * 300)]] = True
    assert torch.equal(least_useful_entries(utility, fraction, None), expected.view(6, 50))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_reference(name: str, settings: str) -> None:
    chosen = SETTINGS[settings]
    model, slow = zoo.build(name), zoo.build(name)
    optimizer, other = steady_adam(model), steady_adam(slow)
    method = SelectiveReinit(model, every=3, seed=4, **chosen).attach(optimizer)
    weights = {name: slow.get_parameter(name) for name in method.parameters}
    beta = chosen.get("beta", 0.0)
    averages = {key: torch.zeros_like(w) for key, w in weights.items()}
    for step in range(1, 8):
        train(model, optimizer, name, [step])
        train(slow, other, name, [step])
        for key, weight in weights.items():
            size = weight.detach().abs()
            utility = size if chosen["utility"] == "magnitude" else size * weight.grad.abs()
            averages[key] = beta * averages[key] + (1 - beta) * utility
        if step % 3:
            continue
        with seeded(4, step // 3 - 1):
            fresh = draw_fresh(slow)
        redrawn = {}
        for key, weight in weights.items():
            fraction = chosen["fraction"]
            count = None if fraction is None else round(fraction * weight.numel())
            places = rules.redraw_entries(weight, averages[key], count, chosen.get("threshold"), fresh[key])
            for moment in ("exp_avg", "exp_avg_sq"):
                other.state[weight][moment].view(-1)[places] = 0.0
            redrawn[key] = len(places)
            averages[key] = torch.zeros_like(weight)
        assert method.receipt is not None
        assert method.receipt.details["redrawn"] == redrawn
        assert method.receipt.entries == sum(redrawn.values()) > 0
        assert method.receipt.details["optimizer_tensors_cleared"] == 2 * len(weights)
    assert_close(model, slow)
    for mine, theirs in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])


def test_by_hand() -> None:
    model = zoo.build("mlp")
    method = SelectiveReinit(model, utility="magnitude", fraction=0.5, every=1, seed=0)
    model(zoo.batch("mlp")[0]).sum().backward()
    before = model[0].weight.detach().clone()
    method.step()
    assert int((model[0].weight != before).sum()) == before.numel() // 2
    kept = model[0].weight == before
    assert float(before[kept].abs().min()) >= float(before[~kept].abs().max())


def test_settings_that_make_no_sense_are_errors() -> None:
    model = zoo.build("mlp")
    with pytest.raises(ValueError, match=r"fraction and threshold: 0\.01 and 0\.5; give one"):
        SelectiveReinit(model, threshold=0.5)
    with pytest.raises(ValueError, match="fraction and threshold: None and None"):
        SelectiveReinit(model, fraction=None)
    with pytest.raises(ValueError, match="utility: 'size' is not allowed"):
        SelectiveReinit(model, utility="size")
    with pytest.raises(ValueError, match="beta: 1 is not allowed"):
        SelectiveReinit(model, beta=1).attach(SGD(model.parameters(), lr=0.1))
