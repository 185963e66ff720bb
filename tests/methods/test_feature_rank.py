"""Feature rank regularization: the gradient that it adds at the features during `backward()`."""

import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, Adam

from pliant import L2, FeatureRankRegularization
from pliant.methods.feature_rank import feature_rank
from tests import zoo
from tests.loops import assert_same, differs, snapshot, train
from tests.methods.trajectories import OPTIMIZERS, STEPS, assert_close, train_with_term
from tests.reference import penalties

LAM = 1e-3


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 30), columns=st.integers(1, 30), seed=st.integers(0, 99))
def test_gradient_equals_autograd(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, columns, generator=generator, dtype=torch.float64).requires_grad_()
    expected = penalties.feature_rank(features)
    expected.backward()
    value, gradient = feature_rank(features.detach())
    assert float(value) == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, features.grad, rtol=1e-6, atol=1e-8)


def features_of(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the input of the last linear layer."""
    seen: list[Tensor] = []
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    handle = last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = model(inputs)
    handle.remove()
    return output, seen[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_term_in_the_loss(name: str, optimizer: str) -> None:
    closed, slow = zoo.build(name), zoo.build(name)
    made = OPTIMIZERS[optimizer](closed)
    penalty = FeatureRankRegularization(closed, zoo.batch(name)[0], lam=LAM).attach(made)
    train(closed, made, name, range(STEPS[name]))
    other = OPTIMIZERS[optimizer](slow)
    for step in range(STEPS[name]):
        inputs, labels = zoo.batch(name, seed=100 + step)
        other.zero_grad()
        output, features = features_of(slow, inputs)
        term = LAM * penalties.feature_rank(features)
        (cross_entropy(output, labels) + term).backward()
        other.step()
    assert_close(closed, slow)
    assert penalty.receipt is not None
    assert penalty.receipt.details["value"] == pytest.approx(term.item(), rel=1e-6)
    assert penalty.receipt.details["steps"] == STEPS[name]


def test_features_of_tokens() -> None:
    """If the classifier reads every token, Φ has one row per token."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    inputs = torch.randn(5, 7, 4, dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, inputs, lam=LAM).attach(optimizer)
    other = copy.deepcopy(model)
    model(inputs).sum().backward()
    output, features = features_of(other, inputs)
    assert features.shape == (5, 7, 6)
    (output.sum() + LAM * penalties.feature_rank(features)).backward()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-12)


def gradients_of(model: nn.Module, inputs: Tensor, labels: Tensor, factor: float = 1.0) -> list[Tensor]:
    model.zero_grad()
    (factor * cross_entropy(model(inputs), labels)).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_example_without_batch_dimension_is_a_batch_of_one() -> None:
    """A batch of one has a single singular value, so the term is zero."""
    model, plain = zoo.build("mlp"), zoo.build("mlp")
    method = FeatureRankRegularization(model, zoo.batch("mlp")[0], lam=1.0).attach(SGD(model.parameters(), lr=0.1))
    x = zoo.batch("mlp")[0][0]
    for each in (model, plain):
        each(x).pow(2).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert float(method.value()) == 0


def test_no_term_in_eval_mode_after_detach_or_without_gradients() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    plain = gradients_of(model, inputs, labels)
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty = FeatureRankRegularization(model, inputs, lam=1.0).attach(optimizer)
    with_term = gradients_of(model, inputs, labels)
    assert not torch.equal(with_term[0], plain[0])
    assert torch.equal(with_term[4], plain[4])  # the term does not reach the classifier itself
    with torch.no_grad():
        model(inputs)
    model.eval()
    assert all(map(torch.equal, gradients_of(model, inputs, labels), plain))
    model.train()
    penalty.detach()
    assert all(map(torch.equal, gradients_of(model, inputs, labels), plain))
    penalty.attach(optimizer)
    assert all(map(torch.equal, gradients_of(model, inputs, labels), with_term))


def test_no_term_for_an_actor_that_learns_through_a_frozen_critic() -> None:
    """If only the classifier is frozen, the features still learn and get the term."""

    def actors_gradient(lam: float, frozen: slice) -> Tensor:
        torch.manual_seed(0)
        actor = nn.Linear(12, 12).double()
        critic = zoo.build("mlp")
        optimizer = SGD(critic.parameters(), lr=0.1)
        FeatureRankRegularization(critic, zoo.batch("mlp")[0], lam=lam).attach(optimizer)
        critic[frozen].requires_grad_(False)
        critic(actor(zoo.batch("mlp")[0])).sum().backward()
        return actor.weight.grad

    whole, classifier = slice(0, 5), slice(4, 5)
    assert torch.equal(actors_gradient(1.0, whole), actors_gradient(0.0, whole))
    assert not torch.allclose(actors_gradient(1.0, classifier), actors_gradient(0.0, classifier))


def test_no_term_in_per_sample_gradients() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))
    plain = per_example(parameters, inputs, labels)
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, inputs, lam=1.0).attach(optimizer)
    assert_same(per_example(parameters, inputs, labels), plain)


def test_no_term_after_the_optimizer_is_deleted() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    plain = gradients_of(model, inputs, labels)
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty = FeatureRankRegularization(model, inputs, lam=1.0).attach(optimizer)
    del optimizer
    assert penalty.optimizers == ()
    assert all(map(torch.equal, gradients_of(model, inputs, labels), plain))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_the_model_trains_without_the_term(duplicate) -> None:
    model, control = zoo.build("mlp"), zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty = FeatureRankRegularization(model, zoo.batch("mlp")[0], lam=1.0).attach(optimizer)
    clone = duplicate(model)
    train(clone, Adam(clone.parameters(), lr=1e-2), "mlp", range(3))
    train(control, Adam(control.parameters(), lr=1e-2), "mlp", range(3))
    assert_same(snapshot(clone), snapshot(control))
    assert penalty.receipt is None  # the method did not see the copy's features


def test_optimizer_keeps_the_method_alive() -> None:
    model, control = zoo.build("mlp"), zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, zoo.batch("mlp")[0], lam=0.1).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    train(control, SGD(control.parameters(), lr=0.1), "mlp", range(2))
    assert differs(snapshot(model), snapshot(control))


def test_loss_scale_of_micro_batches() -> None:
    model, slow = zoo.build("mlp"), zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, zoo.batch("mlp")[0], lam=LAM, loss_scale=0.25).attach(optimizer)
    inputs, labels = zoo.batch("mlp", size=16)
    for x, y in zip(inputs.chunk(4), labels.chunk(4), strict=True):
        (cross_entropy(model(x), y) / 4).backward()
        output, features = features_of(slow, x)
        ((cross_entropy(output, y) + LAM * penalties.feature_rank(features)) / 4).backward()
    for left, right in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-9, atol=1e-12)


def test_line_search_sees_the_term() -> None:
    def run(closed: bool) -> nn.Module:
        model = zoo.build("mlp")
        optimizer = LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
        inputs, labels = zoo.batch("mlp", size=40)
        if closed:
            FeatureRankRegularization(model, inputs, lam=LAM).attach(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            output, features = features_of(model, inputs)
            loss = cross_entropy(output, labels)
            if not closed:
                loss = loss + LAM * penalties.feature_rank(features)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return model

    assert_close(run(True), run(False), rtol=1e-6, atol=1e-8)


def test_overflow_reaches_the_grad_scaler() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, inputs, lam=LAM).attach(optimizer)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    assert any(not g.isfinite().all() for g in gradients_of(model, inputs, labels))


def test_combines_with_another_penalty() -> None:
    closed, slow = zoo.build("mlp"), zoo.build("mlp")
    optimizer = OPTIMIZERS["sgd"](closed)
    FeatureRankRegularization(closed, zoo.batch("mlp")[0], lam=LAM).attach(optimizer)
    L2(closed, lam={"4.*": 0.1}).attach(optimizer)
    train(closed, optimizer, "mlp", range(STEPS["mlp"]))
    inputs_of = iter(range(STEPS["mlp"]))

    def terms(model: nn.Module) -> Tensor:
        _, features = features_of(model, zoo.batch("mlp", seed=100 + next(inputs_of))[0])
        return LAM * penalties.feature_rank(features) + 0.05 * sum((p**2).sum() for p in model[4].parameters())

    train_with_term(slow, "mlp", OPTIMIZERS["sgd"](slow), terms)
    assert_close(closed, slow)


def test_step_and_missing_arguments_are_errors() -> None:
    penalty = FeatureRankRegularization(zoo.build("mlp"), classifier="4", lam=1e-4)
    assert penalty.classifiers == ("4",)
    assert float(penalty.value()) == 0.0
    assert penalty.receipt is None
    with pytest.raises(TypeError, match=r"acts during backward\(\)"):
        penalty.step()
    with pytest.raises(ValueError, match="example: None, and classifier is not given"):
        FeatureRankRegularization(zoo.build("mlp"), lam=1e-4)
    with pytest.raises(ValueError, match="loss_scale: -1"):
        FeatureRankRegularization(zoo.build("mlp"), classifier="4", lam=1e-4, loss_scale=-1)


def test_maximizing_optimizer_is_an_error() -> None:
    model = zoo.build("mlp")
    method = FeatureRankRegularization(model, zoo.batch("mlp")[0], lam=1e-4)
    with pytest.raises(ValueError, match="this SGD maximizes, so feature_rank would be maximized"):
        method.attach(SGD(model.parameters(), lr=0.1, maximize=True))


def test_step_without_features_warns_once() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = FeatureRankRegularization(model, zoo.batch("mlp")[0], lam=1e-4).attach(optimizer)
    model.eval()
    with pytest.warns(
        UserWarning, match="feature_rank saw no features before this step: '4' was not called in training"
    ):
        train(model, optimizer, "mlp", [0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, "mlp", [1])
        model.train()
        train(model, optimizer, "mlp", [2])
    assert method.receipt is not None


@pytest.mark.parametrize("passes", [1, 2])
def test_every_backward_pass_adds_the_term(passes: int) -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, inputs, lam=0.1, loss_scale=1 / passes).attach(optimizer)
    loss = cross_entropy(model(inputs), labels) / passes
    for _ in range(passes):
        loss.backward(retain_graph=True)
    control = zoo.build("mlp")
    features = control[:4](inputs)
    singular = torch.linalg.svdvals(features)
    (cross_entropy(control[4](features), labels) + 0.1 * (singular[0] ** 2 - singular[-1] ** 2)).backward()
    torch.testing.assert_close(model[0].weight.grad, control[0].weight.grad, rtol=1e-9, atol=1e-11)


def test_image_inputs_of_the_classifier_are_an_error() -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
    model = nn.Sequential(nn.Conv2d(1, 2, 1), head)
    optimizer = SGD(model.parameters(), lr=0.1)
    FeatureRankRegularization(model, classifier="1", lam=1e-4).attach(optimizer)
    with pytest.raises(ValueError, match=r"classifier: '1' takes inputs of shape \(5, 2, 2, 2\), but features are"):
        model(torch.ones(5, 1, 2, 2))


def test_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    features = torch.randn(64, 8) * torch.logspace(0, -3, 8)
    value, gradient = feature_rank(features)
    with torch.autocast("cpu", torch.bfloat16):
        inside = feature_rank(features)
    assert torch.equal(inside[0], value)
    assert torch.equal(inside[1], gradient)


def test_no_term_for_parameters_replaced_by_functional_call() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    target = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def gradients() -> tuple[Tensor, ...]:
        loss = cross_entropy(functional_call(model, target, (inputs,)), labels)
        return torch.autograd.grad(loss, list(target.values()))

    plain = gradients()
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty = FeatureRankRegularization(model, inputs, lam=1.0).attach(optimizer)
    assert all(map(torch.equal, gradients(), plain))
    assert penalty.receipt is None


@pytest.mark.parametrize("way", ["target", "frozen"])
def test_no_term_when_an_agents_actor_learns_through_its_critic(way: str) -> None:
    agent = nn.ModuleDict(
        {"actor": nn.Linear(4, 3), "critic": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))}
    )
    actor, critic, inputs = agent["actor"], agent["critic"], torch.randn(8, 4)
    target = {name: p.detach().clone() for name, p in critic.named_parameters()}

    def actors_gradient() -> Tensor:
        critic.requires_grad_(way != "frozen")
        action = actor(inputs)
        value = functional_call(critic, target, (action,)) if way == "target" else critic(action)
        critic.requires_grad_(True)
        return torch.autograd.grad(value.mean(), actor.weight)[0]

    plain = actors_gradient()
    optimizer = SGD(agent.parameters(), lr=0.1)
    penalty = FeatureRankRegularization(agent, classifier="critic.2", lam=1.0).attach(optimizer)
    assert torch.equal(actors_gradient(), plain)
    assert penalty.receipt is None
    critic(actor(inputs)).mean().backward()  # here the critic learns too
    assert not torch.allclose(actor.weight.grad, plain)


def test_frozen_classifier_has_features() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    model[-1].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    penalty = FeatureRankRegularization(model, inputs, lam=1.0).attach(optimizer)
    cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    assert penalty.receipt is not None


def test_twin_critics_have_a_term_each_and_the_receipt_is_that_of_the_step() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(12, 6)
    model = zoo.TwinCritics()
    control = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty = FeatureRankRegularization(model, inputs, lam=0.1).attach(optimizer)
    assert penalty.classifiers == ("first.2", "second.2")
    sum(out.sum() for out in model(inputs)).backward()
    optimizer.step()
    model(torch.randn(5, 6))  # Another pass does not change what the step did.

    features = [critic[:2](inputs) for critic in (control.first, control.second)]
    squares = [torch.linalg.svdvals(each) ** 2 for each in features]
    term = 0.1 * sum(each[0] - each[-1] for each in squares)
    (sum(out.sum() for out in control(inputs)) + term).backward()
    for ours, theirs in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    receipt = penalty.receipt
    assert receipt is not None
    assert receipt.details["value"] == pytest.approx(term.item(), rel=1e-5)
    assert (receipt.tensors, receipt.entries) == (2, 2 * features[0].numel())
