"""Which parameters a method acts on, and the warnings about the others."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pliant import (
    DASH,
    ParsevalRegularization,
    SpectralNormPenalty,
    SpectralRegularization,
    WeightClipping,
    WeightRescaling,
)
from tests.loops import snapshot


class Critics(nn.Module):
    """Five linear layers at once, as vectorized critics have them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, inputs, outputs).uniform_(-(inputs**-0.5), inputs**-0.5))
        self.bias = nn.Parameter(torch.zeros(5, 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class OwnConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight)


@pytest.mark.parametrize("make", [WeightClipping, SpectralRegularization, SpectralNormPenalty, ParsevalRegularization])
def test_stacks_are_left_alone_with_a_warning(make: Any) -> None:
    model = nn.Sequential(Critics(8, 8), nn.ReLU(), Critics(8, 1), OwnConvolution(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=f"{make.name} leaves these .* several matrices: 0.weight, 2.weight ") as told:
        method = make(model)
    assert [warning.filename for warning in told] == [__file__]
    weights = [name for name in method.parameters if name.endswith("weight")]
    assert weights == ["3.weight", "4.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model, where=lambda name, _: name.startswith(("3.", "4.")))
        model.requires_grad_(False)
        model[4].requires_grad_(True)
        make(model)


def test_clipping_does_not_touch_fresh_critics() -> None:
    model = nn.Sequential(Critics(8, 8), nn.Linear(8, 2))
    before = snapshot(model)
    with pytest.warns(UserWarning, match="weight_clipping leaves these weights alone"):
        clipping = WeightClipping(model, kappa=1.0)
    assert set(clipping.bounds) == {"1.weight", "1.bias"}
    clipping.step()
    assert all(tensor.equal(before[name]) for name, tensor in snapshot(model).items())


def test_a_custom_convolution_is_treated_as_torchs() -> None:
    own, torchs = OwnConvolution(), nn.Conv2d(2, 3, 3, bias=False)
    torchs.weight.data.copy_(own.weight.data)
    assert ParsevalRegularization(own).value() == ParsevalRegularization(torchs).value()
    assert SpectralRegularization(own).sigma("weight") == SpectralRegularization(torchs).sigma("weight")
    assert WeightClipping(own).bounds == WeightClipping(torchs).bounds


class Noisy(nn.Module):
    """A layer whose weight is drawn around a mean, as Rainbow explores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_mu, self.weight_sigma = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.full((4, 4), 0.05))
        self.bias_mu, self.bias_sigma = nn.Parameter(torch.randn(4)), nn.Parameter(torch.full((4,), 0.05))


@pytest.mark.parametrize(
    "make", [WeightClipping, WeightRescaling, SpectralRegularization, SpectralNormPenalty, ParsevalRegularization]
)
def test_noise_scales_are_left_alone(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(make(Noisy()).parameters) <= {"weight_mu", "bias_mu"}


@pytest.mark.parametrize(
    "make", [WeightRescaling, WeightClipping, SpectralRegularization, SpectralNormPenalty, ParsevalRegularization, DASH]
)
def test_computed_weights_give_a_warning(make: Any) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="acts on the tensors from which .* are computed, not on .*: 0 ") as told:
        make(model)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model, where=lambda name, _: name.startswith("2."))
