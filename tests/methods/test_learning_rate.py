"""Penalties whose strength follows the learning rate: the same run as with λ·lr/lr₀ in the loss."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, lr_scheduler

from pliant import L2Init, SpectralRegularization
from pliant.methods import Penalty, names, options
from tests import zoo
from tests.loops import train
from tests.methods.trajectories import assert_close
from tests.reference import penalties

LAM, STEPS = 0.05, 12
Term = Callable[[nn.Module], Tensor]


def l2_init(model: nn.Module) -> tuple[Penalty, Term]:
    penalty = L2Init(model, lam=LAM, schedule="coupled")
    initial = [p.detach().clone() for p in model.parameters()]
    return penalty, lambda m: sum(((p - q) ** 2).sum() / 2 for p, q in zip(m.parameters(), initial, strict=True))


def spectral(model: nn.Module) -> tuple[Penalty, Term]:
    penalty = SpectralRegularization(model, lam=LAM, schedule="coupled")
    vectors = {name: (penalty.left[name].clone(), penalty.right[name].clone()) for name in penalty.left}
    return penalty, lambda m: penalties.spectral(m, vectors, 2)


def decaying(model: nn.Module) -> tuple[SGD, lr_scheduler.LRScheduler]:
    optimizer = SGD(model.parameters(), lr=0.1)
    return optimizer, lr_scheduler.ExponentialLR(optimizer, 0.8)


@pytest.mark.parametrize("make", [l2_init, spectral])
def test_coupled_penalty_matches_the_scaled_term_in_the_loss(make: Callable[..., tuple[Penalty, Term]]) -> None:
    closed, slow = zoo.build("cnn_bn"), zoo.build("cnn_bn")
    penalty, term = make(closed)
    optimizer, scheduler = decaying(closed)
    penalty.attach(optimizer)
    for step in range(STEPS):
        train(closed, optimizer, "cnn_bn", [step])
        scheduler.step()
    optimizer, scheduler = decaying(slow)
    for step in range(STEPS):
        inputs, labels = zoo.batch("cnn_bn", seed=100 + step)
        optimizer.zero_grad()
        strength = LAM * optimizer.param_groups[0]["lr"] / 0.1
        (cross_entropy(slow(inputs), labels) + strength * term(slow)).backward()
        optimizer.step()
        scheduler.step()
    assert_close(closed, slow)


def test_coupled_penalty_resumes_with_its_first_rate() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.4)
    penalty = L2Init(model, lam=LAM, schedule="coupled").attach(optimizer)
    state = copy.deepcopy(penalty.state_dict())
    other = zoo.build("mlp")
    resumed = L2Init(other, lam=LAM, schedule="coupled")
    resumed.load_state_dict(state)
    optimizer = SGD(other.parameters(), lr=0.1)
    resumed.attach(optimizer)
    train(other, optimizer, "mlp", [0])
    assert set(resumed.strengths.values()) == {LAM * (0.1 / 0.4)}


def test_each_parameter_group_has_its_own_rate() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = SGD([{"params": layer.parameters(), "lr": 1.0} for layer in model])
    penalty = L2Init(model, lam=1.0, schedule="coupled").attach(optimizer)
    optimizer.param_groups[1]["lr"] = 0.25
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert penalty.strengths == {"0.weight": 1.0, "1.weight": 0.25}


def test_penalties_have_no_norms_to_reset() -> None:
    with pytest.raises(ValueError, match="schedule: 'reinit' is not allowed; it must be one of 'constant', 'coupled'"):
        L2Init(zoo.build("mlp"), schedule="reinit")


def test_every_penalty_on_parameters_takes_a_schedule() -> None:
    taking = {name for name in names() if "schedule" in options(name)}
    assert taking == {"swr", "l2", "l2_init", "spectral", "spectral_norm", "wasserstein", "parseval", "streaming_ewc"}
