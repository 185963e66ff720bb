"""C-CHAIN: the term in the loss, with copies of the network for what it was."""

import copy

import pytest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from pliant import CChain
from tests import zoo
from tests.loops import assert_same, snapshot, steady_adam, train
from tests.methods.trajectories import assert_close
from tests.reference.modes import in_eval_mode

LAM = 3.0


def churn(model: nn.Module, before: nn.Module, inputs: Tensor) -> Tensor:
    with in_eval_mode(model), in_eval_mode(before):
        return ((model(inputs) - before(inputs).detach()) ** 2).mean()


@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_term_in_the_loss(name: str) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    optimizer, other = steady_adam(model), steady_adam(slow)
    method = CChain(model, lam=LAM).attach(optimizer)
    before = copy.deepcopy(slow)
    for step in range(7):
        train(model, optimizer, name, [step])
        inputs, labels = zoo.batch(name, seed=100 + step)
        other.zero_grad()
        loss = cross_entropy(slow(inputs), labels)
        # The copy has the parameters of the step before and, in eval mode, today's running statistics.
        for mine, theirs in zip(before.buffers(), slow.buffers(), strict=True):
            mine.copy_(theirs)
        if step >= 2:
            loss = loss + LAM * churn(slow, before, zoo.batch(name, seed=100 + step - 2)[0])
        loss.backward()
        before.load_state_dict(slow.state_dict())
        other.step()
    assert_close(model, slow)
    assert method.receipt is not None
    assert method.receipt.details["value"] > 0
    assert method.receipt.details["gradient_norm"] > 0


def test_inputs_of_the_users_own() -> None:
    x = zoo.batch("mlp", seed=7)[0]
    model, slow = zoo.build("mlp"), zoo.build("mlp")
    optimizer, other = SGD(model.parameters(), lr=0.1), SGD(slow.parameters(), lr=0.1)
    CChain(model, lam=LAM, reference=lambda: x).attach(optimizer)
    before = copy.deepcopy(slow)
    for step in range(4):
        train(model, optimizer, "mlp", [step])
        inputs, labels = zoo.batch("mlp", seed=100 + step)
        other.zero_grad()
        (cross_entropy(slow(inputs), labels) + LAM * churn(slow, before, x)).backward()
        before.load_state_dict(slow.state_dict())
        other.step()
    assert_close(model, slow)


def test_it_reduces_churn() -> None:
    def churn_of(lam: float) -> float:
        model = zoo.build("mlp")
        optimizer = SGD(model.parameters(), lr=0.2)
        x = zoo.batch("mlp", seed=7)[0]
        CChain(model, lam=lam, reference=lambda: x).attach(optimizer)
        changes = []
        for step in range(30):
            before = model(x).detach()
            train(model, optimizer, "mlp", [step])
            changes.append(float((model(x).detach() - before).square().mean()))
        return sum(changes)

    assert churn_of(1.0) < churn_of(0.0)


def test_lam_follows_the_loss() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = CChain(model, lam=5.0, ratio=0.5, window=2).attach(optimizer)
    churns, losses = [], []
    for step in range(6):
        inputs, labels = zoo.batch("mlp", seed=100 + step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        method.see_loss(loss)
        losses.append(float(loss))
        optimizer.step()
        if step < 2:
            assert method.lam == 5.0
        else:
            churns.append(method.churns[-1])
            average = sum(losses[-2:]) / 2
            assert method.lam == pytest.approx(0.5 * average / (sum(churns[-2:]) / len(churns[-2:]) + 1e-8))


def test_a_resumed_run_remembers_the_inputs() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = CChain(model, lam=LAM).attach(optimizer)
    train(model, optimizer, "mlp", range(4))
    values, state = snapshot(model), copy.deepcopy(method.state_dict())
    train(model, optimizer, "mlp", range(4, 7))
    other = zoo.build("mlp", seed=3)
    again = SGD(other.parameters(), lr=0.1)
    resumed = CChain(other, lam=LAM)
    other.load_state_dict(values)
    resumed.load_state_dict(state)
    resumed.attach(again)
    train(other, again, "mlp", range(4, 7))
    assert_same(snapshot(model), snapshot(other))


def test_a_model_that_is_not_called_in_training_mode_is_said() -> None:
    model = zoo.build("mlp").eval()
    optimizer = SGD(model.parameters(), lr=0.1)
    CChain(model).attach(optimizer)
    with pytest.warns(UserWarning, match="c_chain saw no inputs before this step"):
        train(model, optimizer, "mlp", [0])
    with pytest.raises(TypeError, match="c_chain acts on inputs of the model"):
        CChain(model).step()
