"""Gram matrices in panels."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.methods._core.orthogonal import gram


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 40) | st.integers(500, 530),
    seed=st.integers(0, 99),
    transposed=st.booleans(),
)
def test_gram_equals_the_full_product(rows: int, columns: int, seed: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if transposed:
        matrix = torch.randn(columns, rows, generator=generator, dtype=torch.float64).mT
    matrix = matrix / columns**0.5
    result = gram(matrix)
    torch.testing.assert_close(result, matrix @ matrix.mT, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result, result.mT, rtol=1e-14, atol=1e-14)
