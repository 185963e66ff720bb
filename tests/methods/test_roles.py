"""Which role each parameter has, and hooks and composition that several methods share."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pliant import (
    DASH,
    FIRE,
    L2,
    SWR,
    ParsevalRegularization,
    SpectralNormPenalty,
    SpectralRegularization,
    WeightClipping,
    WeightRescaling,
)
from pliant.anatomy.roles import role_of
from pliant.methods._core.module_hooks import ModuleHook
from tests import zoo
from tests.loops import snapshot, train
from tests.methods.trajectories import STEPS, assert_close, train_with_term
from tests.reference import penalties


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


def test_roles() -> None:
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


def test_roles_of_what_a_tensor_is_computed_from() -> None:
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
    """Vectors that are stored as they are broadcast: of ConvNeXt, of its second version, of Swin's second version."""

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


def test_a_vector_is_one_however_it_is_stored() -> None:
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
def test_weights_that_may_be_several_matrices_are_left_alone_and_named(make: Any) -> None:
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


def test_an_own_convolution_is_read_as_torchs() -> None:
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
def test_the_scale_of_a_noise_is_left_alone(make: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(make(Noisy()).parameters) <= {"weight_mu", "bias_mu"}


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self, module: nn.Module, args: object) -> None:
        self.calls += 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_hook_stays_with_its_module(duplicate) -> None:
    module, counter = nn.Linear(2, 2), Counter()
    module.register_forward_pre_hook(ModuleHook(module, counter.count))
    twin = duplicate(module)
    twin(torch.zeros(1, 2))
    assert counter.calls == 0
    module(torch.zeros(1, 2))
    assert counter.calls == 1
    duplicate(twin)(torch.zeros(1, 2))  # a copy of a copy is no trouble


def test_a_hook_does_not_keep_its_owner_alive() -> None:
    module, counter = nn.Linear(2, 2), Counter()
    module.register_forward_pre_hook(ModuleHook(module, counter.count))
    owner = weakref.ref(counter)
    del counter
    gc.collect()
    assert owner() is None
    module(torch.zeros(1, 2))  # The hook that is left behind does no harm.


def test_swr_with_l2_on_the_head() -> None:
    """The body keeps its norms, the head is pulled to zero; each alone does not do both."""
    model, plain = zoo.build("mlp"), zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    L2(model, lam={"4.*": 0.2}).attach(optimizer)
    swr = SWR(model, order=["0", "2"], lam=1.0).attach(optimizer)
    train(model, optimizer, "mlp", range(20))
    train(plain, SGD(plain.parameters(), lr=0.1), "mlp", range(20))
    assert swr.receipt is not None
    assert all(growth == pytest.approx(1.0) for growth in swr.receipt.details["norm_growth"].values())
    assert model[4].weight.norm() < 0.9 * plain[4].weight.norm()


def test_two_penalties_have_the_trajectory_of_both_terms() -> None:
    closed, slow = zoo.build("cnn_bn"), zoo.build("cnn_bn")
    optimizer = SGD(closed.parameters(), lr=0.02)
    spectral = SpectralRegularization(closed, lam=0.05).attach(optimizer)
    ParsevalRegularization(closed, lam=0.01).attach(optimizer)
    vectors = {name: (spectral.left[name].clone(), spectral.right[name].clone()) for name in spectral.left}
    train(closed, optimizer, "cnn_bn", range(STEPS["cnn_bn"]))
    train_with_term(
        slow,
        "cnn_bn",
        SGD(slow.parameters(), lr=0.02),
        lambda m: 0.05 * penalties.spectral(m, vectors, 2) + 0.01 * penalties.parseval(m, 1.0, False),
    )
    assert_close(closed, slow)
    assert snapshot(closed).keys() == snapshot(slow).keys()


@pytest.mark.parametrize(
    "make", [WeightRescaling, WeightClipping, SpectralRegularization, SpectralNormPenalty, ParsevalRegularization, DASH]
)
def test_tells_of_weights_that_are_computed_from_what_it_acts_on(make: Any) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="acts on what the weights of these layers are computed from, .*: 0 ") as told:
        make(model)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(model, where=lambda name, _: name.startswith("2."))
