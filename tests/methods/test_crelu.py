"""The CReLU module, and the conversion of existing models."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from pliant import CReLU, CReLUConversion, ReDo
from tests import zoo
from tests.reference import architecture as reference


def test_module_matches_the_reference() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = torch.tensor([reference.crelu(row) for row in x.tolist()], dtype=torch.float64)
    assert torch.equal(CReLU()(x), expected)
    images = torch.randn(2, 3, 4, 4)
    assert torch.equal(CReLU(dim=1)(images), torch.cat([images.relu(), (-images).relu()], 1))
    assert torch.equal(CReLU(dim=-3)(images), CReLU()(images))


def test_one_half_always_has_a_gradient() -> None:
    x = torch.tensor([[-3.0, 2.0]], requires_grad=True)
    CReLU()(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[-1.0, 1.0]]


def channels_last_flatten() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.head = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.conv(x)).permute(0, 2, 3, 1).flatten(1))

    return Model()


def tokens() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, 3))


def one_relu_in_two_places() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(nn.Linear(12, 6), relu, nn.Linear(6, 6), relu, nn.Linear(6, 5))


MODELS: dict[str, tuple[Any, tuple[int, ...], list[str]]] = {
    "mlp": (zoo.mlp, (4, 12), ["0", "2"]),
    "cnn": (zoo.cnn, (4, 1, 12, 12), ["0", "7"]),
    "cnn_bn": (zoo.cnn_bn, (4, 1, 12, 12), ["0", "4", "9"]),
    "vgg": (zoo.vgg, (4, 1, 12, 12), ["0", "2", "5", "7", "10", "15", "18"]),
    "channels last": (channels_last_flatten, (2, 1, 4, 4), ["conv"]),
    "tokens": (tokens, (2, 7, 4), ["0"]),
    "one relu": (one_relu_in_two_places, (4, 12), ["0", "2"]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_conversion_keeps_the_function(name: str, training: bool) -> None:
    build, shape, changed = MODELS[name]
    torch.manual_seed(0)
    model = build().double().train(training)
    x = torch.randn(shape, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)
    names = list(dict(model.named_parameters()))
    made = CReLUConversion(model, x)
    assert made.changed == changed
    assert list(dict(model.named_parameters())) == names
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    assert all(m.training == training for m in model.modules())
    # The new half is connected: its weights get a gradient where it is active.
    cross_entropy(
        model(x).flatten(0, -2), torch.zeros(x.shape[:-1].numel() if name == "tokens" else len(x)).long()
    ).backward()
    assert made.receipt.tensors == len(changed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert module.weight.shape == (module.out_features, module.in_features)
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[1] == module.in_channels


def test_fresh_weights_give_a_network_built_with_crelu() -> None:
    model = zoo.build("mlp")
    CReLUConversion(model, zoo.batch("mlp")[0], weights="fresh", seed=3)
    assert [tuple(model[i].weight.shape) for i in (0, 2, 4)] == [(16, 12), (16, 32), (5, 32)]
    bound = 32**-0.5  # the bound of nn.Linear's initial weights and biases at the new width
    for layer in (model[2], model[4]):
        for parameter in layer.parameters():
            assert 0.7 * bound < float(parameter.detach().abs().max()) <= bound
        assert float(layer.weight.detach()[:, 16:].std()) == pytest.approx(bound / 3**0.5, rel=0.2)
    other = zoo.build("mlp")
    CReLUConversion(other, zoo.batch("mlp")[0], weights="fresh", seed=3)
    assert torch.equal(other[4].weight, model[4].weight)
    x = zoo.batch("mlp")[0]
    layers = [(model[i].weight, model[i].bias) for i in (0, 2, 4)]
    expected = [reference.crelu_mlp(layers, row) for row in x.tolist()]
    torch.testing.assert_close(model(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_the_new_half_learns() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    made = CReLUConversion(model, x)
    optimizer = SGD(model.parameters(), lr=0.1)
    made.attach(optimizer)
    assert not model[2].weight[:, 16:].any()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert model[2].weight[:, 16:].any()


def test_both_halves_belong_to_the_same_unit() -> None:
    """Renewing a unit must clear both of its columns."""
    model = zoo.build("mlp")
    x = zoo.batch("mlp")[0]
    CReLUConversion(model, x)
    redo = ReDo(model, x)
    assert redo.groups["0"].readers[0].weight.units.tolist() == [*range(16), *range(16)]


def test_optimizer_made_before_the_conversion_is_rejected() -> None:
    model = zoo.build("mlp")
    early = Adam(model.parameters())
    made = CReLUConversion(model, zoo.batch("mlp")[0])
    with pytest.raises(
        ValueError,
        match="this Adam holds a parameter that crelu replaced; make the optimizer, and other methods, after",
    ):
        made.attach(early)
    made.attach(Adam(model.parameters()))
    with pytest.raises(TypeError, match="crelu changed the model when it was made"):
        made.step()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))
        self.act, self.norm, self.tanh = nn.ReLU(), nn.LayerNorm(4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x))
        x = self.norm(self.act(self.two(x)))
        return self.four(self.tanh(self.three(x)))


def test_layers_that_cannot_be_converted_state_the_reason() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="crelu fits behind none of its layers") as caught:
        CReLUConversion(Functional(), x)
    for reason in (
        "one: its ReLU is not a module of its own",
        "two: a norm layer follows its ReLU",
        "three: no ReLU follows it",
        "four: it is an output of the model",
    ):
        assert reason in str(caught.value)
    shared = Functional()
    shared.forward = lambda x: shared.three(shared.act(shared.two(shared.act(shared.one(x)))))  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match="one: its ReLU is not a module of its own; two: its ReLU is not a module of its own"
    ):
        CReLUConversion(shared, x)
    with pytest.raises(ValueError, match="weights: 'old' is not allowed; it must be one of 'keep', 'fresh'"):
        CReLUConversion(zoo.build("mlp"), zoo.batch("mlp")[0], weights="old")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="example: None, but crelu finds the units by tracing one"):
        CReLUConversion(zoo.build("mlp"))


class FixedSizes(nn.Module):
    """Its forward() fixes the number of features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.conv(x)).view(-1, 256))


def test_model_that_fails_after_the_conversion_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"with crelu behind conv the model does not run .*view\(-1, 256\)"):
        CReLUConversion(FixedSizes(), torch.zeros(2, 3, 8, 8))


def test_where_chooses_layers() -> None:
    model = zoo.build("mlp")
    made = CReLUConversion(model, zoo.batch("mlp")[0], where=lambda name, _: name == "2.weight")
    assert made.changed == ["2"]
    assert model[2].in_features == 16
    assert model[4].in_features == 32


def test_reader_without_initializer_is_an_error_and_changes_nothing() -> None:
    from transformers.pytorch_utils import Conv1D

    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Conv1D(3, 8)), torch.ones(2, 4)
    kept = str(model)
    with pytest.raises(ValueError, match="it is read by 2, a Conv1D, which cannot be re-initialized"):
        CReLUConversion(model, x, weights="fresh")
    assert str(model) == kept
    before = model(x)
    CReLUConversion(model, x)
    torch.testing.assert_close(model(x), before)


class ReadTwice(nn.Module):
    """Its first units are read both before and after their ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu, self.b, self.c = nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3)
        self.last, self.out = nn.ReLU(), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        return self.out(self.last(self.b(self.relu(h)))), self.c(h)


def test_units_read_before_their_relu_are_skipped() -> None:
    model, x = ReadTwice(), torch.randn(4, 8)
    before = [output.detach() for output in model(x)]
    made = CReLUConversion(model, x)
    assert made.skipped["a"] == "c reads it before its ReLU"
    assert isinstance(model.last, CReLU)
    for output, old in zip(model(x), before, strict=True):
        torch.testing.assert_close(output, old)
