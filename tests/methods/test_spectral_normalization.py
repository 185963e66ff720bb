"""Spectral normalization: torch's parametrization, chosen and reported."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import Adam

from pliant import SpectralNormalization
from pliant.methods._core.initial import seeded
from tests import zoo
from tests.loops import assert_same, snapshot, train


def test_the_same_as_torch_by_hand() -> None:
    model, other = zoo.build("cnn_bn"), zoo.build("cnn_bn")
    SpectralNormalization(model, seed=3)
    for number, place in enumerate((0, 4, 9, 11)):
        with seeded(3, number):
            parametrizations.spectral_norm(other[place])
    for each in (model, other):
        train(each, Adam(each.parameters(), lr=1e-2), "cnn_bn", range(4))
    assert_same(snapshot(model), snapshot(other))


def test_largest_singular_values_are_near_one() -> None:
    model = zoo.build("mlp")
    method = SpectralNormalization(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    train(model, Adam(model.parameters(), lr=1e-3), "mlp", range(30))
    assert method.receipt.details["norms"].keys() == {"0", "2", "4"}
    assert all(norm == pytest.approx(1, abs=0.05) for norm in method.receipt.details["norms"].values())


def test_which_layers() -> None:
    model = zoo.build("mlp")
    method = SpectralNormalization(model, where=lambda name, _: name == "2.weight")
    assert method.changed == ["2"]
    assert method.receipt.entries == 16 * 16
    tied = zoo.build("tied")
    method = SpectralNormalization(tied)
    assert method.changed == ["middle"]
    assert method.skipped == {"encode": "its weight is tied"}
    with pytest.raises(ValueError, match=r"it has no weight to normalize .*middle: its weight is computed already"):
        SpectralNormalization(tied)
    with pytest.raises(ValueError, match="`where` passes none"):
        SpectralNormalization(nn.Sequential(nn.Linear(2, 2)), where=lambda *_: False)


def test_an_optimizer_made_before_goes_on() -> None:
    """torch keeps the parameter itself as the original."""
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    SpectralNormalization(model, seed=0).attach(optimizer)
    before = snapshot(model)
    train(model, optimizer, "mlp", range(1))
    assert not torch.equal(
        before["0.parametrizations.weight.original"], model.state_dict()["0.parametrizations.weight.original"]
    )
