"""Calling a model, and leaving it as it was."""

import copy
import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import pliant
from pliant.anatomy.layers import called_layers
from pliant.diagnostics import measure

X, Y = torch.randn(16, 6), torch.randint(0, 4, (16,))


class Writing(nn.Module):
    """Writes in eval mode: into a buffer, over a buffer, and into a weight longer than `max_norm`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6, max_norm=1.0), nn.Linear(6, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, index: Tensor) -> Tensor:
        self.count += 1
        self.last = self.count + random.random() + numpy.random.rand() + torch.rand(())
        return self.head(self.embed(index).mean(1))


def test_measure_restores_buffers_weights_and_generators() -> None:
    model, index = Writing(), torch.randint(0, 10, (8, 3))
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    states = [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]
    measure(model, (index, torch.randint(0, 4, (8,), generator=torch.Generator())), cross_entropy)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert states == [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()]


def test_measure_keeps_a_pending_graph_valid() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    alone = copy.deepcopy(model)
    cross_entropy(alone(X), Y).backward()
    loss = cross_entropy(model(X), Y)
    measure(model, (X, Y), cross_entropy)
    loss.backward()  # Raises if a tensor of its graph was written to.
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


class Adapter(nn.Linear):
    """Changes its weight when its mode changes, as adapters that merge do."""

    def train(self, mode: bool = True) -> "Adapter":
        if mode != self.training:
            self.weight.data.mul_(2 if mode else 3)
        super().train(mode)
        return self


def test_eval_mode_does_not_call_train_of_a_module() -> None:
    model = nn.Sequential(Adapter(6, 8), nn.ReLU(), nn.Linear(8, 4))
    before = model[0].weight.detach().clone()
    measure(model, (X, Y), cross_entropy, copy.deepcopy(model))
    called_layers(model, X)
    assert model[0].weight.equal(before)
    assert all(module.training for module in model.modules())


class Agent(nn.Module):
    """Holds two networks without a forward(), as agents in reinforcement learning often do."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)


STATES, ACTIONS = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    "use",
    [
        lambda agent: pliant.ReDo(agent, STATES),
        lambda agent: pliant.SWR(agent, STATES),
        lambda agent: pliant.SWR(agent, STATES, plan={"order": "forward"}),
        lambda agent: pliant.FeatureRankRegularization(agent, STATES, lam=1e-4),
        lambda agent: pliant.HeadReset(agent, STATES),
        lambda agent: pliant.diagnose(agent, (STATES, ACTIONS), cross_entropy),
        lambda agent: pliant.Monitor(agent, SGD(agent.parameters()), probe=(STATES, ACTIONS), loss_fn=cross_entropy),
    ],
)
def test_a_model_without_forward_is_rejected_and_its_children_named(use: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"model: Agent has no forward\(\); pass the networks .*\(actor, critic\)"):
        use(Agent())


def test_a_model_without_forward_is_accepted_where_no_call_is_needed() -> None:
    assert "weight_l2" in measure(Agent()).values
    assert pliant.L2Init(Agent()).parameters


def test_forward_may_be_set_on_the_instance() -> None:
    agent = Agent()
    agent.critic.requires_grad_(False)
    agent.forward = agent.actor.forward
    assert list(pliant.SWR(agent, STATES).parameters) == ["actor.weight", "actor.bias"]
