"""Fresh draws: modules' own initializers, `init` functions, and what cannot be re-drawn."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from pliant import FullReset, HeadReset, LayerwiseReset, ReDo, ShrinkPerturb
from pliant.methods._core.initial import seeded
from pliant.methods._core.reinitializer import Reinitializer
from tests import zoo
from tests.loops import snapshot, train

# apply() without an optimizer warns that no moments are reset; these tests do so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


def trained(name: str) -> tuple[nn.Module, Adam]:
    model = zoo.build(name)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, name, range(5))
    return model, optimizer


def test_init_function_is_used() -> None:
    model, _ = trained("mlp")

    def fill(fresh: nn.Module) -> None:
        for p in fresh.parameters():
            nn.init.constant_(p, 0.25)

    FullReset(model, init=fill).apply()
    assert all((p == 0.25).all() for p in model.parameters())


def scale_up(model: nn.Module) -> None:
    """Initialize the weights of some layers only, as many training scripts do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.constant_(module.weight, 0.25)


def test_parameters_that_init_does_not_write_are_redrawn_too() -> None:
    model, optimizer = trained("cnn_bn")
    before = snapshot(model)
    receipt = FullReset(model, init=scale_up, seed=1).apply(optimizer)
    assert receipt.tensors == len(list(model.parameters()))
    assert not any(torch.equal(value, before[name]) for name, value in snapshot(model).items())
    assert all((p == 0.25).all() for p in model.parameters() if p.dim() > 1)
    assert (model[1].weight == 1).all()
    assert not model[1].running_mean.any()

    model, optimizer = trained("mlp")
    old = snapshot(model)["4.bias"]
    HeadReset(model, zoo.batch("mlp")[0], init=scale_up).apply(optimizer)
    assert not torch.equal(model[4].bias, old)

    model, _ = trained("mlp")
    old = snapshot(model)["4.bias"]
    ShrinkPerturb(model, lam=1.0, toward="fresh", init=scale_up).apply()
    assert not torch.equal(model[4].bias, old)


class NeedsDeviation(nn.Linear):
    """Its `reset_parameters` fails without an argument."""

    def reset_parameters(self, std: float | None = None) -> None:
        if std is None and hasattr(self, "made"):
            raise NotImplementedError("call it with a deviation")
        self.made = True
        nn.init.normal_(self.weight, std=std or 1.0)
        nn.init.zeros_(self.bias)


def test_init_replaces_a_failing_reset_parameters() -> None:
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), NeedsDeviation(3, 2))
    makers = (FullReset, lambda m, **given: HeadReset(m, x, **given), lambda m, **given: LayerwiseReset(m, x, **given))
    for make in makers:
        with pytest.raises(
            ValueError, match=r"model: reset_parameters\(\) of NeedsDeviation fails: NotImpl.* pass init="
        ):
            make(model)
        before = model[2].weight.clone()
        make(model, init=lambda m: m[2].reset_parameters(std=0.1)).apply()
        assert not torch.equal(model[2].weight, before)
    with pytest.raises(ValueError, match="of NeedsDeviation fails"):
        HeadReset(nn.Sequential(NeedsDeviation(4, 3), nn.ReLU(), nn.Linear(3, 2)), x)


def test_failing_init_is_an_error_at_construction() -> None:
    model = zoo.build("mlp")
    x = zoo.batch("mlp")[0]
    state = torch.get_rng_state()

    def layer_init(layer: nn.Linear) -> None:
        nn.init.orthogonal_(layer.weight)

    message = r"init: it fails on Sequential: AttributeError: .*; it is given the whole model"
    for make in (
        FullReset,
        lambda m, init: HeadReset(m, x, init=init),
        lambda m, init: LayerwiseReset(m, x, init=init),
    ):
        with pytest.raises(ValueError, match=message):
            make(model, init=layer_init)
    with pytest.raises(ValueError, match=r"init: it fails on '0': TypeError: .*; it is given single layers"):
        ReDo(model, x, init=lambda: None)
    ReDo(model, x, init=layer_init)
    assert torch.equal(torch.get_rng_state(), state)

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(3))

    message = "init: it leaves the parameter '1.shift' as it is, and no reset_parameters.. writes it"
    with pytest.raises(ValueError, match=message):
        FullReset(nn.Sequential(nn.Linear(2, 3), Shift()), init=scale_up)


class TiedToEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight


class Decided(TiedToEmbedding):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.head.weight, 0.5)


def test_tied_weights_with_two_initializers_warn() -> None:
    model = TiedToEmbedding()
    message = "'embed.weight' is shared by Embedding 'embed' and Linear 'head', which .* the last of them .* pass init="
    with pytest.raises(ValueError, match="head: head shares a parameter with 'embed', which a reset would draw again"):
        HeadReset(model, head=["head"])
    for make in (FullReset, lambda m: ShrinkPerturb(m, toward="fresh")):
        with pytest.warns(UserWarning, match=message) as caught:
            make(model)
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullReset(model, init=lambda m: nn.init.normal_(m.embed.weight))
        FullReset(zoo.build("tied"))  # both linear layers have the same initializer
        FullReset(Decided())  # the parent initializes the tied weight last


def test_module_without_initializer_is_an_error() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"'0' holds the parameter 'shift' but has no reset_parameters"):
        FullReset(nn.Sequential(Shift()))
    FullReset(nn.Sequential(nn.MultiheadAttention(4, 2))).apply()


def test_parameter_that_reset_parameters_does_not_write_is_an_error() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"of module '0' does not write its parameter 'weight_orig'"):
        FullReset(model)


def test_init_that_writes_nothing_is_an_error() -> None:
    model = zoo.build("mlp")
    with pytest.raises(ValueError, match="init: it changes nothing in a copy of Sequential"):
        FullReset(model, init=lambda _: None)
    ReDo(
        model, zoo.batch("mlp")[0], init=lambda _: None
    )  # ReDo initializes single layers, and init may skip some types


@pytest.mark.parametrize(
    "make",
    [
        FullReset,
        lambda model: FullReset(model, init=scale_up),
        lambda model: HeadReset(model, head=["2"]),
        lambda model: LayerwiseReset(model, blocks=[["0"], ["2"]]),
        lambda model: ShrinkPerturb(model, toward="fresh"),
    ],
)
def test_model_that_cannot_be_copied_is_an_error_at_construction(make: Callable[[nn.Module], Reinitializer]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.lock = threading.Lock()
    reason = "TypeError: cannot pickle '_thread.lock' object"
    message = f"model: Sequential cannot be copied, so its weights cannot be drawn again: {reason}"
    with pytest.raises(ValueError, match=message):
        make(model)
    ReDo(model, torch.zeros(1, 4))  # copies single layers only
    ShrinkPerturb(model)  # draws nothing


def test_only_redrawn_modules_need_an_initializer() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(3))
            self.body = nn.LayerNorm(3)
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x + self.shift))

    model = Shifted()
    HeadReset(model, torch.ones(1, 3)).apply()
    LayerwiseReset(model, blocks=[["body"], ["head"]]).apply()
    FullReset(model, where=lambda name, _: name != "shift").apply()
    assert (model.shift == 1).all()
    with pytest.raises(ValueError, match="module 'Shifted' holds the parameter 'shift' but has no reset_parameters"):
        FullReset(model)


class Parent(nn.Module):
    """Initializes its child with `write`, and a parameter of its own."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.zeros(3))
        self.write = write
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.own)
        self.write(self.child.weight.data)


def test_parents_initialize_their_children_last() -> None:
    model = nn.Sequential(Parent(lambda w: w.zero_()), Parent(lambda w: w.mul_(1e-3)), Parent(lambda w: w.normal_(5)))
    FullReset(model).apply()
    assert not model[0].child.weight.any()
    assert 0 < model[1].child.weight.abs().max() <= 0.5e-3
    assert model[2].child.weight.mean() > 3
    attention = nn.MultiheadAttention(8, 2)
    FullReset(attention).apply()
    assert not attention.out_proj.bias.any()
    transformer = nn.Transformer(8, 2, 1, 1, 256, batch_first=True)
    FullReset(transformer).apply()
    assert transformer.encoder.layers[0].linear1.weight.abs().max() < 1.01 * (6 / (8 + 256)) ** 0.5  # Xavier's bound


def test_parent_that_does_not_write_its_children_draws_before_them() -> None:
    """A seed fixes the order of the draws."""
    model = Parent(lambda w: None)
    FullReset(model, seed=3).apply()
    with seeded(3, 0):
        own, child = torch.empty(3).normal_(), nn.Linear(4, 4)
    assert torch.equal(model.own, own)
    assert torch.equal(model.child.weight, child.weight)


def test_statistics_of_modules_without_parameters_are_reset() -> None:
    def statistics(apply: Callable[[nn.Module], Reinitializer]) -> list[bool]:
        layers = [nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)]
        model = nn.Sequential(*layers, nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)))
        model(torch.arange(12.0).view(4, 3))
        apply(model).apply()
        return [bool(n.running_mean.any()) for n in model.modules() if isinstance(n, nn.BatchNorm1d)]

    assert statistics(FullReset) == [False, False, False]
    assert statistics(lambda m: HeadReset(m, head=["4"])) == [True, True, False]
    assert statistics(lambda m: LayerwiseReset(m, torch.zeros(1, 3))) == [True, False, False]
