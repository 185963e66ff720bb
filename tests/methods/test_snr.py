"""Self-normalized resets: a silence that is long for the unit renews it."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pliant import SelfNormalizedResets
from pliant.methods._core.initial import draw_fresh, seeded
from tests.loops import steady_adam, training_step
from tests.methods.test_recyclers import CASES, assert_equal_runs, build
from tests.reference import recycling as reference


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    model, _, batch = build(name)
    control, wires, _ = build(name)
    one, two = steady_adam(model, lr=3e-2), steady_adam(control, lr=3e-2)
    method = SelfNormalizedResets(model, batch(0)[0], quantile=0.5, longest=6, window=4, seed=5).attach(one)
    slow = reference.SelfNormalizedResets(wires, quantile=0.5, longest=6, window=4)
    draws = 0
    for step in range(1, 21):
        # Few examples, so that units are silent now and then.
        inputs, labels = (tensor[: 2 if name in ("mlp", "cnn") else None] for tensor in batch(step))
        training_step(model, one, (inputs, labels))
        seen = reference.watch(control, wires, inputs)
        training_step(control, two, (inputs, labels))
        with seeded(5, draws):
            renewed = slow.step(seen, lambda m: draw_fresh(m)["weight"], two)
        draws += any(renewed)
        for i, group in enumerate(method.groups):
            assert method.ages[group].tolist() == slow.age[i]
            torch.testing.assert_close(method.thresholds[group].tolist(), slow.threshold[i])
    assert method.draws == draws
    if name in ("mlp", "cnn"):
        assert draws > 0
    assert_equal_runs(model, control, one, two)


def test_a_unit_that_dies_is_renewed_after_its_usual_silence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        model[0].bias.zero_()
    optimizer = SGD(model.parameters(), lr=0.0)
    method = SelfNormalizedResets(model, torch.zeros(1, 2), longest=64, window=12, seed=0).attach(optimizer)

    def pass_through(value: float) -> None:
        model(torch.tensor([[value, 0.0]])).sum().backward()
        optimizer.step()

    for step in range(12):  # silences of two steps
        pass_through(1.0 if step % 3 == 2 else -1.0)
    assert method.thresholds["0"].tolist() == [2.0, 2.0]
    with torch.no_grad():
        model[0].bias[1] = -100.0  # the unit dies
    pass_through(1.0)
    assert int(sum(method.renewals["0"])) == 0
    pass_through(1.0)
    assert method.renewals["0"].tolist() == [0, 1]
    assert method.receipt is not None
    assert method.receipt.details["units"] == {"0": [1]}
    assert float(model[2].weight[0, 1]) == 0.0


def test_settings_that_make_no_sense_are_errors() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with pytest.raises(ValueError, match="quantile: 0 is not allowed"):
        SelfNormalizedResets(model, torch.zeros(1, 2), quantile=0)
    with pytest.raises(ValueError, match="window: 0 is not allowed"):
        SelfNormalizedResets(model, torch.zeros(1, 2), window=0)
