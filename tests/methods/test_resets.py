"""Shrink & perturb, head reset and full reset."""

import copy
import threading
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim import SGD, Adam

from pliant import FullReset, HeadReset, LayerwiseReset, ReDo, ShrinkPerturb
from pliant.methods._core.initial import seeded
from pliant.methods._core.reinitializer import Reinitializer
from tests import zoo
from tests.loops import assert_same, snapshot, train

# Without an optimizer there is no state to reset, which is said; here it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


def trained(name: str) -> tuple[nn.Module, Adam]:
    model = zoo.build(name)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, name, range(5))
    return model, optimizer


def test_shrink_perturb_towards_the_stored_initial_values() -> None:
    model = zoo.build("cnn_bn")
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    method = ShrinkPerturb(model, lam=0.3)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, "cnn_bn", range(5))
    before = snapshot(model)
    receipt = method.apply(optimizer)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), 0.7 * before[name] + 0.3 * initial[name], rtol=1e-12, atol=1e-15)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert receipt.tensors == len(initial)
    assert len(optimizer.state) == len(initial)


def test_shrink_perturb_towards_a_fresh_draw() -> None:
    model, _ = trained("mlp")
    before = snapshot(model)
    ShrinkPerturb(model, lam=0.3, toward="fresh", seed=5).apply()
    drawn = {name: (p.detach() - 0.7 * before[name]) / 0.3 for name, p in model.named_parameters()}
    bound = 12**-0.5  # torch draws a linear layer's weights from U(±1/√fan_in)
    assert drawn["0.weight"].abs().max() <= bound + 1e-12
    assert drawn["0.weight"].abs().max() > 0.8 * bound
    assert not torch.allclose(drawn["0.weight"], zoo.build("mlp")[0].weight)
    again, _ = trained("mlp")
    ShrinkPerturb(again, lam=0.3, toward="fresh", seed=5).apply()
    assert_same(snapshot(model), snapshot(again))


def test_shrink_perturb_with_noise() -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 400).double()
    before = model.weight.detach().clone()
    ShrinkPerturb(model, lam=0.7, toward="noise", noise_std=0.5, seed=1).apply()
    noise = model.weight.detach() - 0.3 * before
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(noise.mean())) < 0.01


def test_noise_does_not_depend_on_the_layout() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    for model in (plain, other):
        ShrinkPerturb(model, toward="noise", seed=0).apply()
    assert torch.equal(plain.weight, other.weight)


def test_own_seed_leaves_the_global_generator_alone() -> None:
    model, _ = trained("mlp")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    FullReset(model, seed=1).apply()
    assert torch.equal(torch.rand(1), expected)


def test_without_a_seed_the_global_generator_decides() -> None:
    results = []
    for seed in (1, 1, 2):
        model, _ = trained("mlp")
        torch.manual_seed(seed)
        FullReset(model).apply()
        results.append(model[0].weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("name", "head"),
    [("mlp", ["4"]), ("cnn", ["7", "9"]), ("cnn_bn", ["9", "11"]), ("vgg", ["15", "18", "20"])],
)
def test_head_reset_draws_the_fully_connected_tail_only(name: str, head: list[str]) -> None:
    model, optimizer = trained(name)
    method = HeadReset(model, zoo.batch(name)[0], seed=1)
    assert list(method.head) == head
    before = snapshot(model)
    receipt = method.apply(optimizer)
    for key, p in model.named_parameters():
        inside = key.rpartition(".")[0] in head
        assert torch.equal(p, before[key]) != inside, key
        assert (p in optimizer.state) != inside, key
    assert receipt.details["optimizer_tensors_reset"] == 3 * 2 * len(head)


def test_full_reset_is_a_fresh_network() -> None:
    model, optimizer = trained("cnn_bn")
    FullReset(model, seed=1).apply(optimizer)
    assert len(optimizer.state) == 0
    batch_norm = model[1]
    assert (batch_norm.running_mean == 0).all()
    assert (batch_norm.running_var == 1).all()
    assert int(batch_norm.num_batches_tracked) == 0
    control = zoo.build("cnn_bn", seed=11)
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        if p.dim() > 1:
            assert float(p.detach().std()) == pytest.approx(float(q.detach().std()), rel=0.5)
    train(model, optimizer, "cnn_bn", range(2))
    assert all(int(state["step"]) == 2 for state in optimizer.state.values())


def test_full_reset_can_keep_the_moments() -> None:
    model, optimizer = trained("mlp")
    FullReset(model, optimizer_state="keep").apply(optimizer)
    assert len(optimizer.state) == 6


def test_own_initializer() -> None:
    model, _ = trained("mlp")

    def fill(fresh: nn.Module) -> None:
        for p in fresh.parameters():
            nn.init.constant_(p, 0.25)

    FullReset(model, init=fill).apply()
    assert all((p == 0.25).all() for p in model.parameters())


def scale_up(model: nn.Module) -> None:
    """As many a training script has it: its own draw for some layers, and only for their weights."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.constant_(module.weight, 0.25)


def test_what_the_initializer_does_not_write_is_new_too() -> None:
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
    """Its own initializer cannot be called as torch's can."""

    def reset_parameters(self, std: float | None = None) -> None:
        if std is None and hasattr(self, "made"):
            raise NotImplementedError("call it with a deviation")
        self.made = True
        nn.init.normal_(self.weight, std=std or 1.0)
        nn.init.zeros_(self.bias)


def test_an_initializer_takes_the_place_of_modules_own_that_fail() -> None:
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


def test_an_initializer_that_cannot_be_used_is_an_error_at_once() -> None:
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


def test_that_shared_weights_are_drawn_in_two_ways_is_said() -> None:
    model = TiedToEmbedding()
    message = "'embed.weight' is shared by Embedding 'embed' and Linear 'head', which .* the last of them .* pass init="
    for make in (FullReset, lambda m: HeadReset(m, head=["head"]), lambda m: ShrinkPerturb(m, toward="fresh")):
        with pytest.warns(UserWarning, match=message) as caught:
            make(model)
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullReset(model, init=lambda m: nn.init.normal_(m.embed.weight))
        FullReset(zoo.build("tied"))  # two linear layers draw alike
        FullReset(Decided())  # a parent has the last word


def test_what_cannot_be_drawn_is_an_error() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"'0' holds the parameter 'shift' but has no reset_parameters"):
        FullReset(nn.Sequential(Shift()))
    FullReset(nn.Sequential(nn.MultiheadAttention(4, 2))).apply()


def test_a_weight_that_a_hook_computes_is_not_passed_over() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"of module '0' leaves its parameter 'weight_orig' as it is"):
        FullReset(model)


def changed_since(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    now = snapshot(model)
    return [name for name in before if not torch.equal(before[name], now[name])]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_was_computed_with_gradients_is_no_hindrance() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="of module '0' leaves its parameter 'weight_g' as it is"):
        FullReset(model)
    before = snapshot(model)
    HeadReset(model, head=["2"], optimizer_state="keep").apply()
    assert changed_since(before, model) == ["2.weight", "2.bias"]


class Policy(nn.Module):
    """Keeps its last distribution, as the policies of Stable-Baselines3 do, and a target network."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.target = nn.Linear(4, 2), nn.Linear(4, 2)
        self.kept: dict[str, list[Normal]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["last"] = [Normal(self.mean(x), 1.0)]
        return self.kept["last"][0].rsample()


def test_a_model_that_holds_what_it_computed_last_can_be_reset() -> None:
    policy = Policy()
    optimizer = SGD(policy.mean.parameters(), lr=0.1)
    reset = FullReset(policy, where=lambda name, _: name.startswith("mean."))
    policy(torch.randn(3, 4)).sum().backward()
    kept, before = policy.kept["last"][0].loc, snapshot(policy)
    reset.apply(optimizer)
    assert changed_since(before, policy) == ["mean.weight", "mean.bias"]
    assert policy.kept["last"][0].loc is kept
    assert kept.grad_fn is not None


class Slotted:
    __slots__ = ("last",)


def _slotted(h: Tensor) -> Slotted:
    keeper = Slotted()
    keeper.last = h
    return keeper


KEEPERS = {
    "deque": lambda h: deque([h]),
    "slots": _slotted,
    "partial": lambda h: partial(torch.add, h),
    "method of a recorder": lambda h: _slotted(h).__getattribute__,
}


@pytest.mark.parametrize("kind", KEEPERS)
def test_wherever_a_model_holds_what_it_computed_last_it_can_be_reset(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.kept = KEEPERS[kind](model(torch.randn(3, 4)))
    before = snapshot(model)
    FullReset(model).apply(SGD(model.parameters(), lr=0.1))
    assert changed_since(before, model) == ["0.weight", "0.bias"]


def test_attached_optimizers_forget_too_when_another_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    weights, biases = Adam([model[0].weight, model[2].weight]), Adam([model[0].bias, model[2].bias])
    reset = FullReset(model).attach(weights, biases)
    model(torch.randn(5, 4)).sum().backward()
    weights.step()
    biases.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receipt = reset.apply(weights)
    assert not weights.state
    assert not biases.state
    assert receipt.details["optimizer_tensors_reset"] == 12


def test_that_more_is_rewritten_than_is_trained_is_said() -> None:
    policy = Policy()
    optimizer = SGD(policy.mean.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"rewrote what no given or attached optimizer holds: target.weight, target.b"):
        FullReset(policy).apply(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullReset(policy, where=lambda name, _: name.startswith("mean.")).apply(optimizer)
        FullReset(policy, optimizer_state="keep").apply()  # nobody says what is trained


def test_an_initializer_that_writes_nothing_is_an_error() -> None:
    model = zoo.build("mlp")
    with pytest.raises(ValueError, match="init: it writes nothing in a copy of Sequential, whose parameters"):
        FullReset(model, init=lambda _: None)
    ReDo(model, zoo.batch("mlp")[0], init=lambda _: None)  # of single layers it may initialize others


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
def test_that_a_model_cannot_be_copied_is_said_before_it_is_trained(make: Callable[[nn.Module], Reinitializer]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model.lock = threading.Lock()
    message = "model: Sequential cannot be copied, to be re-drawn aside: TypeError: cannot pickle '_thread.lock' object"
    with pytest.raises(ValueError, match=message):
        make(model)
    ReDo(model, torch.zeros(1, 4))  # it draws layer by layer
    ShrinkPerturb(model)  # it draws nothing


def test_only_what_is_drawn_must_be_drawable() -> None:
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
    """Initializes its child, by `write`, and something of its own."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.own = nn.Parameter(torch.zeros(3))
        self.write = write
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.own)
        self.write(self.child.weight.data)


def test_what_a_parent_makes_of_its_children_stays() -> None:
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
    assert transformer.encoder.layers[0].linear1.weight.abs().max() < 1.01 * (6 / (8 + 256)) ** 0.5  # Xavier's


def test_a_parent_that_leaves_its_children_alone_draws_before_them() -> None:
    """The order of the draws is part of what a seed promises."""
    model = Parent(lambda w: None)
    FullReset(model, seed=3).apply()
    with seeded(3, 0):
        own, child = torch.empty(3).normal_(), nn.Linear(4, 4)
    assert torch.equal(model.own, own)
    assert torch.equal(model.child.weight, child.weight)


def test_statistics_without_parameters_start_anew_where_the_network_does() -> None:
    def statistics(apply: Callable[[nn.Module], Reinitializer]) -> list[bool]:
        layers = [nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)]
        model = nn.Sequential(*layers, nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)))
        model(torch.arange(12.0).view(4, 3))
        apply(model).apply()
        return [bool(n.running_mean.any()) for n in model.modules() if isinstance(n, nn.BatchNorm1d)]

    assert statistics(FullReset) == [False, False, False]
    assert statistics(lambda m: HeadReset(m, head=["4"])) == [True, True, False]
    assert statistics(lambda m: LayerwiseReset(m, torch.zeros(1, 3))) == [True, False, False]


def test_head_must_be_found_or_named() -> None:
    with pytest.raises(ValueError, match="pass an example input or head="):
        HeadReset(zoo.build("mlp"))
    with pytest.raises(ValueError, match=r"it ends in '0' \(Conv2d\), not in a linear layer"):
        HeadReset(nn.Sequential(nn.Conv2d(1, 1, 1)), torch.ones(1, 1, 2, 2))
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert HeadReset(model, head=["0"]).head == ("0",)


def test_an_action_without_effect_warns() -> None:
    for lam in (0.2, 0.4, 0.5, 0.7):
        with pytest.warns(UserWarning, match=r"shrink_perturb.apply\(\) changed none of 6 parameters"):
            ShrinkPerturb(zoo.build("mlp"), lam=lam).apply()


def test_bad_settings_are_errors() -> None:
    model = zoo.build("mlp")
    with pytest.raises(
        ValueError, match="toward: 'zero' is not allowed; it must be one of 'initial', 'fresh', 'noise'"
    ):
        ShrinkPerturb(model, toward="zero")
    with pytest.raises(ValueError, match="optimizer_state: 'drop' is not allowed"):
        FullReset(model, optimizer_state="drop")
    with pytest.raises(TypeError, match=r"shrink_perturb acts when data is new: call apply\(\)"):
        ShrinkPerturb(model).step()
