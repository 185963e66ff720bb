"""Power iteration and its start at the leading singular pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pliant.methods._core.power_iteration import iterate_power_, leading_pair


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 90), columns=st.integers(1, 90), seed=st.integers(0, 99), decay=st.floats(0, 1))
def test_leading_pair_is_accurate(rows: int, columns: int, seed: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight *= torch.arange(1, columns + 1) ** -decay
    u, v = leading_pair(weight)
    exact = float(torch.linalg.matrix_norm(weight, 2))
    assert float(u @ weight @ v) == pytest.approx(exact, rel=1e-3)
    assert float(u.norm()) == pytest.approx(1) == pytest.approx(float(v.norm()))


@pytest.mark.parametrize("shape", [(512, 512), (256, 784), (64, 2304)])
def test_leading_pair_is_accurate_for_real_layer_sizes(shape: tuple[int, int]) -> None:
    """The largest singular values of a random matrix lie close together."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, v = leading_pair(weight)
    assert float(u @ weight @ v) == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-3)


def test_power_iteration_from_random_vectors_is_slow() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, u, v = (torch.randn(shape, generator=generator) for shape in ((512, 512), (512,), (512,)))
    for _ in range(30):
        sigma = iterate_power_(weight, u, v)
    assert float(sigma) < 0.995 * float(torch.linalg.matrix_norm(weight, 2))


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
def test_leading_pair_of_unusual_matrices(weight: Tensor) -> None:
    u, v = leading_pair(weight)
    largest = float(torch.linalg.matrix_norm(weight.double(), 2))
    assert float(u.norm()) == pytest.approx(1, rel=1e-5)
    assert float(v.norm()) == pytest.approx(1, rel=1e-5)
    assert float(u.double() @ weight.double() @ v.double()) == pytest.approx(largest, rel=1e-3)
