"""Hare & Tortoise: the average, the returns, and nothing shared between the two."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from pliant import HareTortoise
from tests import zoo
from tests.loops import assert_same, differs, snapshot, steady_adam, train
from tests.reference import rules


@pytest.mark.parametrize("name", [*zoo.PAPER_MODELS, "tied"])
def test_same_trajectory_as_the_reference(name: str) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    optimizer = steady_adam(model)
    method = HareTortoise(model, beta=0.9, every=5).attach(optimizer)
    train(model, optimizer, name, range(12))
    reference = rules.HareTortoise(slow, zoo.build(name), beta=0.9, every=5)
    other = steady_adam(slow)
    for step in range(12):
        train(slow, other, name, [step])
        reference.step()
    tortoise = reference.slow.state_dict()
    for key, value in snapshot(model).items():
        torch.testing.assert_close(value, slow.state_dict()[key], rtol=1e-9, atol=1e-11, msg=key)
    assert set(method.tortoise) <= set(tortoise)
    for key, value in method.tortoise.items():
        torch.testing.assert_close(value, tortoise[key], rtol=1e-9, atol=1e-11, msg=key)
    assert method.receipt is not None
    assert method.receipt.details["returns"] == 2


def test_parameters_that_no_optimizer_trains_do_not_return_to_the_tortoise() -> None:
    """A target network in the same module follows in its own way."""
    agent = nn.ModuleDict({"online": zoo.build("mlp"), "target": zoo.build("mlp")})
    optimizer = SGD(agent["online"].parameters(), lr=0.1)
    method = HareTortoise(agent, beta=0.5, every=None).attach(optimizer)
    train(agent["online"], optimizer, "mlp", range(3))
    with torch.no_grad():
        for parameter in agent["target"].parameters():
            parameter.add_(1)
    before = snapshot(agent["target"])
    with method.tortoise_weights():
        assert_same(snapshot(agent["target"]), before)
    method.apply()
    assert_same(snapshot(agent["target"]), before)
    for name, value in snapshot(agent["online"]).items():
        assert torch.equal(value, method.tortoise[f"online.{name}"])


def test_counting_buffers_are_copied_not_averaged() -> None:
    model = zoo.build("cnn_bn")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = HareTortoise(model, beta=0.5, every=4).attach(optimizer)
    for step in range(10):
        train(model, optimizer, "cnn_bn", [step])
        assert method.tortoise["1.num_batches_tracked"].dtype == torch.int64
        assert int(method.tortoise["1.num_batches_tracked"]) == int(model[1].num_batches_tracked) == step + 1


def test_running_statistics_are_averaged() -> None:
    model = zoo.build("cnn_bn")
    method = HareTortoise(model, beta=0.75, every=None)
    model[1].running_mean.fill_(4.0)
    method.step()
    assert method.tortoise["1.running_mean"].tolist() == [1.0] * 4


def test_hare_and_tortoise_share_no_memory() -> None:
    model = zoo.build("cnn_bn")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = HareTortoise(model, beta=0.9, every=2).attach(optimizer)
    for step in range(5):
        train(model, optimizer, "cnn_bn", [step])
        hare = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
        assert hare.isdisjoint(t.data_ptr() for t in method.tortoise.values())
    kept = {name: t.clone() for name, t in method.tortoise.items()}
    train(model, SGD(model.parameters(), lr=0.1), "cnn_bn", range(2))
    assert_same(method.tortoise, kept)


def test_evaluating_the_tortoise() -> None:
    model = zoo.build("cnn_bn").eval()
    optimizer = SGD(model.parameters(), lr=0.5)
    method = HareTortoise(model, beta=0.9, every=None).attach(optimizer)
    inputs, _ = zoo.batch("cnn_bn")
    start = model(inputs)
    train(model, optimizer, "cnn_bn", range(3))
    before = snapshot(model)
    with method.tortoise_weights():
        assert_same({name: model.state_dict()[name] for name in method.tortoise}, method.tortoise)
        slow = model(inputs)
    assert_same(snapshot(model), before)
    assert (slow - start).norm() < (model(inputs) - start).norm()
    with pytest.raises(RuntimeError, match="stop"), method.tortoise_weights():
        raise RuntimeError("stop")
    assert_same(snapshot(model), before)


def test_apply_goes_back_at_once_and_the_optimizer_remembers() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=0.1)
    method = HareTortoise(model, every=None).attach(optimizer)
    train(model, optimizer, "mlp", range(3))
    assert method.receipt is not None
    assert method.receipt.details["distance"] > 0
    receipt = method.apply(optimizer)
    assert receipt.details == {"distance": 0.0, "returns": 1, "steps": 3}
    assert_same(snapshot(model), method.tortoise)
    assert len(optimizer.state) == 6


def test_the_buffers_of_the_other_optimizer_are_left_alone() -> None:
    model = zoo.build("cnn_bn")
    first = SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    second = SGD([p for i in (4, 5, 9, 11) for p in model[i].parameters()], lr=0.1)
    method = HareTortoise(model, beta=0.5, every=None).attach(first, second)
    train(model, first, "cnn_bn", range(1))
    assert float((method.tortoise["1.running_mean"]).norm()) > 0
    assert float((method.tortoise["5.running_mean"]).norm()) == 0
    assert int(method.tortoise["5.num_batches_tracked"]) == 0


class WithOddBuffers(nn.Module):
    """A mask that counts as no state, a norm layer without parameters, and a frozen one."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.bare = nn.BatchNorm1d(3, affine=False)
        self.frozen = nn.BatchNorm1d(3).requires_grad_(False)
        self.register_buffer("mask", torch.full((3,), -torch.inf), persistent=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.bare(self.linear(x)))


def test_which_buffers_are_averaged() -> None:
    model = WithOddBuffers()
    method = HareTortoise(model)
    assert set(method.tortoise) == {
        "linear.weight", "linear.bias", "seen", "bare.running_mean", "bare.running_var", "bare.num_batches_tracked",
    }  # fmt: skip
    assert method.tortoise["seen"].dtype == torch.bool
    model.seen.fill_(True)
    method.step()
    assert method.tortoise["seen"].all()


def test_half_precision_averages_move() -> None:
    model = nn.Linear(3, 3).to(torch.bfloat16)
    method = HareTortoise(model, beta=0.999)
    model.weight.data.add_(1.0)
    before = method.tortoise["weight"].clone()
    method.step()
    assert method.tortoise["weight"].dtype == torch.float32
    torch.testing.assert_close(method.tortoise["weight"] - before, torch.full((3, 3), 1e-3), rtol=0.02, atol=1e-6)
    method.apply()
    assert model.weight.dtype == torch.bfloat16


def test_a_step_that_is_skipped_does_not_go_back() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1, fused=True)
    method = HareTortoise(model, beta=0.9, every=3).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    before, slow = snapshot(model), {name: t.clone() for name, t in method.tortoise.items()}
    assert differs(before, slow)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    inputs, _ = zoo.batch("mlp")
    optimizer.zero_grad()
    scaler.scale(model(inputs).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert_same(snapshot(model), before)
    assert_same(method.tortoise, slow)
    assert (sum(method.steps), method.returns) == (2, 0)
    train(model, optimizer, "mlp", [2])
    assert (sum(method.steps), method.returns) == (3, 1)
    assert_same(snapshot(model), method.tortoise)
