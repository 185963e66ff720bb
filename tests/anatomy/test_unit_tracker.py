"""Which weights make a unit and which read it, proved on the model itself.

With all that is said to read a unit set to zero, nothing that makes it may matter any more: no reader was missed. With
all that makes it set to zero, its norm layer's shift too, nothing that reads it may matter: nothing else makes it, and
no reader reads anything but it. And each reader does read it: to change one changes an output.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu
from transformers.pytorch_utils import Conv1D

from pliant.anatomy import GraphError
from pliant.anatomy.unit_tracker import find_units
from pliant.anatomy.units import Slices, UnitGraph, UnitGroup
from pliant.methods._core.surgery import slice_mask, write_
from pliant.models import create
from tests import zoo
from tests.anatomy.architectures import Branching, vectors


class Dense(nn.Module):
    """Each layer reads all that came before, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(9), nn.Linear(9 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, relu(self.one(x))], 1)
        x = torch.cat([x, relu(self.two(x))], 1)
        return self.head(nn.functional.max_pool2d(relu(self.norm(x)), 2).flatten(1))


class Rearranged(nn.Module):
    """Pixels turned, channels repeated, windows cut out and diagonals read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(6 * 4 * 1, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.body(x)).rot90(1, (2, 3)).tile(1, 2, 1, 1)
        return self.head(x.unfold(2, 4, 4).diagonal(0, 3, 4).flatten(1))


class TwoReaders(nn.Module):
    """Two heads, of which one is returned and one is read on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right, self.top = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.left(h), self.top(relu(self.right(h)))


class Normed(nn.Module):
    """LayerNorm and GroupNorm between layers, over one dimension and over three."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(1, 4, 3), nn.LayerNorm([4, 4, 4])
        self.two, self.norm2 = nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)
        self.three, self.norm3, self.head = nn.Linear(24, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.norm1(self.one(x)))
        x = relu(self.norm2(self.two(x))).permute(0, 2, 3, 1).flatten(1)
        return self.head(relu(self.norm3(self.three(x))))


class Mixed(nn.Module):
    """Linear layers between dimensions swapped, split and joined again, and a mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 6), nn.Linear(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = relu(self.one(x)).split([2, 4], dim=-1)
        x = torch.cat([second, x, first.flip(-1)[..., :0], second[..., :0]], -1)
        return self.three(torch.nn.functional.gelu(self.two(x)).mean(1))


class Gated(nn.Module):
    """A SwiGLU, with a norm layer in it and the gate read once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.norm = nn.Linear(4, 6), nn.Linear(4, 6), nn.LayerNorm(6)
        self.head, self.side = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.value(x), silu(self.norm(self.gate(x)))
        return self.head(value * gate), self.side(gate)


class GatedHalves(nn.Module):
    """Gates and values from one weight, by hand and by `glu`, and a channel of a convolution that is gated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gates, self.more = (nn.Conv2d(2, 3, 3) for _ in range(3))
        self.packed, self.glu, self.head = nn.Linear(12, 10), nn.Linear(5, 8), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x) * silu(self.gates(x)) * self.more(x).mean((2, 3), keepdim=True)
        left, right = self.packed(x.flatten(1)).chunk(2, -1)
        return self.head(nn.functional.glu(self.glu(silu(left) * right)))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str], set[str]]

CASES: dict[str, Case] = {
    "mlp": (zoo.mlp, lambda: torch.randn(3, 12), {"0", "2"}, {"4"}),
    "cnn": (zoo.cnn, lambda: torch.randn(2, 1, 12, 12), {"0", "3", "7"}, {"9"}),
    "cnn_bn": (zoo.cnn_bn, lambda: torch.randn(2, 1, 12, 12), {"0", "4", "9"}, {"11"}),
    "vgg": (zoo.vgg, lambda: torch.randn(2, 1, 12, 12), {"0", "2", "5", "7", "10", "15", "18"}, {"20"}),
    "dense": (Dense, lambda: torch.randn(2, 2, 4, 4), {"one", "two"}, {"head"}),
    "rearranged": (Rearranged, lambda: torch.randn(2, 1, 4, 4), {"body"}, {"head"}),
    "two readers": (TwoReaders, lambda: torch.randn(3, 4), {"body", "right"}, {"left", "top"}),
    "norms": (Normed, lambda: torch.randn(2, 1, 6, 6), {"one", "two", "three"}, {"head"}),
    "gated": (Gated, lambda: torch.randn(3, 4), {"value"}, {"head", "side"}),
    "gated halves": (GatedHalves, lambda: torch.randn(2, 2, 4, 4), {"body", "packed", "glu"}, {"head"}),
    "resnet": (
        lambda: create("resnet18", (3, 8, 8), 5, width=2),
        lambda: torch.randn(2, 3, 8, 8),
        {f"{i}.conv1" for i in range(3, 11)},
        {"0", "13", *(f"{i}.conv2" for i in range(3, 11)), *(f"{i}.shortcut.0" for i in (5, 7, 9))},
    ),
    "vit": (
        lambda: create("vit_tiny", (3, 8, 8), 5, width=6, depth=1, heads=2),
        lambda: torch.randn(2, 3, 8, 8),
        {"1.mlp.0"},
        {"0.embed", "4", "1.mlp.2", *(f"1.attention.{n}" for n in ("query", "key", "value", "output"))},
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, UnitGraph]:
    build, example, renewable, others = CASES[request.param]
    torch.manual_seed(0)
    model, x = build().double(), example().double()
    units = find_units(model, x)
    assert {group.name for group in units.groups} == renewable
    assert set(units.skipped) == others
    return model, x, units


def tensor(model: nn.Module, slices: Slices) -> Tensor:
    return dict([*model.named_parameters(), *model.named_buffers()])[slices.tensor].detach()


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        result = model(x)
    return [result] if isinstance(result, Tensor) else list(result)


def fill(model: nn.Module, slices: Slices, chosen: Tensor, value: float | Tensor) -> None:
    whole = tensor(model, slices)
    write_(whole, slice_mask(chosen, slices.units, slices.dim, whole.ndim), value)


def some_of(group: UnitGroup) -> Tensor:
    chosen = torch.zeros(group.count, dtype=torch.bool)
    chosen[[0, -1]] = True
    return chosen


def test_a_unit_without_its_readers_does_not_change_the_output(case: tuple[nn.Module, Tensor, UnitGraph]) -> None:
    model, x, units = case
    for group in units.groups:
        chosen = some_of(group)
        for reader in group.readers:
            fill(model, reader.weight, chosen, 0.0)
        before = outputs(model, x)
        made_by = [*group.weights, *group.biases]
        # What layer and group norm make of a unit depends on the others, and the other way round; batch norm does not.
        if not any(norm.running_mean is None for norm in group.norms):
            for slices in made_by:
                fill(model, slices, chosen, torch.randn_like(tensor(model, slices)))
        for norm in group.norms:
            for slices in (norm.weight, norm.bias):
                if slices is not None:
                    fill(model, slices, chosen, torch.randn_like(tensor(model, slices)))
        for left, right in zip(before, outputs(model, x), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_the_readers_of_a_zero_unit_do_not_change_the_output(case: tuple[nn.Module, Tensor, UnitGraph]) -> None:
    model, x, units = case
    for group in units.groups:
        chosen = some_of(group)
        silent = [*group.weights, *group.biases, *(s for norm in group.norms for s in (norm.weight, norm.bias))]
        for slices in silent:
            if slices is not None:
                fill(model, slices, chosen, 0.0)
        before = outputs(model, x)
        for reader in group.readers:
            fill(model, reader.weight, chosen, torch.randn_like(tensor(model, reader.weight)))
        for left, right in zip(before, outputs(model, x), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_every_reader_changes_the_output(case: tuple[nn.Module, Tensor, UnitGraph]) -> None:
    """Every slice that is said to read a unit does: changing it alone changes an output."""
    model, x, units = case
    for group in units.groups:
        shifts = [group.norms[-1].bias] if group.norms else group.biases
        for shift in shifts:
            assert shift is not None
            tensor(model, shift).fill_(3.0)  # wide awake, so that no unit is silent on this input
    for group in units.groups:
        for reader in group.readers:
            before = outputs(model, x)
            for unit in (0, group.count - 1):
                chosen = torch.arange(group.count) == unit
                weight = tensor(model, reader.weight)
                fill(model, reader.weight, chosen, weight + 0.1 * torch.randn_like(weight))
                after = outputs(model, x)
                assert any(not torch.allclose(left, right) for left, right in zip(before, after, strict=True))
                before = after


def test_a_channel_feeds_as_many_columns_as_it_has_pixels() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    (group,) = find_units(model, torch.zeros(1, 1, 4, 4)).groups
    assert group.readers[0].weight.units.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert group.readers[0].weight.dim == 1


def test_a_gated_unit_is_the_pair_of_its_rows() -> None:
    (group,) = find_units(Gated(), torch.zeros(2, 4)).groups
    assert [slices.tensor for slices in group.weights] == ["value.weight", "gate.weight"]
    assert [slices.tensor for slices in group.biases] == ["value.bias", "gate.bias"]
    assert all(slices.units.tolist() == [0, 1, 2, 3, 4, 5] for slices in (*group.weights, *group.biases))
    body, packed, glu = find_units(GatedHalves(), torch.zeros(2, 2, 4, 4)).groups
    assert [slices.tensor for slices in body.weights] == ["body.weight", "gates.weight", "more.weight"]
    assert (packed.count, packed.weight.units.tolist()) == (5, [0, 1, 2, 3, 4] * 2)
    assert (glu.count, glu.weight.units.tolist()) == (4, [0, 1, 2, 3] * 2)
    assert packed.is_gated
    assert body.is_gated


def test_permuted_before_flattening() -> None:
    (_, group, _) = find_units(Normed(), torch.zeros(2, 1, 6, 6)).groups
    assert group.readers[0].weight.units.tolist() == [0, 1, 2, 3, 4, 5] * 4


def test_readers_of_concatenated_units() -> None:
    one, two = find_units(Dense(), torch.zeros(2, 2, 4, 4)).groups
    assert [r.module for r in one.readers] == ["two", "head"]
    assert one.readers[0].weight.units.tolist() == [-1, -1, 0, 1, 2]
    assert one.norms[0].weight is not None
    assert one.norms[0].weight.units.tolist() == [-1, -1, 0, 1, 2, -1, -1, -1, -1]
    assert two.norms[0].running_var is not None
    assert two.norms[0].running_var.units.tolist() == [-1] * 5 + [0, 1, 2, 3]


def test_slices_of_split_and_joined_values() -> None:
    units = find_units(Mixed(), torch.zeros(2, 7, 5))
    assert units.groups[0].readers[0].weight.units.tolist() == [2, 3, 4, 5, -1, -1, -1, -1, -1]
    assert units.groups[1].readers[0].module == "three"


def test_transposed_storage() -> None:
    model = nn.Sequential(Conv1D(8, 4), nn.GELU(), Conv1D(3, 8))
    (group,) = find_units(model, torch.zeros(2, 4)).groups
    assert (group.weight.dim, group.readers[0].weight.dim) == (1, 0)
    assert group.readers[0].bias == "2.bias"


def test_transposed_convolutions() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 5, 3), nn.ReLU(), nn.ConvTranspose2d(5, 1, 3))
    (group,) = find_units(model, torch.zeros(1, 2, 4, 4)).groups
    assert (group.count, group.weight.dim, group.readers[0].weight.dim) == (5, 1, 0)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.squeeze, self.excite = nn.Conv2d(1, 6, 3), nn.Linear(6, 2), nn.Linear(2, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(self.body(x))
        gate = torch.sigmoid(self.excite(relu(self.squeeze(x.mean((2, 3))))))
        return self.head((x * gate[:, :, None, None]).mean((2, 3)))


class GatedByPart(nn.Module):
    """The second gate multiplies only some of the units."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.head = nn.Linear(4, 6), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.value(x)[:, :3] * torch.sigmoid(self.gate(x)))


class Stray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.stray, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)
        self.recurrent = nn.GRU(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.stray(x)
        return self.head(self.recurrent(relu(self.used(x)))[0])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(relu(self.layer(relu(self.layer(x)))))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Repeated(nn.Module):
    """How often a unit is repeated depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(6, 2)
        self.register_buffer("times", torch.tensor([1, 2, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.repeat_interleave(relu(self.layer(x)), self.times, dim=1, output_size=6))


class Regrouped(nn.Module):
    """Units of two places, laid out anew so that no dimension holds them alone, for one that reads or normalizes."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.layer, self.reader = nn.Linear(4, 6), reader

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.layer(x).reshape(-1, 3, 4))


class SplitNorm(nn.Module):
    """Units in rows and columns, each with an entry of its own in the norm's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm([2, 3]), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(x).unflatten(1, (2, 3))).flatten(1))


def grouped_transposed() -> nn.Module:
    return nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1))


def depthwise() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))


def frozen() -> nn.Module:
    model = zoo.mlp()
    model[2].weight.requires_grad_(False)
    return model


SKIPPED = {
    "a residual stream": (CASES["resnet"][0], (2, 3, 8, 8), "0", "it is added to other values in 3"),
    "attention": (CASES["vit"][0], (2, 3, 8, 8), "1.attention.key", "it is part of attention in 1.attention"),
    "the output": (zoo.mlp, (2, 12), "4", "it is an output of the model"),
    "a gate of what was read": (SqueezeExcite, (2, 1, 5, 5), "excite", "it is multiplied by other values in the model"),
    "a gate of a part": (GatedByPart, (2, 4), "value", "it is multiplied by other values in the model"),
    "tied weights": (zoo.TiedMLP, (2, 12), "encode", "it is made by 'encode.weight', which is used more than once"),
    "a tied reader": (zoo.TiedMLP, (2, 12), "middle", "it is read by 'encode.weight', which is used more than once"),
    "a layer used twice": (Twice, (2, 4), "layer", "it is made by 'layer.weight', which is used more than once"),
    "a grouped reader": (depthwise, (1, 1, 8, 8), "0", "it is read by the grouped convolution 2"),
    "a computed weight": (weight_normed, (2, 4), "0", "it is read by 2, whose weight is computed, not stored"),
    "a computed layer": (weight_normed, (2, 4), "2", "its weight or bias is computed, not stored"),
    "a frozen layer": (frozen, (2, 12), "2", "it is made by '2.weight', which is frozen"),
    "a frozen reader": (frozen, (2, 12), "0", "it is read by '2.weight', which is frozen"),
    "nobody reads it": (Stray, (2, 4), "stray", "it has no part in what the model returns"),
    "packed maps": (Attending, (2, 3, 4), "attention.in_proj_weight", "it is part of attention"),
    "behind attention": (Attending, (2, 3, 4), "attention.out_proj", "it is an output of the model"),
    "data says where": (Repeated, (2, 4), "layer", "it goes through repeat_interleave in the model"),
    "regrouped for a reader": (lambda: Regrouped(nn.Linear(4, 3)), (2, 2, 4), "layer",
                               "it is mixed with others before reader reads it"),
    "regrouped for a layer norm": (lambda: Regrouped(nn.LayerNorm(4)), (2, 2, 4), "layer",
                                   "it is mixed with others before reader normalizes it"),
    "regrouped for a batch norm": (lambda: Regrouped(nn.BatchNorm1d(3)), (2, 2, 4), "layer",
                                   "it is mixed with others before reader normalizes it"),
    "two dimensions of a norm": (SplitNorm, (2, 4), "layer", "it lies across two dimensions of 'norm.weight'"),
    "a grouped maker": (grouped_transposed, (1, 4, 5, 5), "0", "it is made by a grouped transposed convolution"),
    "an unknown call": (Stray, (2, 4), "used", "it goes through gru in recurrent"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SKIPPED)
def test_skipped_layers_have_a_reason(kind: str) -> None:
    build, shape, name, reason = SKIPPED[kind]
    units = find_units(build(), torch.zeros(shape))
    assert name not in {group.name for group in units.groups}
    assert units.skipped[name].startswith(reason)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_channels_stay_apart_when_images_grow(mode: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(4, 2, 3))
    (group,) = find_units(model, torch.ones(1, 1, 8, 8)).groups
    assert group.name == "0"


def test_a_gelu_written_by_hand_keeps_units_apart() -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(
        GPT2Config(n_layer=1, n_embd=12, n_head=2, n_positions=8, vocab_size=20, bos_token_id=0, eos_token_id=0)
    )
    units = find_units(model, {"input_ids": torch.zeros(1, 4, dtype=torch.long), "use_cache": False})
    assert [group.name for group in units.groups] == ["h.0.mlp.c_fc"]
    assert set(units.skipped) == {"h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.mlp.c_proj"}


def test_a_model_that_cannot_be_traced_is_an_error() -> None:
    with pytest.raises(GraphError, match=r"torch\.export cannot trace Branching.*control flow"):
        find_units(Branching(), vectors())


class Odd(nn.Module):
    """Returns a mean over everything beside its output, and raises a number to the power of units."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = relu(self.two(2.0 ** self.one(x)))
        return self.three(hidden), hidden.pow(2).mean()


def test_reductions_over_everything_and_numbers_as_first_arguments() -> None:
    units = find_units(Odd(), torch.zeros(2, 4))
    assert [group.name for group in units.groups] == ["one"]
    assert units.skipped["two"] == "it is summed with other units in the model"


class Between(nn.Module):
    """Three layers, with something between the first two."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.c(relu(self.b(self.between(self.a(x)))))


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a cast that changes nothing": lambda h: relu(h).float(),
    "a device": lambda h: relu(h).to(h.device),
    "there and back": lambda h: relu(h.double()).type_as(h),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_keeps_units_apart(name: str) -> None:
    units = find_units(Between(CASTS[name]), torch.zeros(2, 4))
    assert [group.name for group in units.groups] == ["a", "b"]
    assert [passage.operator for passage in units.groups[0].passages] == ["relu"]


class Autocast(Between):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_units_under_an_autocast_of_the_models_own() -> None:
    model = Autocast(relu)
    assert [group.name for group in find_units(model, torch.zeros(2, 4)).groups] == ["a", "b"]
    assert model(torch.zeros(2, 4)).dtype == torch.bfloat16  # casts have their effect again


def test_a_model_that_needs_its_autocast_is_traced_with_it() -> None:
    def insist(h: Tensor) -> Tensor:
        assert h.dtype == torch.bfloat16
        return relu(h)

    units = find_units(Autocast(insist), torch.zeros(2, 4))
    assert not units.groups  # torch.export does not say which layers make the calls then
    assert units.skipped.keys() >= {"a", "b", "c"}


@pytest.mark.parametrize("training", [False, True])
def test_dropout_of_channels_keeps_units_apart(training: bool) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(4, 2, 3)).train(training)
    (group,) = find_units(model, torch.ones(2, 1, 8, 8)).groups
    assert group.name == "0"


class Activating(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(relu(x))


class Flattening(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize(("model", "shape", "reads_input"), [
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (2, 4), True),
    (lambda: nn.Sequential(nn.Linear(4, 3), Activating(3, 2)), (2, 4), False),
    (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), Flattening(12, 2)), (2, 1, 4, 4), False),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Flattening(15, 2)), (2, 5, 4), False),
    (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Conv1D(2, 3)), (2, 5, 4), True),
    (lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular")), (2, 1, 8, 8),
     True),
])  # fmt: skip
def test_reads_input_says_whether_the_weight_multiplies_the_input(
    model: Callable[[], nn.Module], shape: tuple[int, ...], reads_input: bool
) -> None:
    (group,) = find_units(model(), torch.ones(shape)).groups
    assert group.readers[0].reads_input == reads_input
