"""The FIRE paper's lemmas and theorems as checks on random matrices and small networks (its §3 and A.1).

Weights are [inputs, outputs] here, as in the paper, so that a layer is ZW and DfI(W) = ‖WᵀW − I‖².
"""

import math
from itertools import pairwise

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import hessian

from pliant.diagnostics.features import covariance_distance, dormant_fraction, unit_scores
from pliant.diagnostics.spectra import srank
from pliant.diagnostics.weights import isometry_deviation
from pliant.methods._core.orthogonal import Iteration, orthogonalize

SEEDS = st.integers(0, 10**6)


def gaussian(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dfi(w: Tensor) -> float:
    return isometry_deviation(torch.linalg.svdvals(w), (w.shape[1], w.shape[0]), side="out")


def near_isometry(inputs: int, outputs: int, noise: float, seed: int) -> Tensor:
    """Return a matrix with orthonormal columns plus noise."""
    exact = orthogonalize(gaussian(inputs, outputs, seed=seed)[None], Iteration("exact")).matrices[0]
    return exact + noise * gaussian(inputs, outputs, seed=seed + 1)


def whitened(samples: int, inputs: int, seed: int) -> Tensor:
    """Return inputs with ZᵀZ/n = I exactly."""
    z = gaussian(samples, inputs, seed=seed)
    return math.sqrt(samples) * orthogonalize(z[None], Iteration("exact")).matrices[0]


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0, 3), SEEDS)
@settings(max_examples=80, deadline=None)
def test_lemma_1_dfi_bounds_the_spectral_norm(inputs: int, outputs: int, noise: float, seed: int) -> None:
    w = noise * gaussian(inputs, outputs, seed=seed)
    assert float(torch.linalg.matrix_norm(w, 2)) ** 2 <= 1 + math.sqrt(dfi(w)) + 1e-12


@given(st.integers(1, 4), st.floats(0.01, 2), st.sampled_from([torch.relu, torch.tanh]), SEEDS)
@settings(max_examples=60, deadline=None)
def test_theorem_1_sfe_bounds_the_feature_covariance(depth: int, noise: float, activation: object, seed: int) -> None:
    widths = [5, 6, 4, 7, 3][: depth + 1]
    pairs = list(pairwise(widths))
    theta = [gaussian(a, b, seed=seed + i) / math.sqrt(a) for i, (a, b) in enumerate(pairs)]
    other = [w + noise * gaussian(*w.shape, seed=seed + 50 + i) for i, w in enumerate(theta)]
    z = gaussian(10, 5, seed=seed + 99)
    h, h_other, bounds, sfe = z, z, [], 0.0
    for w, w_other in zip(theta, other, strict=True):
        h, h_other = activation(h @ w), activation(h_other @ w_other)  # type: ignore[operator]
        assume(float(h.norm()) > 1e-6)
        assume(float(h_other.norm()) > 1e-6)
        bounds.append(max(float(torch.linalg.matrix_norm(v, 2)) for v in (w, w_other)))
        sfe += float((w - w_other).square().sum())
        smallest = min(float(h.norm()), float(h_other.norm()))
        product = math.prod(bounds) ** 2 * sum(b**-2 for b in bounds)
        bound = 16 * float(z.square().sum()) / smallest**2 * product * sfe
        assert covariance_distance(h, h_other) ** 2 <= bound * (1 + 1e-12)


def relu_network(parameters: Tensor, shapes: list[tuple[int, int]], z: Tensor) -> Tensor:
    h, start = z, 0
    for i, (a, b) in enumerate(shapes):
        h = h @ parameters[start : start + a * b].view(a, b)
        start += a * b
        if i < len(shapes) - 1:
            h = torch.relu(h)
    return h


@given(st.floats(0, 0.5), SEEDS)
@settings(max_examples=30, deadline=None)
def test_theorem_2_dfi_bounds_the_hessian(noise: float, seed: int) -> None:
    """With squared error, the Hessian in the outputs is the identity (β = 1) and γ is the largest residual."""
    shapes = [(4, 4), (4, 4), (4, 3)]
    z = whitened(12, 4, seed)
    target = 0.1 * gaussian(12, 3, seed=seed + 7)
    weights = [near_isometry(a, b, noise, seed + 10 * i) for i, (a, b) in enumerate(shapes)]
    theta = torch.cat([w.flatten() for w in weights])

    def loss(parameters: Tensor) -> Tensor:
        return (relu_network(parameters, shapes, z) - target).square().sum(1).mean() / 2

    gamma = float((relu_network(theta, shapes, z) - target).norm(dim=1).max())
    nu = [1 + math.sqrt(dfi(w)) for w in weights]
    norm = float(torch.linalg.matrix_norm(hessian(loss)(theta), 2))
    assert norm <= theorem_2(nu, gamma)
    assert norm <= theorem_2(nu, gamma, inputs=4)


def theorem_2(nu: list[float], gamma: float, inputs: int = 1) -> float:
    """Return the paper's bound for β = 1, or, given the number of inputs, a bound that holds in general."""
    total, layers = math.prod(nu), range(len(nu))
    first = sum(total / nu[k] * (1 if k == 0 else inputs) for k in layers)
    pairs = [(k, l) for k in layers for l in layers if k < l]
    return first + 2 * gamma * math.sqrt(inputs) * sum(total / (nu[k] * nu[l]) for k, l in pairs)


def test_theorem_2_as_printed_fails_on_wide_networks() -> None:
    """Lemma 2 assumes that ReLU contracts the spectral norm of a batch; it only contracts the Frobenius norm.

    ReLU units share a mean, so λ_max(Σ_H) grows with the width. At width 64, two exact isometries without a residual
    (γ = 0) have a Hessian above the bound of 2. The bound λ_max(Σ_H) ≤ tr Σ_H ≤ d₀·Πν does hold, which multiplies the
    terms of all layers after the first by d₀.
    """
    z = whitened(512, 64, seed=0)
    hidden = torch.relu(z @ near_isometry(64, 64, 0.0, 1))
    # With squared error, the last layer's block of the Hessian is Σ_H, once per output.
    last_block = float(torch.linalg.matrix_norm(hidden.T @ hidden / len(z), 2))
    assert last_block > 4 * theorem_2([1.0, 1.0], gamma=0.0)
    assert last_block <= theorem_2([1.0, 1.0], gamma=0.0, inputs=64)


@given(st.integers(2, 6), st.floats(0, 0.2), st.floats(0.005, 0.4), st.booleans(), SEEDS)
@settings(max_examples=80, deadline=None)
def test_theorem_3_dfi_bounds_srank(outputs: int, noise: float, delta: float, white: bool, seed: int) -> None:
    inputs = outputs + 2
    w = near_isometry(inputs, outputs, noise, seed)
    epsilon = math.sqrt(dfi(w))
    assume(epsilon < 1)
    z = whitened(20, inputs, seed + 5)
    if not white:
        z = z @ torch.diag(torch.logspace(0, -1, inputs, dtype=torch.float64))
    q = orthogonalize(w[None], Iteration("exact")).matrices[0]
    eta = torch.linalg.eigvalsh(q.T @ (z.T @ z / len(z)) @ q)
    ratio = math.sqrt((1 + epsilon) / (1 - epsilon)) * (1.0 if white else math.sqrt(float(eta[-1] / eta[0])))
    bound = math.ceil((1 - delta) * outputs / (delta * ratio + 1 - delta) - 1e-9)
    assert srank(torch.linalg.svdvals(z @ w), delta) >= bound


@given(st.integers(1, 8), st.floats(0, 0.3), SEEDS)
@settings(max_examples=80, deadline=None)
def test_theorem_4_dfi_bounds_dormancy(outputs: int, noise: float, seed: int) -> None:
    """For Gaussian inputs and a homogeneous activation, a unit's mean activation is proportional to ‖w_j‖."""
    w = near_isometry(outputs + 2, outputs, noise, seed)
    epsilon = math.sqrt(dfi(w))
    assume(epsilon < 1)
    scores = unit_scores(w.norm(dim=0))
    bound = math.sqrt((1 - epsilon) / (1 + epsilon))
    assert float(scores.min()) >= bound - 1e-12
    assert float(scores.max()) <= 1 / bound + 1e-9


@given(st.integers(1, 8), st.floats(0.01, 0.99), SEEDS)
@settings(max_examples=80, deadline=None)
def test_corollary_2_small_dfi_leaves_no_unit_dormant(outputs: int, tau: float, seed: int) -> None:
    threshold = ((1 - tau**2) / (1 + tau**2)) ** 2
    direction = gaussian(outputs + 2, outputs, seed=seed)
    exact = orthogonalize(gaussian(outputs + 2, outputs, seed=seed + 1)[None], Iteration("exact")).matrices[0]
    noise = 1.0
    while dfi(exact + noise * direction) > threshold:
        noise *= 0.8
    w = exact + noise * direction
    scores = unit_scores(w.norm(dim=0))
    assert dormant_fraction(scores, tau - 1e-9) == 0


def test_theorem_4_on_samples() -> None:
    """Theorem 4 assumes mean activations proportional to ‖w_j‖, as this large Gaussian sample shows."""
    w = near_isometry(6, 5, 0.1, 3)
    z = gaussian(200_000, 6, seed=8)
    scores = unit_scores(torch.relu(z @ w).mean(0))
    torch.testing.assert_close(scores, unit_scores(w.norm(dim=0)), rtol=0.02, atol=0)
