"""Roles of parameters, and weights that may hold several matrices."""

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pliant import (
    DASH,
    FIRE,
    ParsevalRegularization,
    SpectralNormPenalty,
    SpectralRegularization,
    WeightClipping,
)
from pliant.anatomy.parameters import find_computed, is_stack, matrices_in_use, role_of


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.mixer = nn.Parameter(torch.zeros(4, 4))
        self.gamma = nn.Parameter(torch.ones(4))
        self.gain = nn.Parameter(torch.ones(4))
        self.beta = nn.Parameter(torch.zeros(4))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.log_std = nn.Parameter(torch.zeros(4))
        self.actor_logstd = nn.Parameter(torch.zeros(1, 4))
        self.weight_sigma = nn.Parameter(torch.ones(4, 4))
        self.sigma_weight = nn.Parameter(torch.ones(4, 4))
        self.bias_sigma = nn.Parameter(torch.ones(4))
        self.queries = nn.Parameter(torch.zeros(4))
        self.layer_scale = nn.Parameter(torch.ones(4))
        self.slope = nn.PReLU(4)
        self.norm = nn.LayerNorm((3, 4))
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.recurrent = nn.LSTM(4, 4)
        self.up = nn.ConvTranspose2d(3, 2, 3)
        self.value = nn.Linear(4, 1)


def test_role_of_every_kind_of_parameter() -> None:
    model = Odd()
    roles = {name: role_of(model, name, p) for name, p in model.named_parameters()}
    assert roles == {
        "embed.weight": "matrix", "class_token": "shift", "mixer": "matrix", "gamma": "scale",
        "gain": "scale", "beta": "shift",
        "temperature": None, "log_std": None, "actor_logstd": None, "weight_sigma": None,
        "sigma_weight": None, "bias_sigma": None, "queries": None, "layer_scale": "scale",
        "slope.weight": None, "norm.weight": "scale", "norm.bias": "shift",
        "attention.in_proj_weight": "matrix", "attention.in_proj_bias": "shift", "attention.bias_k": "shift",
        "attention.bias_v": "shift", "attention.out_proj.weight": "matrix", "attention.out_proj.bias": "shift",
        "recurrent.weight_ih_l0": "matrix", "recurrent.weight_hh_l0": "matrix", "recurrent.bias_ih_l0": "shift",
        "recurrent.bias_hh_l0": "shift", "up.weight": "matrix", "up.bias": "shift",
        "value.weight": "matrix", "value.bias": "shift",
    }  # fmt: skip


class AnnotatedNorm(nn.Module):
    """The norm layer of a well-known tutorial, with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))


class NormalPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(4))


class PreNorm(nn.Module):
    """A norm layer and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)


def test_norm_layers_of_other_libraries() -> None:
    model = nn.Sequential(LlamaRMSNorm(4), AnnotatedNorm(), NormalPolicy(), PreNorm())
    roles = {name: role_of(model, name, p) for name, p in model.named_parameters()}
    assert roles == {
        "0.weight": "scale", "1.a_2": "scale", "1.b_2": "shift", "2.log_std": None, "3.token": None,
        "3.layer.weight": "matrix", "3.layer.bias": "shift",
    }  # fmt: skip
    chosen = DASH(nn.Sequential(nn.Linear(4, 4), LlamaRMSNorm(4), AnnotatedNorm())).parameters
    assert list(chosen) == ["0.weight", "0.bias"]


def test_roles_of_tensors_that_a_weight_is_computed_from() -> None:
    parametrizations = nn.utils.parametrizations
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 3)),
        parametrizations.weight_norm(nn.Linear(1, 3)),
        parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)),
        nn.utils.parametrize.register_parametrization(nn.LayerNorm(4), "weight", nn.Identity()),
        nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "bias", nn.Identity()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.append(nn.utils.weight_norm(nn.Linear(4, 3)))
    roles = {name: role_of(model, name, p) for name, p in model.named_parameters()}
    assert roles == {
        "0.bias": "shift", "0.parametrizations.weight.original0": "scale",
        "0.parametrizations.weight.original1": "matrix",
        "1.bias": "shift", "1.parametrizations.weight.original0": "scale",
        "1.parametrizations.weight.original1": "matrix",
        "2.bias": "shift", "2.parametrizations.weight.original": "matrix",
        "3.bias": "shift", "3.parametrizations.weight.original": "scale",
        "4.weight": "matrix", "4.parametrizations.bias.original": "shift",
        "5.bias": "shift", "5.weight_g": "scale", "5.weight_v": "matrix",
    }  # fmt: skip
    alone = parametrizations.weight_norm(nn.Linear(4, 3))
    assert {role_of(alone, name, p) for name, p in alone.named_parameters()} == {"shift", "scale", "matrix"}


class Vectors(nn.Module):
    """Vectors stored with the dimensions they are broadcast over, as in ConvNeXt (v1, v2) and Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1))
        self.gamma = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.weight = nn.Parameter(torch.zeros(1, 1, 1, 4))
        self.beta = nn.Parameter(torch.zeros(4, 1, 1))
        self.logit_scale = nn.Parameter(torch.ones(3, 1, 1))
        self.alpha = nn.Parameter(torch.ones(4, 1, 1))
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.one_by_one = nn.Conv2d(4, 1, 1, bias=False)


def test_a_vector_with_extra_dimensions_is_a_vector() -> None:
    model = Vectors()
    assert {name: role_of(model, name, p) for name, p in model.named_parameters()} == {
        "layer_scale": "scale",
        "gamma": "scale",
        "weight": "scale",
        "beta": "shift",
        "logit_scale": None,
        "alpha": None,
        "token": "shift",
        "one_by_one.weight": "matrix",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (WeightClipping, SpectralRegularization, SpectralNormPenalty, ParsevalRegularization, FIRE):
            make(model)


class Stacked(nn.Module):
    """A linear layer for each member of an ensemble, next to a convolution that does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4, 3))
        self.conv1d = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.conv1d((x @ self.weight).mT)


def decorated(function: Any) -> Any:
    return functools.wraps(function)(lambda *args: function(*args))


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.weight)


class Inheriting(Kernel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Decorated(Kernel):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return (lambda weight: torch.conv1d(x, weight))(self.weight)


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ModuleDict({"deep": nn.ParameterList([torch.zeros(4, 3, 2, 2)])})

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv_transpose2d(x, self.held["deep"][0])


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Blurring(nn.Module):
    """An ensemble that blurs its frames: the convolution uses the kernel of four dimensions only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.blur = nn.Parameter(torch.zeros(5, 4, 3)), nn.Parameter(torch.zeros(1, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.blur).flatten(1) @ self.weight


def stacks(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_stack(model, name, parameter)]


@pytest.mark.parametrize("outer", [lambda m: m, nn.Sequential])
def test_a_weight_that_no_convolution_uses_is_a_stack(outer: Any) -> None:
    model = outer(Stacked())
    assert [name.rpartition("0.")[2] for name in stacks(model)] == ["weight"]
    assert [name.rpartition("0.")[2] for name in stacks(outer(Blurring()))] == ["weight"]


@pytest.mark.parametrize(
    "module", [nn.Conv1d(4, 5, 3), nn.ConvTranspose3d(4, 5, 3), nn.Bilinear(3, 4, 5), nn.Linear(3, 4), nn.LSTM(3, 4),
               Kernel(), Inheriting(), Decorated(), Kernels()],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_kernels_and_matrices_are_not_stacks(module: nn.Module) -> None:
    assert stacks(module) == stacks(nn.Sequential(module)) == []


def test_parametrized_weights_are_stacks_or_not_like_plain_ones() -> None:
    model = nn.ModuleDict({"stacked": Stacked(), "kernel": Kernel(), "conv": nn.Conv2d(2, 3, 3)})
    for module in model.values():
        nn.utils.parametrize.register_parametrization(module, "weight", Half())
    assert stacks(model) == ["stacked.parametrizations.weight.original"]
    assert is_stack(model, "stacked.weight", model["stacked"].weight)
    assert not is_stack(model, "kernel.weight", model["kernel"].weight)


def test_a_tied_weight_is_not_a_stack_if_one_module_is_a_convolution() -> None:
    model = nn.Sequential(Stacked(), nn.Conv1d(4, 5, 3))
    assert stacks(model) == ["0.weight"]
    model[0].weight = model[1].weight
    assert stacks(model) == []


def test_matrices_in_use_are_weights_as_the_forward_pass_uses_them() -> None:
    tied = nn.Linear(4, 4)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.LayerNorm(4), tied, tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.append(nn.utils.weight_norm(nn.Linear(4, 3)))
    found = matrices_in_use(model)
    assert list(found) == ["0.weight", "2.weight", "4.weight_v"]
    torch.testing.assert_close(found["0.weight"], model[0].weight)
    assert found["2.weight"] is tied.weight
    assert find_computed(model) == ["0", "4"]
    assert find_computed(model, hooks_only=True) == ["4"]


def test_tables_of_biases_and_whole_numbers_are_not_matrices() -> None:
    model = nn.ParameterDict({"relative_position_bias_table": torch.ones(9, 2)})
    model["steps"] = nn.Parameter(torch.ones(3, 3, dtype=torch.int64), requires_grad=False)
    assert matrices_in_use(model) == {}
