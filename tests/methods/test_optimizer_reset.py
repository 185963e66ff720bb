"""Optimizer reset: the state starts again, the weights stay."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from pliant import OptimizerReset
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.methods.trajectories import assert_close
from tests.reference.optimizers import SlowAdam

OPTIMIZERS = {
    "Adam": lambda p: Adam(p, lr=1e-2),
    "AdamW, amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "NAdam": lambda p: NAdam(p, lr=1e-2),
    "RMSprop": lambda p: RMSprop(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9),
    "fused SGD": lambda p: SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_reset_is_a_new_optimizer(name: str) -> None:
    model = zoo.build("mlp")
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, "mlp", range(4))
    other = copy.deepcopy(model)
    before = snapshot(model)
    receipt = OptimizerReset(model).apply(optimizer)
    assert_same(snapshot(model), before)
    assert receipt.tensors >= 6
    train(model, optimizer, "mlp", range(4, 7))
    train(other, OPTIMIZERS[name](other.parameters()), "mlp", range(4, 7))
    assert_same(snapshot(model), snapshot(other))


@pytest.mark.parametrize(("moments", "step"), [("zero", "zero"), ("keep", "zero"), ("zero", "keep")])
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_adam_written_out(name: str, moments: str, step: str) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    optimizer = Adam(model.parameters(), lr=1e-2, eps=1e-4)
    reset = OptimizerReset(model, moments=moments, step=step).attach(optimizer)
    reference = SlowAdam(slow, lr=1e-2, eps=1e-4)
    for at in range(7):
        if at == 3:
            receipt = reset.apply()
            reference.reset(moments == "zero", step == "zero")
        train(model, optimizer, name, [at])
        reference.train(name, at)
    assert_close(model, slow)
    parameters = list(model.parameters())
    assert receipt.tensors == len(parameters) * (2 * (moments == "zero") + (step == "zero"))
    entries = sum(p.numel() for p in parameters)
    assert receipt.entries == 2 * entries * (moments == "zero") + len(parameters) * (step == "zero")


@pytest.mark.parametrize("name", ["Adam", "NAdam", "AdamW, amsgrad"])
def test_step_counts_start_again_and_averages_stay(name: str) -> None:
    model = zoo.build("mlp")
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, "mlp", range(4))
    averages = [state["exp_avg"].clone() for state in optimizer.state.values()]
    OptimizerReset(model, moments="keep").apply(optimizer)
    for state, average in zip(optimizer.state.values(), averages, strict=True):
        assert torch.equal(state["exp_avg"], average)
        assert float(state["step"]) == 0
        assert float(state.get("mu_product", 1.0)) == 1


def test_only_the_chosen_parameters() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, "mlp", range(2))
    OptimizerReset(model, where=lambda name, _: name.startswith("4.")).apply(optimizer)
    assert {name for name, p in model.named_parameters() if p not in optimizer.state} == {"4.weight", "4.bias"}


def test_state_that_cannot_be_reset_in_part_is_an_error() -> None:
    model = nn.Linear(3, 2)
    optimizer = LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(ValueError, match=r"LBFGS keeps .* which cannot be rewritten in part"):
        OptimizerReset(model, step="keep").apply(optimizer)
    OptimizerReset(model).apply(optimizer)
    assert not optimizer.state


def test_nothing_to_reset_is_said() -> None:
    model = zoo.build("mlp")
    optimizer: Optimizer = Adam(model.parameters())
    with pytest.warns(UserWarning, match=r"optimizer_reset.apply\(\) reset nothing"):
        OptimizerReset(model).apply(optimizer)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, "mlp", range(2))
    with pytest.warns(UserWarning, match="reset nothing"):
        OptimizerReset(model, moments="keep").apply(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OptimizerReset(model).apply(optimizer)


def test_settings_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ValueError, match="moments and step: both are 'keep'"):
        OptimizerReset(zoo.build("mlp"), moments="keep", step="keep")
    with pytest.raises(ValueError, match="step: 'reset' is not allowed"):
        OptimizerReset(zoo.build("mlp"), step="reset")
