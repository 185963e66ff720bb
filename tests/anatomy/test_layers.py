"""What is called must be callable."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import pliant
from pliant.anatomy.layers import called_layers, classifier_names


class Agent(nn.Module):
    """Two networks and no forward pass, as agents of reinforcement learning often are."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)


X, Y = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    "use",
    [
        lambda agent: pliant.ReDo(agent, X),
        lambda agent: pliant.SWR(agent, X),
        lambda agent: pliant.SWR(agent, X, order="forward"),
        lambda agent: pliant.FeatureRankRegularization(agent, X),
        lambda agent: pliant.HeadReset(agent, X),
        lambda agent: pliant.diagnose(agent, (X, Y), cross_entropy),
        lambda agent: pliant.Monitor(agent, SGD(agent.parameters()), probe=(X, Y), loss_fn=cross_entropy),
    ],
)
def test_a_model_without_a_forward_pass_is_named_with_what_it_holds(use: Callable[[nn.Module], object]) -> None:
    with pytest.raises(ValueError, match=r"model: Agent has no forward\(\); pass the networks .*\(actor, critic\)"):
        use(Agent())


def test_what_needs_no_forward_pass_takes_such_a_model() -> None:
    assert "weight_l2" in pliant.diagnose(Agent()).values
    assert pliant.L2Init(Agent()).parameters


def test_a_forward_pass_that_was_given_to_an_instance_counts() -> None:
    agent = Agent()
    agent.critic.requires_grad_(False)
    agent.forward = agent.actor.forward
    assert list(pliant.SWR(agent, X).parameters) == ["actor.weight", "actor.bias"]


def test_looking_at_the_calls_leaves_the_model_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x + torch.randn_like(x))

    model = Counting()
    before = torch.get_rng_state()
    assert [layer.name for layer in called_layers(model, torch.zeros(1, 3))] == ["layer"]
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_learned_activation_does_not_end_the_classifier() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.PReLU(), nn.Linear(4, 2))
    assert classifier_names(called_layers(model, torch.zeros(1, 1, 4, 4))) == ("2", "4")
