"""Symmetric matrices that float32 finds hard."""

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant._eigen import eigh, eigvalsh
from pliant.methods.feature_rank import feature_rank


def dead_features(seed: int) -> Tensor:
    """Features of 128 samples: most of them are silent, the others nearly alike."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.zeros(128, 256)
    live = torch.randn(24, 1, generator=draw).abs() @ torch.randn(1, 256, generator=draw).relu()
    live += 1e-2 * torch.randn(24, 1, generator=draw) @ torch.randn(1, 256, generator=draw).relu()
    features[torch.randperm(128, generator=draw)[:24]] = live.relu()
    return features


@pytest.mark.parametrize("seed", range(8))
def test_low_rank_matrices_that_are_mostly_zero(seed: int) -> None:
    features = dead_features(seed)
    gram = features @ features.mT
    values, vectors = eigh(gram)
    assert values.dtype == vectors.dtype == torch.float32
    scale = float(gram.abs().max())
    torch.testing.assert_close(vectors @ values.diag() @ vectors.mT, gram, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(128), rtol=0, atol=1e-5)
    torch.testing.assert_close(eigvalsh(gram), values, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("seed", range(8))
def test_methods_survive_dead_features_and_weights(seed: int) -> None:
    features = dead_features(seed)
    value, gradient = feature_rank(features)
    exact_value, exact = feature_rank(features.double())
    assert float(value) == pytest.approx(float(exact_value), rel=1e-5)
    # A Gram matrix in float32 tells singular values below √eps of the largest from nothing.
    rounding = 2 * torch.finfo(torch.float32).eps ** 0.5 * float(exact_value) ** 0.5
    torch.testing.assert_close(gradient.double(), exact, rtol=0, atol=rounding)
    layer = nn.Linear(128, 256)
    with torch.no_grad():
        layer.weight.copy_(features.mT)
    pliant.FIRE(layer).apply()
    assert torch.isfinite(layer.weight).all()
