"""Models that change after a method was made: replaced, frozen and unfrozen parameters, other lists of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune
from torch.optim import SGD, Adam, Optimizer

from pliant import (
    DASH,
    FIRE,
    L2,
    SWR,
    UPGD,
    FullReset,
    HareTortoise,
    L2Init,
    LayerwiseReset,
    Method,
    ReDo,
    Shrink,
    ShrinkPerturb,
    StreamingEWC,
    WeightClipping,
    WeightRescaling,
)
from pliant.methods import create
from tests import zoo
from tests.loops import assert_same, snapshot, train, training_step

X, Y = zoo.batch("mlp")

METHODS: dict[str, Callable[[nn.Module], Method]] = {
    "swr": lambda m: SWR(m, X, lam=0.1),
    "l2_init": lambda m: L2Init(m, lam=0.1),
    "weight_rescaling": lambda m: WeightRescaling(m, every=1),
    "weight_clipping": lambda m: WeightClipping(m, kappa=0.5),
    "hare_tortoise": lambda m: HareTortoise(m, beta=0.9, every=2),
    "full_reset": lambda m: FullReset(m, seed=0),
    "shrink_perturb": lambda m: ShrinkPerturb(m, lam=0.5),
    "fire": FIRE,
    "dash": DASH,
    "layerwise": lambda m: LayerwiseReset(m, X, seed=0),
    "shrink": lambda m: Shrink(m, X, proportional=False),
}


def act(method: Method, model: nn.Module, optimizer: Optimizer) -> None:
    """Let a method act in its own way."""
    if method.kind == "reinitializer":
        method.apply(optimizer, batches=[(X, Y)], loss_fn=cross_entropy)
    else:
        method.attach(optimizer)
        train(model, optimizer, "mlp", range(4))


@pytest.mark.parametrize("how", ["a new head", "assigned"])
@pytest.mark.parametrize("name", METHODS)
def test_a_replaced_parameter_is_an_error(name: str, how: str) -> None:
    model = zoo.build("mlp")
    method = METHODS[name](model)
    if how == "assigned":
        model.load_state_dict(zoo.build("mlp").state_dict(), assign=True)
    else:
        model[4] = nn.Linear(16, 5, dtype=torch.float64)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"model: parameter '\d\.weight' was replaced since {name} was made"):
        act(method, model, SGD(model.parameters(), lr=0.0))
    assert_same(snapshot(model), before)


@pytest.mark.parametrize(
    "name", ["l2", "l2_init", "spectral", "spectral_norm", "wasserstein", "streaming_ewc", "parseval", "upgd"]
)
def test_frozen_parameters_with_zero_gradients_do_not_move(name: str) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    create(name, model).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    model[0].requires_grad_(False)
    before = snapshot(model)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        inputs, labels = zoo.batch("mlp", seed=step)
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


@pytest.mark.parametrize("name", ["l2_init", "swr"])
def test_a_replaced_parameter_of_a_list_is_an_error(name: str) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    METHODS[name](model).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    model[4] = nn.Linear(16, 5, dtype=torch.float64)
    params = optimizer.param_groups[0]["params"]
    params[4], params[5] = model[4].weight, model[4].bias
    with pytest.raises(ValueError, match=rf"model: parameter '4\.weight' was replaced since {name} was made"):
        train(model, optimizer, "mlp", [2])


def test_returning_to_the_tortoise_of_a_frozen_model_says_that_nothing_changed() -> None:
    model = zoo.build("mlp")
    method = HareTortoise(model)
    model.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"hare_tortoise.apply\(\) changed nothing: every parameter is frozen"):
        receipt = method.apply()
    assert (receipt.tensors, receipt.entries, receipt.details["returns"]) == (0, 0, 0)


@pytest.mark.parametrize("name", METHODS)
def test_parameters_frozen_later_are_not_changed(name: str) -> None:
    model = zoo.build("mlp")
    method = METHODS[name](model)
    train(model, SGD(model.parameters(), lr=0.1), "mlp", range(2))
    model[0].requires_grad_(False)
    before = snapshot(model)
    act(method, model, Adam(model.parameters(), lr=0.1))
    after = snapshot(model)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["0.bias"], before["0.bias"])
    assert not torch.equal(after["2.weight"], before["2.weight"])


@pytest.mark.parametrize("state", ["reset", "rotate"])
def test_optimizer_state_of_a_frozen_weight_is_kept(state: str) -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=0.1)
    fire = FIRE(model, optimizer_state=state)
    train(model, optimizer, "mlp", range(3))
    model[0].requires_grad_(False)
    before = optimizer.state[model[0].weight]["exp_avg"].clone()
    receipt = fire.apply(optimizer)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], before)
    assert list(receipt.details["deviation_from_isometry"]) == ["2.weight", "4.weight"]


@pytest.mark.parametrize(
    "make", [lambda m: FullReset(m, seed=0), lambda m: LayerwiseReset(m, zoo.batch("cnn_bn")[0], seed=0)]
)
def test_statistics_of_a_norm_layer_that_was_frozen_stay(make: Callable[[nn.Module], Method]) -> None:
    model = zoo.build("cnn_bn")
    method = make(model)
    train(model, SGD(model.parameters(), lr=0.1), "cnn_bn", range(3))
    model[5].requires_grad_(False)
    before = snapshot(model)
    method.apply()
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(model.state_dict()[f"5.{name}"], before[f"5.{name}"]), name


def test_the_tortoise_copies_frozen_parameters_and_the_hare_keeps_them() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = HareTortoise(model, beta=0.5, every=None).attach(optimizer)
    train(model, optimizer, "mlp", range(3))
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    with method.tortoise_weights():
        assert torch.equal(model[0].weight, method.tortoise["0.weight"]), "to look at, all of the tortoise"
    train(model, optimizer, "mlp", range(3, 63))
    torch.testing.assert_close(method.tortoise["0.weight"], frozen, rtol=1e-12, atol=1e-12)
    assert torch.equal(model[0].weight, frozen)


def test_step_by_hand_does_not_change_frozen_parameters() -> None:
    model = zoo.build("mlp")
    methods = [HareTortoise(model, beta=0.9, every=1), WeightRescaling(model), WeightClipping(model, kappa=0.5)]
    train(model, SGD(model.parameters(), lr=0.5), "mlp", range(3))
    model[0].requires_grad_(False)
    before = snapshot(model)
    for method in methods:
        method.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_a_target_network_may_be_replaced() -> None:
    """No optimizer trains it, so that nothing is done to it at all."""
    agent = nn.ModuleDict({"online": zoo.build("mlp"), "target": zoo.build("mlp")})
    method = L2Init(agent, lam=0.1).attach(SGD(agent["online"].parameters(), lr=0.1))
    agent["target"] = copy.deepcopy(agent["online"])
    before = snapshot(agent["target"])
    method.detach()
    optimizer = SGD(agent["online"].parameters(), lr=0.1)
    method.attach(optimizer)
    train(agent["online"], optimizer, "mlp", range(2))
    assert method.receipt is not None
    assert method.receipt.details["steps"] == 2
    assert_same(snapshot(agent["target"]), before)


@pytest.mark.filterwarnings("error")
def test_a_head_that_is_left_out_may_be_new_at_every_task() -> None:
    model = zoo.build("mlp")
    method = L2Init(model, lam=0.1, where=lambda name, _: not name.startswith("4."))
    for task in range(2):
        model[4] = nn.Linear(16, 5, dtype=torch.float64)
        optimizer = SGD(model.parameters(), lr=0.1)
        method.attach(optimizer)
        train(model, optimizer, "mlp", [task])
        method.detach()
    assert method.receipt is not None
    assert method.receipt.details["steps"] == 2


def test_shrink_leaves_out_parameters_frozen_at_construction() -> None:
    model = zoo.build("mlp")
    shrink = Shrink(model, X, lam=0.5)
    model[0].requires_grad_(False)
    before = snapshot(model)
    with torch.no_grad():
        outputs = model(X)
        shrink.apply()
        torch.testing.assert_close(model(X), outputs / 4, rtol=1e-12, atol=1e-12)
    assert torch.equal(model[0].weight, before["0.weight"])


@pytest.mark.parametrize("make", [lambda m: SWR(m, X, lam=0.1), lambda m: Shrink(m, X)])
def test_a_frozen_parameter_that_must_follow_is_an_error(make: Callable[[nn.Module], Method]) -> None:
    model = zoo.build("mlp")
    method = make(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model[2].bias.requires_grad_(False)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"'2\.bias' was frozen since (swr|shrink) was made, but must follow"):
        method.step() if method.kind == "after_step" else method.apply()
    assert_same(snapshot(model), before)


def test_swr_pulls_parameters_that_are_unfrozen() -> None:
    model = zoo.build("mlp")
    swr = SWR(model, X, lam=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model[0].requires_grad_(False)
    swr.step()
    assert float(model[0].weight.norm()) == pytest.approx(2 * float(swr.initial_norms[0]))
    assert float(model[2].weight.norm()) == pytest.approx(float(swr.initial_norms[1]))
    model[0].requires_grad_(True)
    swr.step()
    assert float(model[0].weight.norm()) == pytest.approx(float(swr.initial_norms[0]))


def test_unknown_parameters_that_start_to_learn_give_one_warning() -> None:
    model = zoo.build("mlp")
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    WeightClipping(model, kappa=0.1).attach(optimizer)
    train(model, optimizer, "mlp", [0])
    model[0].requires_grad_(True)
    with pytest.warns(
        UserWarning, match=r"weight_clipping does not act on 0\.weight, 0\.bias: frozen, or not there"
    ) as told:
        train(model, optimizer, "mlp", [1, 2])
    assert len(told) == 1


class Heads(nn.Module):
    """A trunk with two heads, of which one is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 5)])

    def forward(self, x: Tensor) -> Tensor:
        return sum((head(torch.relu(self.trunk(x))) for head in self.heads), start=torch.zeros(()))


def test_a_group_with_the_same_number_of_other_parameters_is_noticed() -> None:
    torch.manual_seed(0)
    model = Heads().double()
    optimizer = SGD([{"params": model.trunk.parameters()}, {"params": model.heads[0].parameters()}], lr=0.1)
    clipping = WeightClipping(model, kappa=0.1).attach(optimizer)
    train(model, optimizer, "mlp", [0])
    optimizer.param_groups[1]["params"] = list(model.heads[1].parameters())
    train(model, optimizer, "mlp", [1])
    assert float(model.heads[1].weight.detach().abs().max()) <= clipping.bounds["heads.1.weight"]


def test_a_wrapper_of_an_optimizer_is_named() -> None:
    class Wrapper(Optimizer):
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups: list[dict[str, Any]] = optimizer.param_groups

    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = L2Init(model, lam=0.1)
    with pytest.raises(TypeError, match=r"optimizers: this Wrapper wraps an optimizer \('optimizer'\); pass the inner"):
        method.attach(optimizer, Wrapper(optimizer))
    assert not method.optimizers


def test_a_wrapper_with_hooks_of_its_own_is_refused_too() -> None:
    class SAM(Optimizer):
        def __init__(self, params: Any, base: Optimizer) -> None:
            super().__init__(params, {})
            self.base_optimizer = base

    model = zoo.build("mlp")
    wrapper = SAM(model.parameters(), Adam(model.parameters()))
    with pytest.raises(TypeError, match=r"this SAM wraps an optimizer \('base_optimizer'\); pass the inner optimizer"):
        L2(model, lam=0.1).attach(wrapper)
    before = snapshot(model)
    with pytest.raises(TypeError, match="this SAM wraps an optimizer"):
        FullReset(model).apply(wrapper)
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("make", [lambda m, x: SWR(m, x), lambda m, x: StreamingEWC(m), lambda m, x: UPGD(m)])
def test_a_model_that_is_cast_under_way_is_named(make: Callable[[nn.Module, Tensor], Method]) -> None:
    model = zoo.build("mlp", dtype=torch.float32)
    x, _ = zoo.batch("mlp", dtype=torch.float32)
    optimizer = SGD(model.parameters(), lr=0.1)
    make(model, x).attach(optimizer)
    model.double()
    with pytest.raises(ValueError, match=r"parameter '0.weight' was torch.float32 on cpu when .* cast and move the"):
        train(model, optimizer, "mlp", [0])


def test_pruning_a_weight_after_construction_is_an_error_that_names_it() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    SWR(model, zoo.batch("mlp")[0]).attach(optimizer)
    prune.l1_unstructured(model[2], "weight", 0.5)
    with pytest.raises(ValueError, match="the tensor 'weight' was removed after the analysis"):
        train(model, optimizer, "mlp", [0])


def with_an_empty_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5), Beside(nn.Linear(0, 5))).double()


class Beside(nn.Module):
    """Adds what a layer makes of no input at all."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x[:, :0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", [*METHODS, "spectral", "spectral_norm", "upgd", "wasserstein", "parseval"])
def test_a_parameter_without_entries_is_passed_over(name: str) -> None:
    model = with_an_empty_layer()
    method = METHODS[name](model) if name in METHODS else create(name, model)
    act(method, model, SGD(model.parameters(), lr=0.1))
    assert "3.layer.weight" not in method.parameters
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_replaced_head_outside_the_units_is_accepted() -> None:
    model = zoo.build("mlp").float()
    x, y = zoo.batch("mlp", dtype=torch.float32)
    redo = ReDo(model, x, tau=1.0, every=1, seed=0, where=lambda name, _: name.startswith("0."))
    model[4] = nn.Linear(model[4].in_features, model[4].out_features)
    optimizer = SGD(model.parameters(), lr=0.1)
    redo.attach(optimizer)
    training_step(model, optimizer, (x, y))
    assert list(redo.receipt.details["units"]) == ["0"]
    model[2] = nn.Linear(model[2].in_features, model[2].out_features)
    with pytest.raises(ValueError, match=r"model: parameter '2.weight' was replaced since redo was made"):
        redo.attach(SGD(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("process_group")
def test_methods_see_the_model_inside_wrappers() -> None:
    for wrap in (nn.parallel.DistributedDataParallel, lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (1,)))):
        for make in (lambda m: SWR(m, X), L2Init, FIRE, HareTortoise):
            model = zoo.build("mlp")
            assert list(make(wrap(model)).parameters) == [*make(zoo.build("mlp")).parameters]
