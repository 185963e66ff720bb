"""What a method takes notice of between its making and its acting, and that it refuses before it writes."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, Adamax, Rprop

from pliant import (
    DASH,
    FIRE,
    L2,
    SWR,
    UPGD,
    ContinualBackprop,
    FeatureRankRegularization,
    FullReset,
    HareTortoise,
    HeadReset,
    L2Init,
    LayerwiseReset,
    Method,
    ParsevalRegularization,
    ReDo,
    ShrinkPerturb,
    SpectralNormPenalty,
    SpectralRegularization,
    StreamingEWC,
    WeightRescaling,
)
from pliant._seeding import derive_seed
from pliant.methods._core.surgery import forget_state_, zero_moments_
from tests import zoo
from tests.loops import assert_same, snapshot, train

X, Y = zoo.batch("mlp")


def test_rotating_what_cannot_be_rotated_changes_nothing() -> None:
    model = zoo.build("mlp")
    optimizer = Adamax(model.parameters())
    train(model, optimizer, "mlp", [0])
    before = snapshot(model)
    method = FIRE(model, optimizer_state="rotate")
    with pytest.raises(ValueError, match="Adamax keeps 'exp_inf', which cannot be rewritten in part"):
        method.apply(optimizer)
    assert_same(snapshot(model), before)
    assert method.receipt is None


def test_resetting_a_part_of_what_cannot_be_cut_changes_nothing() -> None:
    model = nn.MultiheadAttention(4, 2)
    optimizer = Rprop(model.parameters())
    model(*torch.ones(3, 1, 2, 4))[0].sum().backward()
    optimizer.step()
    before = snapshot(model)
    with pytest.raises(ValueError, match="Rprop keeps 'prev', which cannot be rewritten in part"):
        FIRE(model, layers="qk").apply(optimizer)
    assert_same(snapshot(model), before)


WATCHING = {
    "redo": lambda model: ReDo(model, X, tau=0.9, every=1, seed=0),
    "continual backprop": lambda model: ContinualBackprop(model, X, rate=0.2, maturity=1, seed=0),
    "feature rank": lambda model: FeatureRankRegularization(model, X, lam=0.1),
}
LOOKING = {
    "a trace": lambda model: SWR(model, X, lam=0.0),
    "a look at new data": lambda model: DASH(model).apply(batches=[(X, Y)], loss_fn=nn.functional.cross_entropy),
}


@pytest.mark.parametrize("watching", WATCHING)
@pytest.mark.parametrize("looking", LOOKING)
def test_recyclers_ignore_forward_passes_of_other_methods(watching: str, looking: str) -> None:
    def run(first: str) -> tuple[nn.Module, Any]:
        model = zoo.build("mlp")
        optimizer = Adam(model.parameters(), lr=1e-2)
        if first == "look":
            LOOKING[looking](model)
        method = WATCHING[watching](model).attach(optimizer)
        if first == "watch":
            LOOKING[looking](model)
            assert method.receipt is None
        train(model, optimizer, "mlp", range(3))
        return model, method.receipt

    (one, receipt), (other, same) = run("look"), run("watch")
    assert_same(snapshot(one), snapshot(other))
    assert receipt == same


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
@pytest.mark.parametrize("optimizer_type", [Rprop, LBFGS])
@pytest.mark.parametrize("first", ["0", "2"])
def test_a_unit_is_renewed_as_a_whole_or_not_at_all(make: Any, optimizer_type: Any, first: str) -> None:
    """L-BFGS keeps its memory under its first parameter, which may be no part of the units."""
    model = zoo.build("mlp")
    optimizer = optimizer_type(model.parameters(), lr=0.0)
    settings: dict[str, Any] = {"tau": 10.0, "every": 1} if make is ReDo else {"rate": 1.0, "maturity": 1}
    make(model, X, where=lambda name, _: name.startswith(first), **settings).attach(optimizer)
    before = snapshot(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="cannot be rewritten in part"):
        optimizer.step(closure)
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=2e-6)  # the least step that Rprop takes is 1e-6


def test_data_passed_instead_of_an_optimizer_is_refused() -> None:
    model = zoo.build("mlp")
    before = snapshot(model)
    with pytest.raises(TypeError, match=r"is not a torch\.optim\.Optimizer; data goes to batches="):
        FullReset(model).apply([(X, Y)])
    assert_same(snapshot(model), before)


def test_a_reset_that_no_optimizer_learns_of_warns() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters())
    with pytest.warns(UserWarning, match=r"full_reset.apply\(\) is given no optimizer and attached to none"):
        FullReset(model).apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullReset(model, optimizer_state="keep").apply()
        FullReset(model).apply(optimizer)
        FullReset(model).attach(optimizer).apply()


def test_parameters_that_join_an_optimizer_are_served() -> None:
    def run(late: bool) -> nn.Module:
        model = zoo.build("mlp")
        layers = [model[0], model[2], model[4]]
        groups = [{"params": list(layer.parameters())} for layer in layers]
        optimizer = SGD(groups[2:] if late else groups[::-1], lr=0.1)
        methods = [
            L2(model, lam=0.1),
            UPGD(model, seed=0),
            HareTortoise(model, every=2),
            SWR(model, X, schedule="coupled"),
        ]
        methods.append(ReDo(model, X, tau=0.8, every=2, seed=0))
        for method in methods:
            method.attach(optimizer)
        for group in groups[1::-1] if late else ():
            optimizer.add_param_group(group)
        train(model, optimizer, "mlp", range(5))
        return model

    assert_same(snapshot(run(late=True)), snapshot(run(late=False)))


def test_parameters_that_were_frozen_when_the_method_was_made_are_named() -> None:
    model = zoo.build("mlp")
    model[0].requires_grad_(False)
    method = L2(model, where=lambda name, _: name != "4.bias")
    head = SGD(model[4].parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.attach(head, SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(True)
    with pytest.warns(
        UserWarning, match=r"l2 does not act on 0.weight, 0.bias: frozen, or not there, when it was made"
    ):
        method.attach(SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("part", ["0.weight", "0.bias", "2.weight"])
def test_units_that_were_frozen_later_are_left_alone(part: str) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.0)
    redo = ReDo(model, X, tau=10.0, every=1).attach(optimizer)
    model.get_parameter(part).requires_grad_(False)
    before = snapshot(model)
    train(model, optimizer, "mlp", [0])
    assert torch.equal(model[0].weight, before["0.weight"])
    assert redo.receipt is not None
    assert set(redo.receipt.details["units"]) == ({"2"} if part != "2.weight" else set())


@pytest.mark.parametrize("make", [SWR, ContinualBackprop, HareTortoise, StreamingEWC, UPGD])
def test_a_cast_after_the_making_is_an_error(make: Any) -> None:
    model = zoo.build("mlp")
    method = make(model, X) if make in (SWR, ContinualBackprop) else make(model)
    copied_model, copied = pickle.loads(pickle.dumps((model, method)))
    model.float()
    message = "'0.weight' was torch.float64 on cpu when .* was made and is torch.float32 on cpu now; cast and move the"
    with pytest.raises(ValueError, match=message):
        method.attach(SGD(model.parameters(), lr=0.1))
    copied.attach(SGD(copied_model.parameters(), lr=0.1))


def test_a_cast_is_accepted_where_placement_is_not_pinned() -> None:
    def run(cast_first: bool) -> nn.Module:
        model = zoo.build("mlp", dtype=torch.float32)
        if cast_first:
            model.double()
        method = L2Init(model, lam=0.1)
        optimizer = SGD(model.double().parameters(), lr=0.1)
        method.attach(optimizer)
        train(model, optimizer, "mlp", range(3))
        return model

    assert_same(snapshot(run(cast_first=False)), snapshot(run(cast_first=True)))


@pytest.mark.parametrize(
    "make", [SWR, lambda model, _: LayerwiseReset(model, X), lambda model, _: WeightRescaling(model)]
)
def test_the_state_of_another_architecture_is_refused(make: Any) -> None:
    def net(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 5)).double()

    state, other = make(net(8), X).state_dict(), make(net(16), X)
    before = copy.deepcopy(other.state_dict()["state"])
    with pytest.raises(
        ValueError, match=r"made for a parameter '0.weight' of shape \[8, 12\], this model's is \[16, 12\]"
    ):
        other.load_state_dict(state)
    torch.testing.assert_close(other.state_dict()["state"], before, rtol=0, atol=0, equal_nan=True)


def complex_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64))


@pytest.mark.parametrize(
    "make",
    [FIRE, ParsevalRegularization, SpectralRegularization, SpectralNormPenalty, HareTortoise, StreamingEWC, UPGD],
)
def test_complex_parameters_are_refused_by_methods_for_real_ones(make: Any) -> None:
    with pytest.raises(ValueError, match=r"model: parameter '0.weight' is complex; \w+ is for real ones"):
        make(complex_model())


@pytest.mark.parametrize("make", [L2, L2Init])
def test_the_gradient_of_complex_parameters_is_that_of_the_term(make: Any) -> None:
    model = complex_model()
    penalty = make(model, lam=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 - 0.5j)
            parameter.grad = torch.zeros_like(parameter)
    penalty.step()
    origins = penalty.initial if make is L2Init else dict.fromkeys(penalty.parameters, 0.0)
    term = sum((p - origins[name]).abs().square().sum() / 4 for name, p in penalty.parameters.items())
    expected = torch.autograd.grad(term, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_lbfgs_forgets_all_or_nothing() -> None:
    model = zoo.build("mlp")
    optimizer = LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    other = LBFGS(zoo.build("mlp").parameters())
    assert forget_state_([other], [model[4].weight]) == 0
    assert HeadReset(model, head=["4"]).apply(optimizer).details["optimizer_tensors_reset"] > 2
    assert not optimizer.state


def test_adagrads_sum_starts_where_it_was_told_to() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Adagrad([weight], lr=0.1, initial_accumulator_value=0.25)
    weight.grad = torch.tensor([1.0, 2.0])
    optimizer.step()
    assert zero_moments_([optimizer], weight, torch.tensor([True, False])) == 1
    assert optimizer.state[weight]["sum"].tolist() == [0.25, 4.25]


def test_parameters_added_to_a_group_are_noticed() -> None:
    def run(late: bool) -> nn.Module:
        model = zoo.build("mlp")
        head = list(model[4].parameters())
        optimizer = SGD([*model[:4].parameters(), *([] if late else head)], lr=0.1)
        SWR(model, X, lam=0.1).attach(optimizer)
        L2(model, lam=0.1).attach(optimizer)
        if late:
            optimizer.param_groups[0]["params"].extend(head)
        train(model, optimizer, "mlp", range(3))
        return model

    assert_same(snapshot(run(late=True)), snapshot(run(late=False)))


@pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")
@pytest.mark.parametrize("toward", ["initial", "fresh", "noise"])
def test_a_model_that_was_cast_is_shrunk_and_perturbed(toward: str) -> None:
    model = zoo.build("mlp")
    method = ShrinkPerturb(model, lam=1.0, toward=toward, noise_std=0.0, seed=0)
    before = snapshot(model)["0.weight"]
    model.float()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    method.apply()
    assert torch.equal(model[0].weight, before.float()) == (toward == "initial")
    assert model[0].weight.dtype == torch.float32


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 8), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]

    def optimizer(self, head: int) -> SGD:
        return SGD([*self.trunk.parameters(), *self.heads[head].parameters()], lr=0.1)


def take_steps(method: Method, optimizer: SGD, steps: int = 4) -> None:
    method.attach(optimizer)
    for _ in range(steps):
        optimizer.step()


def test_a_new_optimizer_continues_the_count_of_the_detached_one() -> None:
    model = TwoHeads()
    method = HareTortoise(model, every=6)
    for head in (0, 1):
        take_steps(method, model.optimizer(head))
        method.detach()
    assert (method.steps, method.returns) == ([8], 1)


def test_optimizers_are_counted_apart_in_order_of_attachment() -> None:
    model = TwoHeads()
    actor, critic = model.optimizer(0), model.optimizer(1)
    method = HareTortoise(model, every=6)
    take_steps(method, actor, 2)
    take_steps(method, critic, 5)
    assert method.steps == [2, 5]
    method.detach(actor)
    take_steps(method, model.optimizer(0), 3)
    assert (method.steps, method.returns) == ([5, 5], 0)
    resumed = HareTortoise(model, every=6)
    resumed.load_state_dict(method.state_dict())
    take_steps(resumed, model.optimizer(0), 1)
    assert (resumed.steps, resumed.returns) == ([6, 5], 1)


def test_a_new_optimizer_of_the_same_parameters_continues_the_count_without_detach() -> None:
    model = TwoHeads()
    method, old = HareTortoise(model, every=6), model.optimizer(0)
    take_steps(method, old)
    take_steps(method, model.optimizer(0))
    assert (method.steps, method.returns) == ([8], 1)


def test_detach_from_another_optimizer_is_an_error() -> None:
    model = zoo.build("mlp")
    one, other = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    redo = ReDo(model, X).attach(one)
    with pytest.raises(ValueError, match="redo is not attached to this SGD"):
        redo.detach(one, other)
    assert redo.optimizers == (one,)
    redo.detach(one, one)
    assert not one._optimizer_step_post_hooks
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_optimizer_that_pulls_nothing_leaves_the_receipt() -> None:
    model = zoo.build("mlp")
    weights = SGD([p for p in model.parameters() if p.ndim == 2], lr=0.1)
    biases = SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
    swr = SWR(model, X, lam=0.5).attach(weights, biases)
    nn.functional.cross_entropy(model(X), Y).backward()
    weights.step()
    receipt = swr.receipt
    assert receipt is not None
    assert receipt.tensors == 6
    biases.step()
    assert swr.receipt is not None
    assert swr.receipt.details["factors"] == receipt.details["factors"]


RENEWING = {
    "redo": lambda model: ReDo(model, X, tau=0.9, every=3, seed=0),
    "continual backprop": lambda model: ContinualBackprop(model, X, rate=0.3, maturity=1, seed=0),
}
UNDOING = {
    "upgd": lambda model: UPGD(model, sigma=0.0),
    "hare & tortoise": lambda model: HareTortoise(model, every=3),
}


@pytest.mark.parametrize("undoing", UNDOING)
@pytest.mark.parametrize("renewing", RENEWING)
def test_renewed_units_survive_other_methods_in_any_order(renewing: str, undoing: str) -> None:
    def run(order: int) -> nn.Module:
        model = zoo.build("mlp")
        optimizer = Adam(model.parameters(), lr=1e-2)
        recycler, other = RENEWING[renewing](model), UNDOING[undoing](model)
        for method in (recycler, other)[::order]:
            method.attach(optimizer)
        train(model, optimizer, "mlp", range(3))
        units = recycler.receipt.details["units"]["2"]
        assert units
        assert not model[4].weight[:, units].any()
        assert not model[2].bias[units].any()
        other.detach()
        recycler.detach()
        assert not optimizer._optimizer_step_post_hooks
        return model

    assert_same(snapshot(run(1)), snapshot(run(-1)))


def test_a_seed_is_a_number_of_any_kind() -> None:
    assert derive_seed("draw", numpy.int64(1), True) == derive_seed("draw", 1, 1) != derive_seed("draw", "1", 1)
    with pytest.raises(TypeError):
        derive_seed("draw", 0.5)


@pytest.mark.parametrize(
    ("make", "trace"),
    [
        (HareTortoise, lambda method: method.returns),
        (lambda model, **timing: ReDo(model, zoo.batch("mlp")[0], **timing), lambda method: method.draws),
        (WeightRescaling, lambda method: method.receipt and method.receipt.details["factors"]),
    ],
)
@pytest.mark.parametrize(
    ("timing", "expected"),
    [({"every": 4}, [4, 8]), ({"every": 4, "first": 2}, [2, 6, 10]), ({"every": 3, "first": 8}, [8, 11])],
)
def test_first_and_every_decide_which_steps_act(
    make: Callable[..., Any], trace: Callable[[Any], object], timing: dict[str, int], expected: list[int]
) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = make(model, **timing).attach(optimizer)
    acted = []
    for step in range(1, 12):
        before = trace(method)
        train(model, optimizer, "mlp", [step])
        acted += [step] * (trace(method) != before)
    assert acted == expected


def test_changing_every_later_takes_effect() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = HareTortoise(model, every=1000).attach(optimizer)
    method.every = 2
    train(model, optimizer, "mlp", range(6))
    assert method.returns == 3


@pytest.mark.parametrize("make", [HareTortoise, WeightRescaling])
def test_a_first_step_must_be_one(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="first: 0 is not allowed; it must be an integer"):
        make(zoo.build("mlp"), every=3, first=0)


def test_first_without_every_is_refused() -> None:
    with pytest.raises(ValueError, match="first: 5 has no effect without `every`"):
        HareTortoise(zoo.build("mlp"), every=None, first=5)


@pytest.mark.parametrize("make", [
    lambda m, x: WeightRescaling(m, every=5),
    lambda m, x: SWR(m, x, lam=0.5, every=5),
    lambda m, x: HareTortoise(m, beta=0.5, every=5),
    lambda m, x: ReDo(m, x, tau=0.5, every=5, seed=0),
])  # fmt: skip
def test_resumes_to_the_last_bit_after_parameters_joined_the_optimizer(make: Callable[..., Method]) -> None:
    def begin() -> tuple[nn.Module, Method]:
        model = zoo.build("mlp")
        return model, make(model, zoo.batch("mlp")[0])

    model, method = begin()
    optimizer = SGD(model[4].parameters(), lr=0.1)
    method.attach(optimizer)
    train(model, optimizer, "mlp", range(7))
    optimizer.add_param_group({"params": [*model[0].parameters(), *model[2].parameters()]})
    train(model, optimizer, "mlp", range(7, 9))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), method.state_dict()))
    train(model, optimizer, "mlp", range(9, 16))

    again, resumed = begin()
    other = SGD(again[4].parameters(), lr=0.1)
    other.add_param_group({"params": [*again[0].parameters(), *again[2].parameters()]})
    for target, state in zip((again, other, resumed), saved, strict=True):
        target.load_state_dict(state)
    resumed.attach(other)
    train(again, other, "mlp", range(9, 16))
    assert_same(snapshot(again), snapshot(model))
    assert resumed.steps == method.steps


@pytest.mark.parametrize("seed", [1.5, "a", True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    model = zoo.build("mlp")
    for make in (lambda: FullReset(model, seed=seed), lambda: ReDo(model, zoo.batch("mlp")[0], seed=seed)):
        with pytest.raises(ValueError, match=f"seed: {seed!r} is not allowed; it must be a whole number or None"):
            make()
