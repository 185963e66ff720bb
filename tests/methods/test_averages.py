"""Bias-corrected moving averages."""

import pytest
import torch

from pliant.methods._core.averages import average_weights


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999, 1 - 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_give_the_bias_corrected_average(beta: float, dtype: torch.dtype) -> None:
    """x̄ ← x̄ + w(x − x̄) is the mean of all values, weighted by powers of β, whatever x̄ starts at."""
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    average = torch.tensor(123.0, dtype=dtype)
    for t, value in enumerate(values, start=1):
        weight = average_weights(torch.tensor(float(t), dtype=dtype), beta)
        average = average + weight * (value.to(dtype) - average)
    powers = beta ** torch.arange(49, -1, -1, dtype=torch.float64)
    expected = (powers * values).sum() / powers.sum()
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    assert float(average) == pytest.approx(float(expected), rel=tolerance, abs=tolerance)
