"""Weight rescaling: the standard deviation of every weight goes back to where it was."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pliant import SWR, WeightRescaling
from pliant.methods._core.after_step import AfterStep
from tests import zoo
from tests.loops import assert_same, snapshot, steady_adam, train
from tests.methods.trajectories import assert_close
from tests.reference import rules

X = zoo.batch("mlp")[0]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_reference(name: str, every: int) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    deviations = {key: rules.deviation(layer.weight) for key, layer in rules.weight_layers(slow)}
    optimizer = steady_adam(model)
    method = WeightRescaling(model, every=every).attach(optimizer)
    train(model, optimizer, name, range(7))
    other = steady_adam(slow)
    for step in range(7):
        train(slow, other, name, [step])
        if (step + 1) % every == 0:
            rules.rescale_weights(slow, deviations)
    assert_close(model, slow)
    assert method.receipt is not None
    assert method.receipt.details["steps"] == 7
    assert method.receipt.tensors == len(deviations)


def test_the_direction_stays() -> None:
    model = zoo.build("mlp")
    method = WeightRescaling(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3).add_(0.1)
    before = model[0].weight.detach().clone()
    bias = model[0].bias.detach().clone()
    method.step()
    after = model[0].weight.detach()
    torch.testing.assert_close(after / after.norm(), before / before.norm())
    assert float(after.std(correction=0)) == pytest.approx(float(method.initial["0.weight"]))
    assert torch.equal(model[0].bias, bias)


def test_weights_that_start_or_become_constant_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[0].weight)
    with pytest.warns(UserWarning, match=r"leaves these weights alone, they start constant: 0\.weight"):
        method = WeightRescaling(model)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
        model[1].weight.zero_()
    method.attach(optimizer := SGD(model.parameters(), lr=0.0))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight, torch.eye(3))
    assert torch.equal(model[1].weight, torch.zeros(3, 3))


@pytest.mark.parametrize("make", [WeightRescaling, lambda model, every: SWR(model, X, lam=1.0, every=every)])
def test_a_due_step_that_is_skipped_leaves_the_action_to_the_next(make: Callable[..., AfterStep]) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    method = make(model, every=2).attach(optimizer)
    train(model, optimizer, "mlp", [0])
    before = snapshot(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(X).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert_same(snapshot(model), before)
    assert method.receipt is None
    train(model, optimizer, "mlp", [1])
    assert method.receipt is not None
    assert method.receipt.details["steps"] == 2


def test_optimizers_that_share_their_first_parameter_are_counted_apart() -> None:
    model = zoo.build("mlp")
    body = SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    head = SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    method = WeightRescaling(model, every=2).attach(body, head)
    rescaled = []
    for step in range(4):
        for optimizer in (body, head):
            train(model, optimizer, "mlp", [step])
        rescaled.append(sorted(method._last))
    assert rescaled == [[], *[["0.weight", "4.weight"]] * 3]
    assert method.steps == [4, 4]
    method.detach(head)
    again = SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    method.attach(again)
    assert [a.slot for a in method._attachments.values()] == [0, 1]


def test_settings_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ValueError, match="every: 0 is not allowed"):
        WeightRescaling(zoo.build("mlp"), every=0)
