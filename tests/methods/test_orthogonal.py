"""Orthogonalization: solvers against Newton–Schulz iteration and the polar factor."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pliant.methods._core.orthogonal import Iteration, orthogonalize
from tests.reference import fire as reference

SOLVERS = ("auto", "loop", "gram", "eigh", "svd")


POLYNOMIALS = ("cubic", "quintic")


HARD: dict[str, Callable[[], Tensor]] = {
    "square": lambda: torch.randn(96, 96),
    "tall": lambda: torch.randn(256, 64),
    "wide": lambda: torch.randn(64, 256),
    "one direction dominates": lambda: torch.randn(96, 96) + 20 * torch.randn(96, 1) @ torch.randn(1, 96),
    "five decades": lambda: _with_values(torch.logspace(0, -5, 96)),
    "half of the rank": lambda: torch.randn(96, 48) @ torch.randn(48, 96),
    "dead units": lambda: torch.cat([torch.randn(48, 96), torch.zeros(48, 96)]),
}


def _with_values(values: Tensor) -> Tensor:
    size = len(values)
    left, right = (torch.linalg.qr(torch.randn(size, size))[0] for _ in range(2))
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("polynomial", POLYNOMIALS)
@pytest.mark.parametrize("solver", ["auto", "loop", "eigh", "svd"])
def test_float32_accuracy(solver: Any, polynomial: Any, kind: str) -> None:
    torch.manual_seed(3)
    matrix = HARD[kind]()
    result = orthogonalize(matrix[None], Iteration(polynomial, 10), solver).matrices[0]
    exact = reference.newton_schulz(matrix, 10, polynomial)
    assert torch.linalg.matrix_norm(result.double() - exact, 2) < 4e-4


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("solver", ["auto", "eigh", "svd"])
def test_exact_keeps_null_directions_null(solver: Any, kind: str) -> None:
    torch.manual_seed(4)
    matrix = HARD[kind]()
    result = orthogonalize(matrix[None], Iteration("exact"), solver)
    values = torch.linalg.svdvals(result.matrices[0].double())
    rank = int(torch.linalg.matrix_rank(matrix))
    assert torch.allclose(values[:rank], torch.ones(rank, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(values[rank:], torch.zeros(len(values) - rank, dtype=torch.float64), atol=1e-4)
    assert abs(float(result.deviation[0]) - (len(values) - rank)) < 1e-3


def test_exact_equals_the_polar_factor() -> None:
    torch.manual_seed(5)
    for shape in [(12, 12), (30, 7), (7, 30)]:
        matrix = torch.randn(shape, dtype=torch.float64)
        result = orthogonalize(matrix[None], Iteration("exact")).matrices[0]
        torch.testing.assert_close(result, reference.polar_factor(matrix), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("polynomial", [*POLYNOMIALS, "exact"])
def test_zero_matrix_stays_zero(polynomial: Any, solver: Any) -> None:
    if polynomial == "exact" and solver in ("loop", "gram"):
        with pytest.raises(ValueError, match=f"solver: '{solver}' iterates, which never reaches the exact factor"):
            orthogonalize(torch.zeros(1, 3, 3), Iteration(polynomial), solver)
        return
    batch = torch.stack([torch.zeros(4, 3), torch.eye(4, 3)])
    result = orthogonalize(batch, Iteration(polynomial, 10), solver)
    assert torch.equal(result.matrices[0], torch.zeros(4, 3))
    assert float(result.deviation[0]) == 3.0
    assert torch.allclose(result.matrices[1], torch.eye(4, 3), atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    polynomial=st.sampled_from(POLYNOMIALS),
)
def test_deviation_decreases_with_every_iteration(rows: int, columns: int, seed: int, polynomial: Any) -> None:
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    deviations = [
        float(orthogonalize(matrix[None], Iteration(polynomial, n), "loop").deviation[0]) for n in range(1, 25)
    ]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(deviations))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 7), columns=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_limit_is_the_nearest_orthogonal_matrix(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    if torch.linalg.cond(matrix) > 1e4:
        return
    polar = reference.polar_factor(matrix)
    limit = orthogonalize(matrix[None], Iteration("cubic", 60), "loop").matrices[0]
    torch.testing.assert_close(limit, polar, rtol=1e-9, atol=1e-9)
    nearest = float((matrix - limit).square().sum())
    for _ in range(20):
        other = reference.polar_factor(torch.randn(rows, columns, dtype=torch.float64, generator=generator))
        close = reference.polar_factor(polar + 0.1 * other)
        for orthogonal in (other, close):
            assert float((matrix - orthogonal).square().sum()) >= nearest - 1e-9
