"""Weight clipping and the initial bounds of each layer type."""

import pytest
from torch import nn
from torch.optim import SGD, Adam

from pliant import WeightClipping
from pliant.methods.weight_clipping import initial_bounds
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.reference import rules


@pytest.mark.parametrize("kappa", [0.3, 1.0])
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_reference(name: str, kappa: float) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    optimizer = Adam(model.parameters(), lr=3e-2)
    method = WeightClipping(model, kappa=kappa).attach(optimizer)
    train(model, optimizer, name, range(4))
    other = Adam(slow.parameters(), lr=3e-2)
    for step in range(4):
        train(slow, other, name, [step])
        rules.clip_weights(slow, kappa)
    assert_same(snapshot(model), snapshot(slow))
    assert method.receipt is not None
    assert method.receipt.details["entries_at_bound"] > 0
    assert method.receipt.details["steps"] == 4


def test_bias_has_the_bound_of_its_weight() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(100, 5), nn.Linear(5, 1))
    bounds = initial_bounds(model)
    assert bounds == {
        "0.weight": 18**-0.5, "0.bias": 18**-0.5,
        "3.weight": 0.1, "3.bias": 0.1, "4.weight": 5**-0.5, "4.bias": 5**-0.5,
    }  # fmt: skip


def test_attention_weights_have_bounds_and_embeddings_do_not() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "attention": nn.MultiheadAttention(4, 2)})
    bounds = initial_bounds(model)
    assert "embed.weight" not in bounds
    assert bounds["attention.in_proj_weight"] == bounds["attention.in_proj_bias"] == 0.5
    assert bounds["attention.out_proj.weight"] == bounds["attention.out_proj.bias"] == 0.5


@pytest.mark.parametrize("order", [("embed", "head"), ("head", "embed")])
def test_output_layer_tied_to_an_embedding_has_a_bound(order: tuple[str, str]) -> None:
    parts = {"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10)}
    parts["head"].weight = parts["embed"].weight
    model = nn.ModuleDict({name: parts[name] for name in order})
    assert set(initial_bounds(model).values()) == {0.5}
    assert len(initial_bounds(model)) == 2


@pytest.mark.parametrize(
    "layer", [nn.Linear(50, 20), nn.Conv2d(3, 8, 5), nn.ConvTranspose2d(3, 8, 5), nn.Conv1d(16, 16, 3, groups=2)]
)
def test_bound_is_that_of_torchs_initialization(layer: nn.Module) -> None:
    bound = initial_bounds(layer)["weight"]
    for tensor in (layer.weight, layer.bias):
        assert float(tensor.detach().abs().max()) <= bound * (1 + 1e-6)
    assert float(layer.weight.detach().abs().max()) > 0.9 * bound


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(50, 4), nn.GRU(3, 30, num_layers=2), nn.RNNCell(9, 4), nn.LSTM(5, 8, proj_size=2), nn.Bilinear(9, 6, 8)],
)
def test_initial_weights_are_within_their_bounds(layer: nn.Module) -> None:
    bounds = initial_bounds(layer)
    for name, tensor in layer.named_parameters():
        assert float(tensor.detach().abs().max()) <= bounds[name] * (1 + 1e-6)
        if tensor.numel() > 100:
            assert float(tensor.detach().abs().max()) > 0.9 * bounds[name]


def test_bounds_do_not_depend_on_current_values() -> None:
    model = zoo.build("mlp")
    early = WeightClipping(model).bounds
    train(model, SGD(model.parameters(), lr=1.0), "mlp", range(5))
    assert WeightClipping(model).bounds == early


def test_invalid_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="kappa: -1"):
        WeightClipping(zoo.build("mlp"), kappa=-1)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        WeightClipping(nn.LayerNorm(3))


def test_bound_of_a_transposed_linear_layer() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(300, 100)
    assert initial_bounds(layer) == {"weight": 0.1, "bias": 0.1}


def test_initial_bounds_leave_spectral_norm_buffers_alone() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))).train()
    before = snapshot(model)
    assert initial_bounds(model)["0.bias"] == 0.5
    WeightClipping(model)
    assert_same(snapshot(model), before)
    assert all(module.training for module in model.modules())
