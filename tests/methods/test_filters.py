"""Which parameters a method acts on, and the warnings about the others."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pliant import (
    DASH,
    FIRE,
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


def test_each_matrix_of_a_stack_counts() -> None:
    """Matrices that are stored as [in, out]: the bias beside them tells."""
    model = nn.Sequential(Critics(8, 8), nn.ReLU(), Critics(8, 2), OwnConvolution(), nn.Linear(4, 2)).double()
    weight = model[2].weight.detach()
    spectral = SpectralRegularization(model, lam=1.0, where=lambda name, _: name.startswith("2."))
    norms = torch.linalg.matrix_norm(weight, 2)
    torch.testing.assert_close(spectral.sigma("2.weight"), norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(spectral.value(), ((norms**2 - 1) ** 2).sum(), rtol=1e-6, atol=0)
    parseval = ParsevalRegularization(model, lam=1.0, where=lambda name, _: name == "2.weight")
    excess = weight.mT @ weight - torch.eye(2).double()
    torch.testing.assert_close(parseval.value().double(), (excess**2).sum(), rtol=1e-6, atol=0)
    assert WeightClipping(model, kappa=1.0).bounds["2.weight"] == WeightClipping(model, kappa=1.0).bounds["2.bias"]
    assert WeightClipping(model, kappa=1.0).bounds["2.weight"] == 8**-0.5
    fire = FIRE(model, polynomial="exact")
    assert [str(m) for m in fire.matrices if m.parameter == "2.weight"] == [f"2.weight[{i}]" for i in range(5)]
    fire.apply()
    rows = model[2].weight.detach().mT  # [out, in] of each member
    expected = 2 / 8 * torch.eye(2).double().expand(5, 2, 2)
    torch.testing.assert_close(rows @ rows.mT, expected, rtol=1e-6, atol=1e-9)


class Experts(nn.Module):
    """A stack whose layout nothing tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, 8))


def test_a_stack_of_unknown_layout_is_left_alone_where_the_layout_counts() -> None:
    model = nn.Sequential(Experts(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=r"weight_clipping leaves these weights alone.*\[in, out\]: 0.weight"):
        assert "0.weight" not in WeightClipping(model).bounds
    assert "0.weight" in SpectralRegularization(model).parameters
    with pytest.warns(UserWarning, match=r"fire leaves these weights alone.*0\.weight"):
        FIRE(model)


def test_clipping_does_not_touch_fresh_critics() -> None:
    model = nn.Sequential(Critics(8, 8), nn.Linear(8, 2))
    before = snapshot(model)
    clipping = WeightClipping(model, kappa=1.0)
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
