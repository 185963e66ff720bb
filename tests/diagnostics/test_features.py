import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softmax

from pliant.diagnostics import features, measure


def hidden(samples: int, units: int, seed: int = 0) -> Tensor:
    return torch.randn(samples, units, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_average_to_one_and_planted_units_are_dormant() -> None:
    h = hidden(50, 20).abs()
    h[:, :4] *= 1e-3  # dormant: active, but a thousandth of the others
    h[:, 4] = 0  # dead
    scores = features.unit_scores(h.mean(0))
    assert float(scores.mean()) == pytest.approx(1)
    assert features.dormant_fraction(scores) == 5 / 20
    assert features.dormant_fraction(scores, tau=0) == 1 / 20
    assert features.dead_fraction((h != 0).sum(0)) == 1 / 20


def test_a_silent_layer_is_dormant_altogether() -> None:
    assert features.dormant_fraction(features.unit_scores(torch.zeros(6))) == 1
    assert features.negative_entropy(torch.zeros(6)) == 0


def test_a_unit_that_is_not_a_number_leaves_no_number() -> None:
    for bad in (math.nan, math.inf):
        assert math.isnan(features.dormant_fraction(features.unit_scores(torch.tensor([0.0, bad, 1.0]))))


def test_negative_entropy_between_all_alike_and_one_alone() -> None:
    assert features.negative_entropy(torch.ones(8)) == pytest.approx(-math.log(8))
    assert features.negative_entropy(torch.tensor([0.0, 5.0, 0.0])) == 0
    p = softmax(hidden(1, 9)[0], 0)
    assert features.negative_entropy(3 * p) == pytest.approx(float((p * p.log()).sum()))


def test_feature_rank_of_planted_rank() -> None:
    low = hidden(64, 3) @ hidden(3, 32, seed=1)
    found = measure(nn.Linear(32, 2).double(), low, measures=["feature_srank", "feature_rank"])
    assert found.values == {"feature_srank": 3, "feature_rank": 3 / 32}


def test_covariance_distance_ignores_scale_and_rotation_but_not_arrangement() -> None:
    h = hidden(10, 6)
    rotation = torch.linalg.qr(hidden(6, 6, seed=1)).Q
    assert features.covariance_distance(h, 7 * h @ rotation) == pytest.approx(0, abs=1e-12)
    one, other = torch.zeros(2, 1), torch.zeros(2, 1)
    one[0], other[1] = 1, 1
    assert features.covariance_distance(one, other) == pytest.approx(math.sqrt(2))
    assert math.isnan(features.covariance_distance(h, torch.zeros(10, 6)))


def test_representation_change_is_the_mean_distance() -> None:
    h, before = hidden(4, 6).reshape(4, 2, 3), hidden(4, 6, seed=1).reshape(4, 2, 3)
    expected = sum(float((a - b).norm()) for a, b in zip(h, before, strict=True)) / 4
    assert features.representation_change(h, before) == pytest.approx(expected)


def test_mismatches_are_named() -> None:
    with pytest.raises(ValueError, match="tau must not be negative"):
        features.dormant_fraction(torch.ones(2), -1)
    with pytest.raises(ValueError, match="same number of samples, got 2 and 3"):
        features.covariance_distance(torch.ones(2, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="one shape"):
        features.representation_change(torch.ones(2, 2), torch.ones(2, 3))
