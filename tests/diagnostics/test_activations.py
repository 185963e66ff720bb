from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pliant.diagnostics import measure
from pliant.diagnostics.activations import Captured, capture
from pliant.diagnostics.batches import Batch
from pliant.running import undisturbed
from tests import zoo
from tests.diagnostics.networks import BATCH, IMAGES, Between


def representation(found: Captured) -> Tensor:
    (only,) = found.representations.values()
    return only


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
    torch.testing.assert_close(representation(found), second)
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
    assert representation(found).shape == (6, 108)
    back = nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(300, 2))
    assert len(capture(back, IMAGES).layers["0"].mean_abs) == 3


def test_positions_count_as_samples_of_a_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2))
    batch = Batch.of(torch.randn(3, 7, 4))
    found = capture(model, batch)
    torch.testing.assert_close(found.layers["0"].mean_abs, model[:2](batch.args[0]).double().abs().mean((0, 1)))
    assert representation(found).shape == (21, 5)


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
    torch.testing.assert_close(found.layers["2.a"].values, representation(found))


def test_clamps_and_maxima_with_other_uses_are_not_activations() -> None:
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
    assert not found.representations


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
    (note,) = measure(model, IMAGES, measures=["dead_fraction"]).notes
    assert note.endswith("it is unknown which entries belong to a unit: 2.layer")


def test_a_network_that_ends_in_convolutions_has_no_representation() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Conv2d(2, 3, 3))
    assert not capture(model, IMAGES).representations
    assert "a linear layer at the end" in measure(model, IMAGES, measures=["feature_rank"]).skipped["feature_rank"]


def test_twin_critics_have_a_representation_each() -> None:
    model = zoo.TwinCritics()
    x = torch.randn(5, 6)
    found = capture(model, Batch((x,), {}, None, 5))
    assert list(found.representations) == ["first.2", "second.2"]
    for name, twin in (("first.2", model.first), ("second.2", model.second)):
        torch.testing.assert_close(found.representations[name], twin[:2](x))


def test_heads_on_the_same_features_have_one_representation_and_a_shortcut_is_no_head() -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.spread = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            features = torch.relu(self.body(x))
            return {"mean": self.mean(features) + features, "spread": self.spread(features).exp()}

    assert list(capture(Actor(), Batch((torch.randn(5, 4),), {}, None, 5)).representations) == ["spread"]


def test_a_head_whose_way_to_the_output_is_hidden_is_the_last_layer() -> None:
    class Detour(nn.Sequential):
        def forward(self, x: Tensor) -> object:
            return type("Output", (), {"logits": super().forward(x)})

    model = Detour(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert list(capture(model, Batch((torch.randn(5, 4),), {}, None, 5)).representations) == ["2"]


def test_layers_of_the_model_itself_go_by_their_weights() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(functional.linear(x, self.first))
            h = torch.relu(functional.linear(h, 2 * self.second))
            return functional.linear(h, torch.ones(2, 3))

    found = measure(Plain(), BATCH, measures=["dead_fraction", "spectral_norm"])
    dead = {row.layer for row in found.rows() if row.measure == "dead_fraction"}
    assert dead == {"", "first", "linear"}, "the computed layer has no name of its own"
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
    torch.testing.assert_close(representation(found), model.seen)


SLOPE = nn.Parameter(torch.rand(6, 1, generator=torch.Generator().manual_seed(0)))


WRITTEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda u: 0.5 * u * (1 + torch.tanh(0.7979 * (u + 0.044715 * torch.pow(u, 3)))),
    "scaled last": lambda u: (u * (torch.tanh(0.7979 * (u + 0.044715 * u**3)) + 1)).div_(2),
    "swish": lambda u: u * torch.sigmoid(u),
    "swish in place": lambda u: u.mul_(u.sigmoid()),
    "quick_gelu": lambda u: torch.sigmoid(1.702 * u) * u,
    "slope that is learned": lambda u: u * torch.sigmoid(u * functional.softplus(SLOPE.view(-1))),
    "view of such a slope": lambda u: u * torch.sigmoid(u * functional.softplus(SLOPE).view(-1)),
    "in another precision": lambda u: u * torch.sigmoid(u.double()).type_as(u),
    "mish": lambda u: torch.mul(u, torch.tanh(functional.softplus(u))),
    "mish with names": lambda u: torch.mul(input=u, other=torch.tanh(functional.softplus(input=u))),
    "hardswish": lambda u: u * functional.relu6(u + 3) / 6,
    "hardswish with a clamp": lambda u: u * torch.clamp(u + 3, 0, 6) / 6,
    "of two gates": lambda u: torch.tanh(u) * torch.sigmoid(-u),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_of_an_activation_that_is_written_out_the_product_is_taken(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Between(WRITTEN_OUT[name]))
    model.slope = SLOPE
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["0", "2.a"]
    assert found.layers["2.a"].values.equal(representation(found))


BRANCHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale of a branch": lambda h, alpha: h * alpha,
    "scale of each unit": lambda h, alpha: alpha.expand(6) * h,
    "mask": lambda h, alpha: h * torch.zeros(6),
    "divided by": lambda h, alpha: h / (alpha + 1e9).expand(6),
    "divided": lambda h, alpha: torch.tensor(1.0) / h,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_what_an_activation_is_multiplied_by_later_is_no_part_of_it(name: str) -> None:
    """ReZero begins with all branches at zero: their units are as alive as those of the same network with silu."""
    alpha = nn.Parameter(torch.zeros(()))
    model = Between(lambda u: BRANCHES[name](u * torch.sigmoid(u), alpha))
    model.alpha = alpha
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["a"]
    torch.testing.assert_close(found.layers["a"].values, functional.silu(model.a(BATCH.args[0])))


def test_a_product_belongs_to_the_layer_of_its_gate() -> None:
    class SwiGLU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            u = self.gate(x)
            share, up = torch.sigmoid(u), self.up(x)
            return self.down(u * share * up)

    model = SwiGLU()
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["gate"]
    torch.testing.assert_close(found.layers["gate"].values, functional.silu(model.gate(BATCH.args[0])))


def test_of_an_activation_after_another_only_the_second_can_be_a_gate() -> None:
    def twice(u: Tensor) -> Tensor:
        h = torch.relu(u)
        return h * torch.sigmoid(h)

    model = Between(twice)
    found = capture(model, BATCH, keep=True)
    h = torch.relu(model.a(BATCH.args[0]))
    assert list(found.layers) == ["a", "a:2"]
    assert found.layers["a"].values.equal(h)
    assert found.layers["a:2"].values.equal(h * torch.sigmoid(h))


def _derivative(u: Tensor) -> Tensor:
    h = torch.sigmoid(u)
    return h * (1 - h)


def _overwritten(u: Tensor) -> Tensor:
    h = torch.sigmoid(u)
    return u.copy_(u.flip(1)) * h


GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "of another part": (lambda u: u[:, :3] * torch.sigmoid(u[:, 3:]), lambda u: torch.sigmoid(u[:, 3:])),
    "of a constant": (lambda u: torch.tanh(u) * 0.5 * SLOPE.view(-1), torch.tanh),
    "of itself": (_derivative, torch.sigmoid),
    "of other entries": (lambda u: torch.sigmoid(u) * u.flip(1), torch.sigmoid),
    "of what was written over": (_overwritten, torch.sigmoid),
    "of a mean": (lambda u: torch.tanh(u) * u.mean(1, keepdim=True), torch.tanh),
    "computed from a mean too": (
        lambda u: u * torch.sigmoid(u - u.mean(1, keepdim=True)),
        lambda u: torch.sigmoid(u - u.mean(1, keepdim=True)),
    ),
    "of ones": (lambda u: torch.tanh(u) * torch.ones_like(u), torch.tanh),
    "that is added": (lambda u: u + torch.tanh(u), torch.tanh),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_of_other_values_stay_activations(name: str) -> None:
    function, gate = GATES[name]
    model = Between(function, 3 if name == "of another part" else 6)
    model.slope = SLOPE
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["a"]
    torch.testing.assert_close(found.layers["a"].values, gate(model.a(BATCH.args[0])), rtol=0, atol=0)


def test_gates_of_a_recurrent_cell_stay_activations() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forget, self.new, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), 5)
            keep = torch.sigmoid(self.forget(x))
            state = keep * state + (1 - keep) * torch.tanh(self.new(x))
            return self.head(keep * torch.tanh(state))

    model, x = Cell(), BATCH.args[0]
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["forget", "new", "new:2"]
    keep, new = torch.sigmoid(model.forget(x)), torch.tanh(model.new(x))
    assert found.layers["forget"].values.equal(keep)
    assert found.layers["new"].values.equal(new)
    torch.testing.assert_close(found.layers["new:2"].values, torch.tanh((1 - keep) * new))


def test_gates_of_channels_stay_activations() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.down, self.up = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 4, 1)
            self.head = nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.conv(x))
            self.share = torch.sigmoid(self.up(torch.relu(self.down(h.mean((2, 3), keepdim=True)))))
            return self.head(h * self.share)

    model = Squeezed()
    found = capture(model, IMAGES, keep=True)
    assert list(found.layers) == ["conv", "down", "up"]
    assert found.layers["up"].values.equal(model.share.flatten(1))


def test_dead_units_of_gpt2_are_found() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.bias[:12] = -20.0
    found = measure(
        model, {"input_ids": torch.randint(20, (4, 8))}, measures=["dead_fraction", "dormant_fraction"]
    ).to_dict()
    for kind in ("dead_fraction", "dormant_fraction"):
        for name in ("transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"):
            assert found[f"{kind}/{name}"] == 0.25
        assert found[kind] == 0.25
