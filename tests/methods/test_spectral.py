"""Spectral regularization: the closed form, its vectors, and weights of zeros or NaN."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD

from pliant import ParsevalRegularization, SpectralNormPenalty, SpectralRegularization
from pliant.methods._core.power_iteration import iterate_power_
from pliant.methods.spectral import spectral_cost, spectral_slope
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close, train_with_term
from tests.reference import penalties

LAM = 0.05


def vectors_of(method: SpectralRegularization | SpectralNormPenalty) -> penalties.Vectors:
    return {name: (method.left[name].clone(), method.right[name].clone()) for name in method.left}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", [*zoo.PAPER_MODELS, "tied"])
def test_same_trajectory_as_the_term_in_the_loss(name: str, optimizer: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    made = OPTIMIZERS[optimizer](closed)
    penalty = SpectralRegularization(closed, lam=LAM).attach(made)
    vectors = vectors_of(penalty)
    train(closed, made, name, range(STEPS[name]))
    train_with_term(slow, name, OPTIMIZERS[optimizer](slow), lambda m: LAM * penalties.spectral(m, vectors, 2))
    assert_close(closed, slow)
    for key, (u, v) in vectors.items():
        torch.testing.assert_close(penalty.left[key], u, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(penalty.right[key], v, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_exponents(k: float) -> None:
    closed, slow = zoo.build("cnn_bn"), zoo.build("cnn_bn")
    optimizer = SGD(closed.parameters(), lr=1e-3)
    penalty = SpectralRegularization(closed, lam=LAM, k=k).attach(optimizer)
    vectors = vectors_of(penalty)
    value = penalties.spectral(slow, dict(vectors), k).item()
    train(closed, optimizer, "cnn_bn", range(STEPS["cnn_bn"]))
    train_with_term(slow, "cnn_bn", SGD(slow.parameters(), lr=1e-3), lambda m: LAM * penalties.spectral(m, vectors, k))
    assert_close(closed, slow)
    assert float(SpectralRegularization(zoo.build("cnn_bn"), lam=LAM, k=k).value()) == pytest.approx(
        LAM * value, rel=1e-3
    )


def test_converged_vectors_give_the_gradient_of_the_true_norm() -> None:
    model = zoo.build("mlp")
    penalty = SpectralRegularization(model, lam=LAM, where=lambda name, p: name.endswith("weight"))
    for name in penalty.left:
        weight, u, v = model.get_parameter(name).detach(), penalty.left[name], penalty.right[name]
        for _ in range(2000):
            iterate_power_(weight, u, v)
    model.zero_grad(set_to_none=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    penalty.step()
    other = zoo.build("mlp")
    (LAM * sum((torch.linalg.matrix_norm(other[i].weight, 2) ** 2 - 1) ** 2 for i in (0, 2, 4))).backward()
    for i in (0, 2, 4):
        torch.testing.assert_close(model[i].weight.grad, other[i].weight.grad, rtol=1e-9, atol=1e-12)


def test_estimate_follows_the_weights() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.05)
    penalty = SpectralRegularization(model, lam=0.1).attach(optimizer)
    train(model, optimizer, "mlp", range(60))
    for name in ("0.weight", "2.weight", "4.weight"):
        exact = float(torch.linalg.matrix_norm(model.get_parameter(name).detach(), 2))
        assert float(penalty.sigma(name)) == pytest.approx(exact, rel=1e-2)


def test_spectral_pulls_towards_one_and_spectral_norm_towards_zero() -> None:
    for cls, target in ((SpectralRegularization, 1.0), (SpectralNormPenalty, 0.0)):
        model = zoo.build("mlp")
        penalty = cls(model, lam=0.5)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(1500):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            penalty.step()
            optimizer.step()
        for layer in (model[0], model[2], model[4]):
            assert float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) == pytest.approx(target, abs=2e-2)


def test_weight_of_zeros_can_grow_again() -> None:
    model = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    penalty = SpectralRegularization(model, lam=1.0)
    model.weight.grad = torch.zeros_like(model.weight)
    penalty.step()
    assert torch.equal(model.weight.grad, torch.zeros_like(model.weight))
    model.weight.data.copy_(2 * torch.eye(3, 4))
    for _ in range(3):
        penalty.step()
    assert float(penalty.sigma("weight")) == pytest.approx(2.0)


def test_reading_the_receipt_changes_nothing() -> None:
    runs = []
    for read in (False, True):
        model = zoo.build("cnn_bn")
        optimizer = SGD(model.parameters(), lr=0.05)
        penalty = SpectralRegularization(model, lam=LAM).attach(optimizer)
        for step in range(6):
            train(model, optimizer, "cnn_bn", [step])
            if read:
                assert penalty.receipt is not None
                assert penalty.receipt.details["gradient_norm"] > 0
        runs.append(snapshot(model))
    assert_same(*runs)


def test_vectors_are_fixed_during_a_line_search() -> None:
    """During a step of LBFGS, only the first evaluation updates the vectors, so that the values are comparable."""
    model = zoo.build("mlp")
    optimizer = LBFGS(model.parameters(), lr=1.0, max_iter=6, line_search_fn="strong_wolfe")
    penalty = SpectralRegularization(model, lam=LAM).attach(optimizer)
    inputs, labels = zoo.batch("mlp", size=40)
    seen: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        seen.append(penalty.left["0.weight"].clone())
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(seen) > 3
    assert not torch.equal(seen[0], seen[1])  # updated after the first call of the closure
    assert all(torch.equal(seen[1], later) for later in seen[2:])
    assert penalty.steps == [1]


def test_only_parameters_with_a_strength_are_pulled() -> None:
    model = zoo.build("cnn_bn")
    penalty = SpectralRegularization(model, lam={"9.*": 1.0})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    penalty.step()
    touched = {name for name, p in model.named_parameters() if p.grad.any()}
    assert touched == {"9.weight", "9.bias"}


@pytest.mark.parametrize("k", [0.5, 0, -1, float("inf")])
def test_invalid_exponent_is_an_error(k: float) -> None:
    with pytest.raises(ValueError, match=r"k: .* is not allowed"):
        SpectralRegularization(zoo.build("mlp"), k=k)


@pytest.mark.parametrize("k", [1.0, 1.5, 2.0, 3.0])
def test_sign_of_the_weights_does_not_change_the_term(k: float) -> None:
    model = nn.Linear(4, 3, bias=False).double()
    penalty = SpectralRegularization(model, lam=1.0, k=k)
    before = penalty.value()
    with torch.no_grad():
        model.weight.neg_()
    torch.testing.assert_close(penalty.value(), before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", [SpectralRegularization, SpectralNormPenalty, ParsevalRegularization])
def test_autocast_changes_nothing(method: Any) -> None:
    def run(cast: bool) -> dict[str, torch.Tensor]:
        model = zoo.build("cnn").float()
        optimizer = SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            method(model, lam=0.1).attach(optimizer)
        for step in range(2):
            inputs, labels = zoo.batch("cnn", seed=step, dtype=torch.float32)
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                optimizer.step()
        return snapshot(model)

    assert_same(run(cast=True), run(cast=False))


@pytest.mark.parametrize("method", [SpectralRegularization, SpectralNormPenalty])
def test_recovers_from_nan_weights(method: Any) -> None:
    model = zoo.build("mlp")
    penalty = method(model, lam=0.1)
    good = snapshot(model)
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    penalty.step()
    model.load_state_dict(good)
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        penalty.step()
    largest = float(torch.linalg.matrix_norm(model[2].weight.detach(), 2))
    assert float(penalty.sigma("2.weight")) == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize("k", [1.0, 1.5, 2, 3, 4])
def test_slope_is_the_derivative_of_the_cost(k: float) -> None:
    sigma = torch.tensor([-2.0, -0.7, 0.4, 1.3], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(spectral_cost(sigma, k).sum(), sigma)
    torch.testing.assert_close(spectral_slope(sigma.detach(), k), slope)
