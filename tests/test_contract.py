"""What every registered method must keep, on every kind of model: the contract of `pliant.Method`."""

import copy
import gc
import io
import pickle
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from pliant import Method, methods
from tests import zoo
from tests.loops import assert_same, differs, snapshot, train

# Settings that make a method act within a few steps where its defaults are made for long runs, and that keep the sweep
# short: an analyzed graph gives SWR on these chains the very same plan (tests/methods/test_swr.py).
EAGER: dict[str, dict[str, Any]] = {
    **zoo.REQUIRED,
    "swr": {"plan": {"order": "forward"}},
    "weight_clipping": {"kappa": 0.5},
    "hare_tortoise": {"every": 2},
    "redo": {"tau": 0.8, "every": 2},
    "continual_backprop": {"rate": 0.2, "maturity": 1},
    "regrama": {"tau": 0.8, "every": 2},
    "snr": {"longest": 2},
    "selective_reinit": {"fraction": 0.2, "every": 2},
    "optimizer_reset": {"every": 4},  # at the time of new data, another method may have reset the state already
}

# Terms of the batch as a whole: parts of a batch have other features, and the loop's loss scale has to be told.
BATCHWISE = {"feature_rank"}

# torch refuses to pickle modules with parametrizations.
NOT_PICKLED = {"spectral_normalization"}

NAMES = methods.names()
AT_EACH_STEP = [n for n in NAMES if methods.info(n).kind in ("penalty", "after_step", "recycler")]
REINITIALIZERS = [n for n in NAMES if methods.info(n).kind == "reinitializer"]
# The units of a model whose weights are tied hang together: what acts on units says so (test_recyclers.py).
ON_UNITS = [n for n in NAMES if methods.info(n).kind in ("recycler", "architecture")]
# A reset of a tied head would draw the layer that it is tied to (tests/methods/test_initial.py).
NOT_TIED = [*ON_UNITS, "head_reset", "plasticity_injection"]  # the last one needs a Sequential
PAIRS = [(method, name) for method in NAMES for name in zoo.MODELS if not (method in NOT_TIED and name == "tied")]
WITH_STRENGTH = [n for n in NAMES if any(t.name == "lam" and t.low == 0.0 for t in methods.info(n).tunables)]


def make(method: str, model: nn.Module, name: str, **settings: Any) -> Method:
    dtype = next(model.parameters()).dtype
    example = zoo.batch(name, dtype=dtype)[0]
    return methods.create(method, model, example=example, seed=7, **{**EAGER.get(method, {}), **settings})


def run(method: str, name: str, steps: int = 6, *, dtype: torch.dtype = torch.float64, **settings: Any) -> nn.Module:
    model = zoo.build(name, dtype=dtype)
    made = make(method, model, name, **settings)
    optimizer = Adam(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    train(model, optimizer, name, range(steps), methods=[made], new_data_at=3)
    return model


def vanilla(name: str, steps: int = 6) -> nn.Module:
    model = zoo.build(name)
    train(model, Adam(model.parameters(), lr=1e-2), name, range(steps))
    return model


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_changes_training_and_says_so(method: str, name: str) -> None:
    model = zoo.build(name)
    made = make(method, model, name)
    optimizer = Adam(model.parameters(), lr=1e-2)
    assert made.attach(optimizer) is made
    train(model, optimizer, name, range(6), methods=[made], new_data_at=3)
    assert differs(snapshot(model), snapshot(vanilla(name)))
    assert made.receipt is not None
    assert made.receipt.tensors > 0
    assert made.receipt.entries > 0
    assert made.receipt.as_dict()["method"] == method
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(("method", "name"), PAIRS)
def test_resumed_run_is_bit_equal(method: str, name: str) -> None:
    whole = run(method, name, 8)

    first = zoo.build(name)
    made = make(method, first, name)
    optimizer = Adam(first.parameters(), lr=1e-2)
    made.attach(optimizer)
    train(first, optimizer, name, range(4), methods=[made], new_data_at=3)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict(), "method": made.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = zoo.build(name, seed=99)
    resumed = make(method, second, name)
    optimizer = Adam(second.parameters(), lr=1e-2)
    second.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["method"])
    resumed.attach(optimizer)
    train(second, optimizer, name, range(4, 8), methods=[resumed], new_data_at=3)
    assert_same(snapshot(second), snapshot(whole))


@pytest.mark.parametrize("method", REINITIALIZERS)
def test_state_carries_the_next_draw(method: str) -> None:
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    data = {"batches": [zoo.batch("mlp")], "loss_fn": cross_entropy}
    train(model, SGD(model.parameters(), lr=0.1), "mlp", range(2))
    made.apply(**data)
    state, values = copy.deepcopy(made.state_dict()), snapshot(model)
    made.apply(**data)
    other = zoo.build("mlp")
    resumed = make(method, other, "mlp")
    other.load_state_dict(values)
    resumed.load_state_dict(state)
    resumed.apply(**data)
    assert_same(snapshot(other), snapshot(model))


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("method", WITH_STRENGTH)
@pytest.mark.filterwarnings("ignore:.*changed none of")
def test_strength_zero_is_a_no_op(method: str, name: str) -> None:
    assert_same(snapshot(run(method, name, lam=0.0)), snapshot(vanilla(name)))


@pytest.mark.parametrize("method", NAMES)
def test_same_seed_same_run(method: str) -> None:
    torch.manual_seed(1)
    first = run(method, "cnn_bn")
    torch.manual_seed(2)
    assert_same(snapshot(first), snapshot(run(method, "cnn_bn")))


@pytest.mark.parametrize("method", NAMES)
def test_detach_leaves_no_hook(method: str) -> None:
    model = zoo.build("cnn_bn")
    made = make(method, model, "cnn_bn")
    optimizer = Adam(model.parameters(), lr=1e-2)
    before = hooks_of(model, optimizer)
    made.attach(optimizer)
    made.detach()
    assert hooks_of(model, optimizer) == before
    assert made.optimizers == ()
    values = snapshot(model)
    control = copy.deepcopy(model)
    train(model, optimizer, "cnn_bn", range(2))
    train(control, Adam(control.parameters(), lr=1e-2), "cnn_bn", range(2))
    assert differs(values, snapshot(model))
    assert_same(snapshot(model), snapshot(control))


def hooks_of(model: nn.Module, optimizer: Optimizer) -> int:
    count = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    for module in model.modules():
        count += len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
    return count


@pytest.mark.parametrize("method", NAMES)
def test_a_thousand_attachments_leave_no_trace(method: str) -> None:
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    optimizer = SGD(model.parameters(), lr=1e-2)

    def memory_after(cycles: int) -> int:
        for _ in range(cycles):
            made.attach(optimizer)
            made.detach()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    hooks = hooks_of(model, optimizer)
    gc.freeze()  # What was there before is not searched for garbage again and again.
    tracemalloc.start()
    # Python keeps freed objects in lists of a bounded length, and other threads are at work: what is left behind grows
    # every time.
    memory = [memory_after(cycles) for cycles in (100, *(180,) * 5)]
    growth = min(after - before for before, after in pairwise(memory))
    tracemalloc.stop()
    gc.unfreeze()
    assert hooks_of(model, optimizer) == hooks
    assert growth < 1_200, f"{growth} bytes in 180 cycles"


@pytest.mark.parametrize("method", NAMES)
def test_attach_twice_is_an_error(method: str) -> None:
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    optimizer = SGD(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    with pytest.raises(ValueError, match=f"{method} is attached to this SGD already"):
        made.attach(optimizer)


@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_optimizer_of_another_model_is_an_error(method: str) -> None:
    optimizer = SGD(zoo.build("mlp").parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"holds none of the \d parameters"):
        make(method, zoo.build("mlp"), "mlp").attach(optimizer)


@pytest.mark.parametrize("method", [name for name in NAMES if methods.info(name).kind == "reinitializer"])
def test_applying_with_the_optimizer_of_another_model_is_an_error(method: str) -> None:
    model = zoo.build("mlp")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"hold none of the \d parameters"):
        make(method, model, "mlp").apply(SGD(zoo.build("mlp").parameters(), lr=1e-2))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", NAMES)
def test_keeps_dtype_and_identity(method: str, dtype: torch.dtype) -> None:
    model = zoo.build("cnn_bn", dtype=dtype)
    made = make(method, model, "cnn_bn")
    tensors = {name: id(p) for name, p in model.named_parameters()}
    optimizer = SGD(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    train(model, optimizer, "cnn_bn", range(4), methods=[made], new_data_at=2)
    assert {name: id(p) for name, p in model.named_parameters()} == tensors
    assert all(p.dtype == dtype and torch.isfinite(p).all() for p in model.parameters())
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == groups


@pytest.mark.parametrize("method", NAMES)
def test_frozen_parameters_are_left_alone(method: str) -> None:
    model = zoo.build("cnn_bn")
    for p in list(model.parameters())[:4]:
        p.requires_grad_(False)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    made = make(method, model, "cnn_bn")
    optimizer = Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    made.attach(optimizer)
    train(model, optimizer, "cnn_bn", range(4), methods=[made], new_data_at=2)
    for name, value in frozen.items():
        assert torch.equal(model.get_parameter(name), value), name
        assert model.get_parameter(name).grad is None


@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_a_parameter_without_gradient_is_no_trouble(method: str) -> None:
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    optimizer = SGD(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    inputs, labels = zoo.batch("mlp")
    cross_entropy(model(inputs), labels).backward()
    model[0].weight.grad = None
    optimizer.step()
    assert model[0].weight.grad is None
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("method", [n for n in AT_EACH_STEP if n not in BATCHWISE])
def test_gradient_accumulation(method: str) -> None:
    def accumulated(parts: int) -> nn.Module:
        model = zoo.build("mlp")
        made = make(method, model, "mlp")
        optimizer = SGD(model.parameters(), lr=1e-2)
        made.attach(optimizer)
        for step in range(5):
            inputs, labels = zoo.batch("mlp", seed=step)
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
                (cross_entropy(model(x), y) / parts).backward()
            optimizer.step()
        return model

    for left, right in zip(accumulated(1).parameters(), accumulated(4).parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_loss_scaling_changes_nothing(method: str, fused: bool) -> None:
    """A scale that is a power of two is exact, so runs with and without a GradScaler are equal to the last bit."""

    def scaled(enabled: bool) -> nn.Module:
        model = zoo.build("mlp")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        made = make(method, model, "mlp", **({"loss_scale": scaler.get_scale} if method in BATCHWISE else {}))
        optimizer = SGD(model.parameters(), lr=2**-6, fused=fused)
        made.attach(optimizer)
        for step in range(5):
            inputs, labels = zoo.batch("mlp", seed=step)
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(inputs), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        return model

    assert_same(snapshot(scaled(True)), snapshot(scaled(False)))


@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_a_skipped_step_leaves_no_trace(method: str) -> None:
    """Not even in what comes after it. (Fused, an optimizer skips by itself; others are not called at all.)"""

    def skipping(skip: bool) -> tuple[dict[str, torch.Tensor], Any]:
        model = zoo.build("mlp")
        made = make(method, model, "mlp", **({"sigma": 0.0} if method == "upgd" else {}))  # Draws go on.
        optimizer = Adam(model.parameters(), lr=1e-2, fused=True)
        made.attach(optimizer)
        train(model, optimizer, "mlp", range(3))
        if skip:
            scaler, before = torch.amp.GradScaler("cpu", init_scale=2.0), snapshot(model)
            inputs, labels = zoo.batch("mlp")
            optimizer.zero_grad()
            scaler.scale(cross_entropy(model(inputs), labels) * float("inf")).backward()
            scaler.step(optimizer)
            assert_same(snapshot(model), before)
        train(model, optimizer, "mlp", range(3, 6))
        return snapshot(model), {key: value for key, value in made.state_dict()["state"].items() if key != "draws"}

    after, control = skipping(True), skipping(False)
    if method not in ("spectral", "spectral_norm"):  # Their power iterations go on, at the same weights.
        torch.testing.assert_close(after, control, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_closure_gives_the_same_run(method: str, positional: bool) -> None:
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    for step in range(6):
        inputs, labels = zoo.batch("mlp", seed=100 + step)

        def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        loss = optimizer.step(closure) if positional else optimizer.step(closure=closure)
        assert torch.isfinite(loss)
    assert_same(snapshot(model), snapshot(run(method, "mlp")))


@pytest.mark.parametrize("method", NAMES)
def test_deepcopy_and_pickle(method: str) -> None:
    model = zoo.build("cnn_bn")
    made = make(method, model, "cnn_bn")
    optimizer = Adam(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    train(model, optimizer, "cnn_bn", range(3), methods=[made], new_data_at=1)
    state = copy.deepcopy(optimizer.state_dict())
    copies = [copy.deepcopy((model, made))]
    if method not in NOT_PICKLED:
        copies.append(pickle.loads(pickle.dumps((model, made))))
    train(model, optimizer, "cnn_bn", range(3, 6), methods=[made], new_data_at=4)
    for other_model, other_method in copies:
        assert other_method.model is other_model
        assert other_method.optimizers == ()
        other = Adam(other_model.parameters(), lr=1e-2)
        other.load_state_dict(copy.deepcopy(state))
        other_method.attach(other)
        train(other_model, other, "cnn_bn", range(3, 6), methods=[other_method], new_data_at=4)
        assert_same(snapshot(other_model), snapshot(model))


@pytest.mark.parametrize("method", NAMES)
def test_copy_of_the_model_alone_is_free_of_the_method(method: str) -> None:
    model = zoo.build("cnn_bn")
    made = make(method, model, "cnn_bn")
    optimizer = Adam(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    train(model, optimizer, "cnn_bn", range(2))
    clone = copy.deepcopy(model)
    values = snapshot(model)
    train(clone, Adam(clone.parameters(), lr=1e-2), "cnn_bn", range(2))
    assert_same(snapshot(model), values)


@pytest.mark.parametrize("method", NAMES)
def test_loading_into_another_architecture_changes_nothing(method: str) -> None:
    source = make(method, zoo.build("mlp"), "mlp")
    model = zoo.build("cnn")
    target = make(method, model, "cnn")
    before = copy.deepcopy(target.state_dict())
    other = "l2" if method != "l2" else "l2_init"
    with pytest.raises(ValueError, match=f"made by method '{method}'"):
        make(other, model, "cnn").load_state_dict(source.state_dict())
    with pytest.raises(ValueError, match=r"made for a parameter '.*' of shape"):
        target.load_state_dict(source.state_dict())
    assert str(target.state_dict()) == str(before)


@pytest.mark.parametrize("method", NAMES)
def test_a_model_without_values_is_an_error(method: str) -> None:
    settings = {"example": zoo.batch("mlp")[0], **zoo.REQUIRED.get(method, {})}
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device"):
        methods.create(method, zoo.mlp().to("meta"), **settings)
    with pytest.raises(ValueError, match=r"'0\.weight' is not initialized yet"):
        methods.create(method, nn.Sequential(nn.LazyLinear(3)), **settings)


@pytest.mark.parametrize("method", WITH_STRENGTH)
@pytest.mark.parametrize("lam", [-0.1, float("nan"), float("inf"), "strong", True])
def test_a_strength_that_makes_no_sense_is_an_error(method: str, lam: Any) -> None:
    with pytest.raises(ValueError, match=r"lam: .* is not allowed; it must be"):
        make(method, zoo.build("mlp"), "mlp", lam=lam)


@pytest.mark.parametrize("method", NAMES)
def test_unknown_setting_is_an_error(method: str) -> None:
    with pytest.raises(ValueError, match=f"method '{method}': there is no 'lambda_'"):
        make(method, zoo.build("mlp"), "mlp", lambda_=1.0)


@pytest.mark.parametrize("method", NAMES)
def test_channels_last_and_non_contiguous_weights(method: str) -> None:
    plain = run(method, "cnn")
    model = zoo.build("cnn").to(memory_format=torch.channels_last)
    linear = model[7]
    linear.weight.data = linear.weight.data.t().contiguous().t()
    assert not linear.weight.is_contiguous()
    assert not model[3].weight.is_contiguous()
    made = make(method, model, "cnn")
    optimizer = Adam(model.parameters(), lr=1e-2)
    made.attach(optimizer)
    train(model, optimizer, "cnn", range(6), methods=[made], new_data_at=3)
    for (name, left), right in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("method", [n for n in AT_EACH_STEP if n not in BATCHWISE])
def test_to_maximize_minus_the_loss_is_to_minimize_it(method: str, with_closure: bool) -> None:
    def run(sign: int) -> tuple[nn.Module, list[float]]:
        model = zoo.build("mlp")
        made = make(method, model, "mlp")
        groups = [{"params": model[0].parameters(), "maximize": sign < 0}, {"params": model[4].parameters()}]
        optimizer = SGD(groups, lr=1e-2, maximize=sign < 0)
        made.attach(optimizer)
        losses = []
        for step in range(4):
            inputs, labels = zoo.batch("mlp", seed=step)

            def closure(inputs: torch.Tensor = inputs, labels: torch.Tensor = labels) -> torch.Tensor:
                optimizer.zero_grad()
                loss = sign * cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            if with_closure:
                losses.append(sign * float(optimizer.step(closure).detach()))
            else:
                closure()
                optimizer.step()
        return model, losses

    (up, gains), (down, losses) = run(-1), run(1)
    assert_same(snapshot(up), snapshot(down))
    assert gains == losses


@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_two_optimizers_share_a_method(method: str) -> None:
    """Each optimizer's step acts on the parameters that it holds and leaves the other's alone."""
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    head = SGD(model[4].parameters(), lr=1e-2)
    body = SGD([*model[0].parameters(), *model[2].parameters()], lr=1e-2)
    made.attach(body, head)
    assert made.optimizers == (body, head)
    train(model, body, "mlp", range(3))
    before = snapshot(model)
    inputs, labels = zoo.batch("mlp")
    model.zero_grad()
    cross_entropy(model(inputs), labels).backward()
    head.step()
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert torch.equal(before[name], model.get_parameter(name)), name
    assert not torch.equal(before["4.weight"], model.get_parameter("4.weight"))


OF_ONE_MODEL = [n for n in NAMES if methods.info(n).kind != "architecture"]
TOGETHER = [
    (first, second)
    for away in (5, 10)
    for first, second in zip(OF_ONE_MODEL, OF_ONE_MODEL[away:] + OF_ONE_MODEL[:away], strict=True)
    # Of two that act on new data, the second may overwrite what the first has done.
    if not {first, second} <= set(REINITIALIZERS)
]


@pytest.mark.parametrize(("first", "second"), TOGETHER)
def test_two_methods_act_on_one_model(first: str, second: str) -> None:
    model = zoo.build("cnn_bn")
    optimizer = Adam(model.parameters(), lr=1e-2)
    both = [make(name, model, "cnn_bn").attach(optimizer) for name in (first, second)]
    train(model, optimizer, "cnn_bn", range(6), methods=both, new_data_at=3)
    assert all(torch.isfinite(value).all() for value in snapshot(model).values())
    for name in {first, second} - {"trac"}:  # which may return to the initial weights, wherever others went
        alone = zoo.build("cnn_bn")
        optimizer = Adam(alone.parameters(), lr=1e-2)
        method = make(name, alone, "cnn_bn").attach(optimizer)
        train(alone, optimizer, "cnn_bn", range(6), methods=[method], new_data_at=3)
        assert differs(snapshot(model), snapshot(alone)), f"the other than {name} did nothing"


@pytest.mark.parametrize("method", AT_EACH_STEP)
def test_a_new_optimizer_for_each_task(method: str) -> None:
    """State lives in the method: attaching to a second optimizer goes on where the first one stopped."""
    model = zoo.build("mlp")
    made = make(method, model, "mlp")
    for task in range(3):
        optimizer = SGD(model.parameters(), lr=1e-2)
        made.attach(optimizer)
        train(model, optimizer, "mlp", range(2 * task, 2 * task + 2))
        made.detach()
    single = zoo.build("mlp")
    made = make(method, single, "mlp")
    optimizer = SGD(single.parameters(), lr=1e-2)
    made.attach(optimizer)
    train(single, optimizer, "mlp", range(6))
    assert_same(snapshot(model), snapshot(single))
