"""What is called must be callable."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import pliant


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
        lambda agent: pliant.FeatureRank(agent, X),
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
