import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pliant.diagnostics import diagnose
from pliant.diagnostics.activations import capture
from pliant.diagnostics.batches import Batch
from pliant.diagnostics.probe import batch_statistics
from pliant.running import undisturbed
from tests.diagnostics.networks import BATCH, IMAGES, Between


def test_features_follow_norm_layer_and_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    found = capture(model, BATCH, keep=True)
    first = model[:3](BATCH.args[0])
    second = model[3:5](first)
    assert list(found.layers) == ["0", "3"]
    torch.testing.assert_close(found.layers["0"].values, first)
    torch.testing.assert_close(found.layers["0"].mean_abs, first.double().abs().mean(0))
    assert found.layers["0"].active.equal((first != 0).sum(0))
    torch.testing.assert_close(found.layers["3"].values, second)
    torch.testing.assert_close(found.representation, second)
    torch.testing.assert_close(found.output, model(BATCH.args[0]))
    assert capture(model, BATCH).layers["0"].values is None


def test_activations_that_are_functions_and_in_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = functional.leaky_relu(self.a(x), inplace=True)
            self.seen = h.clone()
            h += 100  # after the activation: not what its units did
            return self.b(h)

    model = Net()
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["a"]
    assert found.layers["a"].values.equal(model.seen)


def test_linear_network_has_the_outputs_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["0", "1"]
    torch.testing.assert_close(found.layers["1"].values, model[:2](BATCH.args[0]))


def test_activation_of_the_output_is_not_hidden() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2), nn.Tanh())
    assert list(capture(model, BATCH).layers) == ["0"]


def test_linear_network_with_an_activation_of_its_output_has_the_outputs_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2), nn.Sigmoid())
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["0"]
    torch.testing.assert_close(found.layers["0"].values, model[0](BATCH.args[0]))


def test_units_of_a_convolution_are_channels() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    found = capture(model, IMAGES)
    h = model[:2](IMAGES.args[0])
    torch.testing.assert_close(found.layers["0"].mean_abs, h.double().abs().mean((0, 2, 3)))
    assert found.representation.shape == (6, 108)
    back = nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(300, 2))
    assert len(capture(back, IMAGES).layers["0"].mean_abs) == 3


def test_positions_count_as_samples_of_a_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2))
    batch = Batch.of(torch.randn(3, 7, 4))
    found = capture(model, batch)
    torch.testing.assert_close(found.layers["0"].mean_abs, model[:2](batch.args[0]).double().abs().mean((0, 1)))
    assert found.representation.shape == (21, 5)


def test_one_layer_with_two_activations_has_two_names() -> None:
    class CReLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.relu(x), torch.relu(-x)], 1)

    model = nn.Sequential(nn.Linear(4, 5), CReLU(), nn.Linear(10, 2))
    assert list(capture(model, BATCH).layers) == ["0", "0:2"]


def test_transformer_layers_are_seen_though_they_have_a_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 9, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(4, 2)).eval()
    found = capture(model, Batch.of(torch.randn(3, 5, 4)))
    assert list(found.layers) == ["0.linear1"]
    assert len(found.layers["0.linear1"].mean_abs) == 9


def test_capture_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    capture(model, BATCH)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_undisturbed_restores_modes_and_random_numbers() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4))
    model[1].eval()
    before = torch.get_rng_state()
    with undisturbed(model):
        assert not model[0].training
        torch.rand(10)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.get_rng_state().equal(before)


def test_batch_statistics_are_what_training_normalizes_with() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    before = copy.deepcopy(model.state_dict())
    in_training = copy.deepcopy(model).train()(IMAGES.args[0])
    with undisturbed(model), batch_statistics(model, IMAGES):
        torch.testing.assert_close(model(IMAGES.args[0]), in_training)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())


def test_batch_statistics_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="on purpose"), undisturbed(model), batch_statistics(model, BATCH):
        raise RuntimeError("on purpose")
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert model.training


MODULES = [
    nn.Threshold(0.1, 0), nn.Hardshrink(), nn.Softshrink(), nn.Tanhshrink(), nn.LogSigmoid(), nn.GLU(), nn.RReLU(),
    nn.SELU(), nn.CELU(), nn.Mish(), nn.Softsign(), nn.Hardtanh(),
]  # fmt: skip
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu_": functional.leaky_relu_,
    "threshold_": lambda h: functional.threshold(h, 0.1, 0, inplace=True),
    "tanh_": Tensor.tanh_,
    "clamp": lambda h: h.clamp(min=0),
    "clamp to six": lambda h: torch.clamp(h, 0, 6),
    "clamp_min": lambda h: h.clamp_min(0),
    "clamp_": lambda h: h.clamp_(0),
    "clamp to a tensor": lambda h: h.clamp(min=torch.zeros(())),
    "maximum": lambda h: torch.maximum(h, torch.zeros_like(h)),
    "max": lambda h: torch.max(h, torch.zeros_like(h)),
    "method max": lambda h: h.max(other=torch.zeros_like(h)),
    "fmax": lambda h: torch.fmax(h, torch.zeros_like(h)),
}


@pytest.mark.parametrize("function", [*MODULES, *FUNCTIONS.values()], ids=[*map(str, MODULES), *FUNCTIONS])
def test_activations_of_every_kind_are_seen(function: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), Between(function, 3 if isinstance(function, nn.GLU) else 6).eval()
    )
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["0", "2.a"]
    torch.testing.assert_close(found.layers["2.a"].values, found.representation)


def test_functions_with_other_uses_are_no_activations() -> None:
    gate = nn.Parameter(torch.ones(3))

    def others(h: Tensor) -> Tensor:
        h = h / h.norm(dim=-1, keepdim=True).clamp_min(0)
        h = h.clamp(max=5) - h.max(-1, keepdim=True).values - torch.max(h)
        return h.clamp(-5, 5) * torch.sigmoid(gate)[0] + torch.maximum(h.mean(), h.sum())

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Between(others))
    assert list(capture(model, BATCH).layers) == ["0"]


def test_units_inside_a_transform_are_left_out() -> None:
    class Critics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(4, 4)
            self.weight, self.last = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.randn(3, 1, 5))

        def forward(self, x: Tensor) -> Tensor:
            def critic(weight: Tensor, last: Tensor, h: Tensor) -> Tensor:
                return functional.linear(functional.relu(functional.linear(h, weight)), last)

            h = functional.relu(self.encoder(x))
            return torch.vmap(critic, in_dims=(0, 0, None))(self.weight, self.last, h)

    found = capture(Critics(), BATCH)
    assert list(found.layers) == ["encoder"]
    assert found.unclear == ("linear",)
    assert found.representation is None


def test_units_are_found_where_dimensions_were_permuted() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x).transpose(1, 2)))

    model, batch = Mixer(), Batch.of(torch.randn(3, 7, 4))
    h = torch.relu(model.a(batch.args[0]))
    torch.testing.assert_close(capture(model, batch).layers["a"].mean_abs, h.double().abs().mean((0, 1)))
    halves = nn.Sequential(nn.Linear(4, 6), nn.GLU(), nn.Linear(3, 2))
    assert len(capture(halves, Batch.of(torch.randn(3, 6, 4))).layers["0"].mean_abs) == 3, "as many positions as units"


class Reshaped(nn.Module):
    """A layer, an activation of its output in another shape, and a linear layer."""

    def __init__(self, layer: nn.Module, reshape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.reshape, self.head = layer, reshape, nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.reshape(self.layer(x))).flatten(1))


RESHAPED: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "to images": (nn.Linear(4, 36), lambda h: h.view(-1, 4, 3, 3), (6, 4)),
    "to heads": (nn.Linear(4, 12), lambda h: h.view(-1, 3, 4), (6, 4)),
    "to tokens": (nn.Conv2d(2, 5, 3), lambda h: h.flatten(2).transpose(1, 2), (6, 2, 8, 8)),
    "to one row": (nn.Conv2d(2, 5, 3), lambda h: h.flatten(1), (6, 2, 8, 8)),
    "heads of tokens": (nn.Linear(4, 12), lambda h: h.unflatten(-1, (3, 4)), (6, 5, 4)),
    "tokens as samples": (nn.Linear(4, 12), lambda h: h.flatten(0, 1), (6, 5, 4)),
}


@pytest.mark.parametrize("case", RESHAPED)
def test_units_are_found_where_the_shape_changed(case: str) -> None:
    layer, reshape, shape = RESHAPED[case]
    batch = Batch.of(torch.randn(*shape))
    h = torch.relu(layer(batch.args[0])).detach().double()
    if isinstance(layer, nn.Linear):
        h = h.movedim(-1, 1)
    found = capture(Reshaped(layer, reshape), batch)
    torch.testing.assert_close(found.layers["layer"].mean_abs, h.abs().transpose(0, 1).flatten(1).mean(1))
    assert found.unclear == ()


@pytest.mark.parametrize("last", [lambda h: h, Tensor.contiguous])
def test_layers_whose_units_cannot_be_found_are_left_out_and_named(last: Callable[[Tensor], Tensor]) -> None:
    """Four channels of two times two places, with places before channels: either may be the units."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), Reshaped(nn.Conv2d(3, 4, 5), lambda h: last(h.flatten(2).transpose(1, 2)))
    )
    model(IMAGES.args[0])
    found = capture(model, IMAGES)
    assert list(found.layers) == ["0"]
    assert found.unclear == ("2.layer",)
    (note,) = diagnose(model, IMAGES, measures=["dead_fraction"]).notes
    assert note.endswith("it is unknown which entries belong to a unit: 2.layer")


def test_a_network_that_ends_in_convolutions_has_no_representation() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Conv2d(2, 3, 3))
    assert capture(model, IMAGES).representation is None
    assert "a linear layer at the end" in diagnose(model, IMAGES, measures=["feature_rank"]).skipped["feature_rank"]


def test_layers_of_the_model_itself_go_by_their_weights() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(functional.linear(x, self.first))
            h = torch.relu(functional.linear(h, 2 * self.second))
            return functional.linear(h, torch.ones(2, 3))

    found = diagnose(Plain(), BATCH, measures=["dead_fraction", "spectral_norm"])
    dead = {row.layer for row in found.rows() if row.measure == "dead_fraction"}
    assert dead == {"", "first", "linear"}, "the one that is computed has no name of its own"
    assert {row.layer for row in found.rows() if row.measure == "spectral_norm"} == {"", "first", "second"}


def test_layers_without_a_batch_of_their_own_are_one_sample() -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.make, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * torch.relu(self.make(self.code)))

    model = Hyper()
    found = capture(model, BATCH, keep=True)
    torch.testing.assert_close(found.layers["make"].mean_abs, torch.relu(model.make(model.code)).detach().double())
    assert found.layers["make"].values is None


def test_compiled_parts_are_seen_once_and_under_their_names() -> None:
    body = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU())
    plain = nn.Sequential(body, nn.Linear(5, 2))
    compiled = nn.Sequential(torch.compile(body, backend="eager"), plain[1])
    compiled(BATCH.args[0])
    found = capture(compiled, BATCH)
    expected = capture(plain, BATCH)
    assert list(found.layers) == ["0._orig_mod.0", "0._orig_mod.2"]
    for ours, theirs in zip(found.layers.values(), expected.layers.values(), strict=True):
        assert ours.mean_abs.equal(theirs.mean_abs)


PRODUCTS: dict[str, Callable[[Tensor, nn.Embedding, Tensor], Tensor]] = {
    "@": lambda h, head, bias: h @ head.weight.T,
    "matmul": lambda h, head, bias: torch.matmul(h, head.weight.T),
    "mm": lambda h, head, bias: h.mm(head.weight.T),
    "addmm": lambda h, head, bias: torch.addmm(bias, h, head.weight.T),
    "by name": lambda h, head, bias: torch.matmul(input=h, other=head.weight.T),
    "addmm by name": lambda h, head, bias: torch.addmm(bias, mat1=h, mat2=head.weight.T),
    "linear": lambda h, head, bias: functional.linear(h, head.weight, bias),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_parameter_are_layers(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 5), nn.Linear(5, 3), nn.Embedding(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen = functional.relu(self.b(functional.relu(self.a(x))))
            pooled = self.seen @ torch.eye(3)  # learned by nobody
            return PRODUCTS[name](pooled, self.head, torch.zeros(2)).tanh()

    model = Net()
    found = capture(model, BATCH)
    assert list(found.layers) == ["a", "b"]
    torch.testing.assert_close(found.representation, model.seen)
