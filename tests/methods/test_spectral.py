"""Spectral regularization: the power iteration, the closed form, and what happens at zero."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD

from pliant import ParsevalRegularization, SpectralNormPenalty, SpectralRegularization
from pliant.methods._core.power_iteration import iterate_power_, leading_pair
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


@pytest.mark.parametrize("name", ["mlp", "cnn_bn"])
def test_spectral_norm_has_the_trajectory_of_the_term_in_the_loss(name: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    optimizer = OPTIMIZERS["adam"](closed)
    penalty = SpectralNormPenalty(closed, lam=LAM).attach(optimizer)
    vectors = vectors_of(penalty)
    train(closed, optimizer, name, range(STEPS[name]))
    train_with_term(slow, name, OPTIMIZERS["adam"](slow), lambda m: LAM * penalties.spectral_norm(m, vectors))
    assert_close(closed, slow)


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 90), columns=st.integers(1, 90), seed=st.integers(0, 99), decay=st.floats(0, 1))
def test_the_start_is_already_good(rows: int, columns: int, seed: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight *= torch.arange(1, columns + 1) ** -decay
    u, v = leading_pair(weight)
    exact = float(torch.linalg.matrix_norm(weight, 2))
    assert float(u @ weight @ v) == pytest.approx(exact, rel=1e-3)
    assert float(u.norm()) == pytest.approx(1) == pytest.approx(float(v.norm()))


@pytest.mark.parametrize("shape", [(512, 512), (256, 784), (64, 2304)])
def test_the_start_is_good_on_layers_of_real_size(shape: tuple[int, int]) -> None:
    """The largest singular values of a random matrix lie close together."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, v = leading_pair(weight)
    assert float(u @ weight @ v) == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-3)


def test_plain_power_iteration_would_take_long_to_get_there() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, u, v = (torch.randn(shape, generator=generator) for shape in ((512, 512), (512,), (512,)))
    for _ in range(30):
        sigma = iterate_power_(weight, u, v)
    assert float(sigma) < 0.995 * float(torch.linalg.matrix_norm(weight, 2))


def test_with_converged_vectors_it_is_the_gradient_of_the_true_norm() -> None:
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


def test_the_estimate_follows_the_weights() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.05)
    penalty = SpectralRegularization(model, lam=0.1).attach(optimizer)
    train(model, optimizer, "mlp", range(60))
    for name in ("0.weight", "2.weight", "4.weight"):
        exact = float(torch.linalg.matrix_norm(model.get_parameter(name).detach(), 2))
        assert float(penalty.sigma(name)) == pytest.approx(exact, rel=1e-2)


def test_it_pulls_towards_one_and_spectral_norm_towards_zero() -> None:
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


def test_a_weight_that_is_all_zero_can_grow_again() -> None:
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


def test_a_line_search_sees_one_function_of_the_parameters() -> None:
    """In a step of LBFGS the vectors stay where the first evaluation put them, so that values compare."""
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
    assert not torch.equal(seen[0], seen[1])  # the first evaluation moves the vectors, after the closure has run
    assert all(torch.equal(seen[1], later) for later in seen[2:])
    assert penalty.steps == {"0.weight": 1}


def test_only_the_filtered_parameters_are_pulled() -> None:
    model = zoo.build("cnn_bn")
    penalty = SpectralRegularization(model, lam={"9.*": 1.0})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    penalty.step()
    touched = {name for name, p in model.named_parameters() if p.grad.any()}
    assert touched == {"9.weight", "9.bias"}


@pytest.mark.parametrize("k", [0.5, 0, -1, float("inf")])
def test_an_exponent_that_makes_no_sense_is_an_error(k: float) -> None:
    with pytest.raises(ValueError, match=r"k: .* is not allowed"):
        SpectralRegularization(zoo.build("mlp"), k=k)


def test_a_model_without_matrices_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        SpectralNormPenalty(nn.LayerNorm(3))


@pytest.mark.parametrize(
    "weight",
    [
        torch.outer(torch.arange(1.0, 51), torch.arange(1.0, 41)),
        torch.randn(40, 2, generator=torch.Generator().manual_seed(0)) @ torch.ones(2, 60).tril(5),
        torch.outer(*torch.randn(2, 50, generator=torch.Generator().manual_seed(0))),
        torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        @ torch.randn(2, 60, generator=torch.Generator().manual_seed(1)),
        torch.eye(40),
        torch.randn(300, 300, generator=torch.Generator().manual_seed(0)) * 1e-20,
        torch.full((5, 7), 1e25),
    ],
    ids=["ramp", "blocks", "rank 1", "rank 2", "identity", "tiny", "huge"],
)
def test_the_leading_pair_of_a_matrix_of_low_rank_or_odd_size(weight: Tensor) -> None:
    u, v = leading_pair(weight)
    largest = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert float(u.norm()) == pytest.approx(1, rel=1e-5)
    assert float(v.norm()) == pytest.approx(1, rel=1e-5)
    assert float(u.double() @ weight.double() @ v.double()) == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize("k", [1.0, 1.5, 2.0, 3.0])
def test_the_term_is_the_same_of_weights_that_changed_their_sign(k: float) -> None:
    model = nn.Linear(4, 3, bias=False).double()
    penalty = SpectralRegularization(model, lam=1.0, k=k)
    before = penalty.value()
    with torch.no_grad():
        model.weight.neg_()
    torch.testing.assert_close(penalty.value(), before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", [SpectralRegularization, SpectralNormPenalty, ParsevalRegularization])
def test_autocast_around_it_changes_nothing(method: Any) -> None:
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
def test_it_recovers_from_a_weight_that_was_not_finite(method: Any) -> None:
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
def test_the_slope_is_that_of_the_cost_below_zero_too(k: float) -> None:
    method = SpectralRegularization(nn.Linear(2, 2), k=k)
    sigma = torch.tensor([-2.0, -0.7, 0.4, 1.3], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(method._cost(sigma).sum(), sigma)
    torch.testing.assert_close(method._slope(sigma.detach()), slope)
