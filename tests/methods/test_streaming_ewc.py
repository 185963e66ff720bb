"""Streaming EWC: the closed form, bias correction and skipped steps."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from pliant import StreamingEWC
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close
from tests.reference import penalties

LAM, BETA = 5.0, 0.9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [*zoo.PAPER_MODELS, "tied"])
def test_same_trajectory_as_the_term_in_the_loss(name: str, optimizer: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    made = OPTIMIZERS[optimizer](closed)
    penalty = StreamingEWC(closed, lam=LAM, beta=BETA).attach(made)
    train(closed, made, name, range(STEPS[name]))

    reference = penalties.StreamingEWC(slow, LAM, BETA)
    other = OPTIMIZERS[optimizer](slow)
    parameters = list(slow.parameters())
    for step in range(STEPS[name]):
        inputs, labels = zoo.batch(name, seed=100 + step)
        gradients = torch.autograd.grad(cross_entropy(slow(inputs), labels), parameters)
        pulls = torch.autograd.grad(reference.term(gradients), parameters)
        for p, gradient, pull in zip(parameters, gradients, pulls, strict=True):
            p.grad = gradient + pull
        other.step()
    assert_close(closed, slow)
    correction = 1 - BETA**reference.steps
    for name, average, square in zip(penalty.parameters, reference.values, reference.squares, strict=True):
        torch.testing.assert_close(penalty.averages["values"][name], average / correction, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(penalty.averages["importances"][name], square / correction, rtol=1e-7, atol=1e-12)


def test_value_is_the_term() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty = StreamingEWC(model, lam=LAM, beta=BETA).attach(optimizer)
    train(model, optimizer, "mlp", range(7))
    expected = 0.0
    for name, p in model.named_parameters():
        distance = p.detach() - penalty.averages["values"][name]
        expected += LAM / 2 * float((penalty.averages["importances"][name] * distance**2).sum())
    assert expected > 0
    assert float(penalty.value()) == pytest.approx(expected)


def test_skipped_step_does_not_change_the_averages() -> None:
    """A GradScaler often skips the first steps. Counting them would make the first averages too small."""
    model, control = zoo.build("mlp"), zoo.build("mlp")
    made = {}
    for each, overflow in ((model, True), (control, False)):
        optimizer = Adam(each.parameters(), lr=1e-2, fused=True)
        made[each] = StreamingEWC(each, lam=LAM, beta=BETA).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        for step in range(6):
            inputs, labels = zoo.batch("mlp", seed=step)
            if overflow and step in (0, 1, 4):
                optimizer.zero_grad()
                scaler.scale(cross_entropy(each(inputs), labels) * torch.inf).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            scaler.scale(cross_entropy(each(inputs), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
    for name, value in snapshot(model).items():
        torch.testing.assert_close(value, snapshot(control)[name], rtol=1e-12, atol=1e-14)
    assert torch.equal(made[model].averages["counts"], torch.full((6,), 6.0, dtype=torch.float64))


def test_steps_without_a_gradient_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    penalty = StreamingEWC(model, beta=0.5)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    penalty.step()
    penalty.step()
    model[1].weight.grad = torch.full_like(model[1].weight, 3.0)
    penalty.step()
    assert penalty.averages["counts"].tolist() == [3.0, 1.0]
    assert torch.equal(penalty.averages["importances"]["1.weight"], torch.full((2, 2), 9.0, dtype=torch.float64))


def test_half_precision_averages_move() -> None:
    """The averages are kept in float32, since bfloat16 would round away a step of 0.001 of the distance."""
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    penalty = StreamingEWC(model, lam=1.0, beta=0.999)
    for value in (1.0, 1.0, 2.0, 2.0, 2.0):
        model.weight.data.fill_(value)
        model.weight.grad = torch.ones_like(model.weight)
        penalty.step()
    assert penalty.averages["values"]["weight"].dtype == torch.float32
    assert float(penalty.averages["values"]["weight"].mean()) == pytest.approx(1.6, abs=2e-3)


def test_beta_of_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"beta: 1\.0 is not allowed; it must be a number that is in \[0, 1\)"):
        StreamingEWC(zoo.build("mlp"), beta=1.0)


def test_optimizer_may_hold_no_penalized_parameter() -> None:
    model, alone = zoo.build("mlp"), zoo.build("mlp")
    body = SGD(model[:4].parameters(), lr=0.1)
    head = SGD(model[4].parameters(), lr=0.1)
    StreamingEWC(model, lam={"4.*": LAM}, beta=BETA).attach(body, head)
    optimizer = SGD(alone.parameters(), lr=0.1)
    StreamingEWC(alone, lam={"4.*": LAM}, beta=BETA).attach(optimizer)
    train(alone, optimizer, "mlp", range(3))
    for step in range(3):
        inputs, labels = zoo.batch("mlp", seed=100 + step, dtype=next(model.parameters()).dtype)
        for each in (body, head):
            each.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        body.step()
        head.step()
    assert_same(snapshot(model), snapshot(alone))
