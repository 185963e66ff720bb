import math
from functools import partial
from typing import Any

import pytest
import torch
from curvlinops import GGNLinearOperator, HessianLinearOperator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, mse_loss

from pliant import diagnostics
from pliant.diagnostics import curvature
from pliant.diagnostics.batches import Batch
from pliant.diagnostics.curvature import hessian_product, lanczos, sharpness
from tests.diagnostics.networks import network
from tests.reference.gradients import flat, hessian, per_sample_gradients


def dense(operator: object) -> Tensor:
    """Return a linear operator of curvlinops as a matrix."""
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)  # type: ignore[operator, attr-defined, no-any-return]


class Quadratic(nn.Module):
    """½ θᵀAθ − bᵀθ, whatever the input: a loss whose Hessian is A everywhere."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.theta, self.matrix = nn.Parameter(torch.randn(len(matrix), dtype=torch.float64)), matrix

    def forward(self, x: Tensor) -> Tensor:
        return (self.theta @ self.matrix @ self.theta / 2 - x @ self.theta).unsqueeze(1)


def quadratic(eigenvalues: list[float]) -> tuple[nn.Module, Batch, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64)).Q
    matrix = q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T
    x = torch.randn(5, len(eigenvalues), generator=generator, dtype=torch.float64)
    return Quadratic(matrix), Batch.of((x, torch.zeros(5))), matrix


def output_as_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def test_quadratic_has_the_hessian_and_the_sharpness_it_was_given() -> None:
    model, batch, matrix = quadratic([-2.0, 0.5, 1.0, 7.0])
    torch.testing.assert_close(curvature.hessian(model, batch, output_as_loss), matrix, rtol=1e-12, atol=1e-12)
    found = sharpness(model, batch, output_as_loss)
    assert found.largest == pytest.approx(7)
    assert found.smallest == pytest.approx(-2)
    assert found.converged
    assert found.iterations <= 4


@pytest.mark.parametrize("name", ["mlp", "norms", "twice", "conv1d", "residual"])
def test_hessian_is_the_second_derivative(name: str) -> None:
    model, batch, loss_fn = network(name)
    torch.testing.assert_close(
        curvature.hessian(model, batch, loss_fn), hessian_or_zero(model, batch), rtol=1e-9, atol=1e-12
    )


def hessian_or_zero(model: nn.Module, batch: Batch) -> Tensor:
    """The reference, for models with an unused layer too."""
    for name in ("unused.weight", "unused.bias"):
        if name in dict(model.named_parameters()):
            model.get_parameter(name).data.zero_()
    return hessian(model, batch, lambda out, y: cross_entropy(out, y) + 0 * sum(p.sum() for p in model.parameters()))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_hessian_and_gauss_newton_are_those_of_curvlinops(loss: nn.Module) -> None:
    model, batch, _ = network("mlp")
    (x,), y = batch.args, batch.target
    if isinstance(loss, nn.MSELoss):
        y = torch.randn(len(x), 4, dtype=torch.float64)
        batch = Batch.of((x, y))
    parameters = list(model.parameters())
    theirs = dense(HessianLinearOperator(model, loss, parameters, [(x, y)]))
    torch.testing.assert_close(curvature.hessian(model, batch, loss), theirs, rtol=1e-9, atol=1e-12)
    theirs = dense(GGNLinearOperator(model, loss, parameters, [(x, y)]))
    torch.testing.assert_close(curvature.gauss_newton(model, batch, loss), theirs, rtol=1e-9, atol=1e-12)


# Networks without norm layers: curvlinops differentiates forwards over backwards, which in PyTorch 2.13 gives other
# numbers for the scales of norm layers than finite differences do. Those are tested against finite differences below.
@pytest.mark.parametrize("name", ["mlp", "twice", "positions", "gpt2_linear"])
def test_sharpness_is_the_largest_eigenvalue_of_curvlinops_hessian(name: str) -> None:
    model, batch, loss_fn = network(name)
    found = sharpness(model, batch, loss_fn, tolerance=1e-9, iterations=200)
    data = [(batch.args[0], batch.target)]
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    spectrum = torch.linalg.eigvalsh(dense(operator))
    assert found.largest == pytest.approx(float(spectrum[-1]), rel=1e-8)
    assert found.residual <= 1e-9 * float(spectrum.abs().max())
    assert found.asymmetry < 1e-10


@pytest.mark.parametrize("name", ["cnn", "conv1d", "language", "residual"])
def test_product_with_the_hessian_is_the_change_of_the_gradient(name: str) -> None:
    model, batch, loss_fn = network(name)
    if name == "language":
        model.embed.padding_idx = None  # which would set part of the gradient to zero
    along = torch.randn(
        sum(p.numel() for p in model.parameters()), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    parameters = list(model.parameters())
    there = torch.nn.utils.parameters_to_vector(parameters).detach()

    def gradient(step: float) -> Tensor:
        torch.nn.utils.vector_to_parameters(there + step * along, parameters)
        loss = loss_fn(batch.forward(model), batch.target)
        return flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)

    expected = (gradient(1e-6) - gradient(-1e-6)) / 2e-6
    torch.nn.utils.vector_to_parameters(there, parameters)
    multiply, _ = hessian_product(model, batch, loss_fn)
    assert float((multiply(along) - expected).norm() / expected.norm()) < 1e-6


def test_gauss_newton_is_the_expected_fisher_of_a_softmax() -> None:
    model, batch, _ = network("mlp")
    exact = curvature.gauss_newton(model, batch, cross_entropy)
    with torch.no_grad():
        probabilities = batch.forward(model).softmax(-1)
    expected = torch.zeros_like(exact)
    for label in range(probabilities.shape[1]):
        labeled = Batch.of((batch.args[0], torch.full((batch.size,), label)))
        g = per_sample_gradients(model, labeled, cross_entropy)
        expected += (g * probabilities[:, label, None]).T @ g / batch.size
    torch.testing.assert_close(expected, exact, rtol=1e-10, atol=1e-14)
    drawn = curvature.fisher(model, batch, draws=500)
    assert float((drawn - exact).norm() / exact.norm()) < 0.05


def test_linear_regression_is_its_own_gauss_newton() -> None:
    model = nn.Linear(4, 2).double()
    batch = Batch.of((torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)))
    torch.testing.assert_close(
        curvature.gauss_newton(model, batch, mse_loss),
        curvature.hessian(model, batch, mse_loss),
        rtol=1e-10,
        atol=1e-12,
    )


def test_lanczos_stops_early_and_says_so() -> None:
    diagonal = torch.linspace(0, 1, 500, dtype=torch.float64)
    few = lanczos(lambda v: diagonal * v, 500, iterations=5)
    assert not few.converged
    assert few.iterations == 5
    assert abs(few.largest - 1) <= few.residual
    enough = lanczos(lambda v: diagonal * v, 500, iterations=200, tolerance=1e-8)
    assert enough.converged
    assert enough.largest == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("lowest", [-1.0, -10.0, -100.0, -1000.0])
def test_lanczos_converges_to_the_largest_and_not_to_the_largest_in_absolute_value(lowest: float) -> None:
    inner = torch.linspace(0, 1, 2000, dtype=torch.float64) ** 3
    diagonal = torch.cat([inner, torch.tensor([lowest], dtype=torch.float64)])
    found = lanczos(lambda v: diagonal * v, len(diagonal), iterations=100, tolerance=1e-2)
    assert found.converged
    assert found.largest == pytest.approx(1, rel=1e-2)


def test_sharpness_does_not_stop_at_an_eigenvalue_on_the_way() -> None:
    for seed in range(300):  # From one of these starts the second largest is met first, its residual below tolerance.
        spectrum = torch.rand(300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 8 * 2 - 0.2
        spectrum[:2] = torch.tensor([3.0, 2.5])
        found = lanczos(partial(torch.mul, spectrum), 300, tolerance=1e-2, seed=seed)
        assert found.largest == pytest.approx(3.0, rel=1e-2), seed


def test_lanczos_measures_asymmetry() -> None:
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    assert lanczos(lambda v: matrix @ v, 4).asymmetry < 1e-14
    matrix[0, 3] = 0.5
    assert lanczos(lambda v: matrix @ v, 4).asymmetry > 0.01


def test_exhausted_directions_are_not_taken_for_asymmetry() -> None:
    """Of a network with a dead layer the Hessian has few directions; what is left of the next vector is rounding."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        with torch.no_grad():
            model[2].bias.fill_(-50.0)
        found = diagnostics.measure(
            model, (torch.randn(128, 64), torch.randn(128, 1)), mse_loss, measures=["sharpness"]
        )
        assert not found.notes


class Squared(torch.autograd.Function):
    """x², of which the second derivative is lost."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


def test_a_hessian_that_is_not_symmetric_has_no_rank() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Squared.apply(self.a(x)))

    batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
    found = diagnostics.measure(Model(), batch, cross_entropy, measures=["hessian_exact_rank"])
    assert "the Hessian is not symmetric" in found.skipped["hessian_exact_rank"]


class Tempered(nn.Module):
    """A scalar parameter, and logits of another precision than the weights if these are of half."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.body = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).float() * self.temperature.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_matrices_of_any_parameters_and_precision(dtype: torch.dtype, autocast: bool) -> None:
    batch = torch.randn(8, 4), torch.randint(0, 3, (8,))
    model, ranks = Tempered().to(dtype), ["hessian_exact_rank", "gauss_newton_rank", "fisher_rank"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = diagnostics.measure(model, batch, cross_entropy, measures=ranks)
    assert found.values.keys() == set(ranks)
    assert all(0 < value <= 1 for value in found.values.values())


def test_lanczos_of_the_zero_matrix_and_of_multiples_of_the_identity() -> None:
    assert lanczos(lambda v: 0 * v, 10).largest == 0
    assert lanczos(lambda v: 3 * v, 10).largest == pytest.approx(3)


def test_arguments_out_of_range_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, loss_fn = network("mlp")
    with pytest.raises(ValueError, match="iterations: 0 is not allowed; it must be an integer ≥ 1"):
        sharpness(model, batch, loss_fn, iterations=0)
    with pytest.raises(ValueError, match="must be finite"):
        lanczos(lambda v: v * math.nan, 3)
    with pytest.raises(ValueError, match="draws: 0 is not allowed; it must be an integer ≥ 1"):
        curvature.fisher(model, batch, draws=0)
    with pytest.raises(ValueError, match="most: 0 is not allowed; it must be an integer ≥ 1"):
        curvature.relative_rank(torch.eye(2), 0)
    monkeypatch.setattr(curvature, "MOST_PARAMETERS", 10)
    with pytest.raises(ValueError, match="at most 10 learnable parameters"):
        curvature.hessian(model, batch, loss_fn)
