"""What FIRE leaves alone, and says that it does."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pliant import FIRE
from tests import zoo


class Mixture(nn.Module):
    """Experts stacked in one parameter, with what a model may hold beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.projection = nn.Parameter(torch.randn(4, 4))
        self.kernel = nn.Parameter(torch.randn(4, 4, 3))
        self.bias = nn.Parameter(torch.randn(3, 1, 4))
        self.log_std, self.weight_sigma = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 4))
        self.token, self.position_embedding = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(5, 4))
        self.table, self.tied = nn.Embedding(6, 4), nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.tied.weight
        self.norm = nn.LayerNorm((3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.kernel)


def test_weights_that_are_computed_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    model.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match=r"fire leaves these layers alone, their weights are computed.*: 1, 3"):
        fire = FIRE(model)
    assert fire.skipped == ["1", "3"]
    assert set(fire.parameters) == {"0.weight", "2.weight"}
    with pytest.raises(
        ValueError, match=r"no linear and no convolution layer .*; the weights of 1 are computed from oth"
    ):
        FIRE(nn.Sequential(nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell])
def test_recurrent_weights_are_named(make: Any) -> None:
    model = nn.ModuleDict({"recurrent": make(4, 4), "head": nn.Linear(4, 2)})
    expected = [name for name, p in model["recurrent"].named_parameters(prefix="recurrent") if p.ndim == 2]
    with pytest.warns(UserWarning, match=f"fire leaves these weights alone.*: {', '.join(expected)} ") as told:
        fire = FIRE(model)
    assert [warning.filename for warning in told] == [__file__]
    assert fire.skipped == expected
    assert set(fire.parameters) == {"head.weight"}


def test_experts_and_weights_of_modules_of_ones_own_are_named_and_no_more() -> None:
    model = nn.Sequential(Mixture(), nn.Bilinear(4, 4, 4))
    expected = ["0.gate_up_proj", "0.projection", "0.kernel", "1.weight"]
    with pytest.warns(UserWarning, match="fire leaves these weights alone"):
        fire = FIRE(model)
    assert fire.skipped == expected
    assert set(fire.parameters) == {"0.router.weight", "0.tied.weight"}
    model[0].projection.requires_grad_(False)
    with pytest.warns(UserWarning, match="fire leaves these weights alone.*: 0.kernel "):
        assert FIRE(model, where=lambda name, _: "proj" not in name and name != "1.weight").skipped == ["0.kernel"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FIRE(model, where=lambda name, _: name.endswith("router.weight")).skipped == []


def test_what_recurrent_weights_are_computed_from_is_named() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.RNNCell(4, 4), "weight_hh"), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="fire leaves these weights alone"):
        fire = FIRE(model)
    assert fire.skipped == ["0.weight_ih", "0.parametrizations.weight_hh.original1"]


def test_where_queries_and_keys_are_meant_nothing_else_is_expected() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.LSTM(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FIRE(model).skipped == FIRE(model, layers="qk").skipped == []
    with pytest.warns(UserWarning, match="fire leaves these weights alone"):
        assert FIRE(model, layers="all").skipped == ["1.weight_ih_l0", "1.weight_hh_l0"]


@pytest.mark.parametrize("name", ["cnn_bn", "tied", "vit_tiny"])
def test_networks_of_known_layers_have_nothing_to_be_said_of(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FIRE(zoo.build(name), layers="all").skipped == []
