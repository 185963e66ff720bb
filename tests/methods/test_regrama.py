"""ReGraMa: units without gradients are renewed; their outgoing weights stay."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pliant import ReGraMa
from pliant.methods._core.initial import draw_fresh, seeded
from tests.loops import steady_adam, training_step
from tests.methods.test_recyclers import CASES, assert_equal_runs, build
from tests.reference import recycling as reference


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    model, _, batch = build(name)
    control, wires, _ = build(name)
    one, two = steady_adam(model), steady_adam(control)
    method = ReGraMa(model, batch(0)[0], tau=0.9, every=3, seed=5).attach(one)
    total = 0
    for step in range(1, 8):
        training_step(model, one, batch(step))
        training_step(control, two, batch(step))
        if step % 3 == 0:
            with seeded(5, step // 3 - 1):
                renewed = reference.regrama(wires, 0.9, lambda m: draw_fresh(m)["weight"], two)
            assert method.receipt is not None
            assert [method.receipt.details["units"].get(group, []) for group in method.groups] == renewed
            total += sum(map(len, renewed))
    assert total > 0
    assert_equal_runs(model, control, one, two)


def test_a_unit_without_gradient_is_renewed_and_its_outgoing_weights_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([5.0, -100.0, 5.0, 5.0]))
    outgoing = model[2].weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.0)
    method = ReGraMa(model, torch.zeros(1, 3), tau=0.0, every=1, seed=0).attach(optimizer)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    assert method.receipt is not None
    assert method.receipt.details["units"] == {"0": [1]}
    assert method.receipt.entries == 4
    assert float(model[0].bias[1]) == 0.0
    assert torch.equal(model[2].weight, outgoing)
    assert not model[0]._forward_pre_hooks
    assert not model[2]._forward_pre_hooks


def test_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    method = ReGraMa(model, torch.zeros(1, 3), tau=10.0, every=1, seed=0)
    model(torch.randn(8, 3)).square().sum().backward()
    before = model[0].weight.detach().clone()
    method.step()
    assert (model[0].weight != before).all()
