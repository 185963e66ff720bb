"""The networks of a Stable-Baselines3 agent, each with its optimizer and its target network."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Network:
    """A network of an agent.

    Attributes:
        name: Its name, such as "q_net", "actor" or "critic.0".
        module: The network; its forward takes the arguments in `example`.
        owner: The object whose attribute `optimizer` trains it.
        example: A tuple of arguments of the right shapes.
        input_of: Returns the arguments for a batch of observations and actions.
        target: The network that follows it, if there is one.
        replace_target: Puts another module in the place of the target.
    """

    name: str
    module: nn.Module
    owner: Any
    example: tuple[Any, ...]
    input_of: Callable[[Any, Tensor | None], tuple[Any, ...]]
    target: nn.Module | None = None
    replace_target: Callable[[nn.Module], None] | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that trains the network."""
        optimizer: Optimizer = self.owner.optimizer
        return optimizer


class SquashedGaussianActor(nn.Module):
    """Calls an actor of SAC or TQC without drawing an action.

    Args:
        actor: The actor.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, observation: Any) -> Any:
        """Return the mean of the actions and, unless it is a parameter, the log of their standard deviation."""
        mean, log_std, _ = self.actor.get_action_dist_params(observation)
        return mean if isinstance(log_std, nn.Parameter) else (mean, log_std)


class ActorCritic(nn.Module):
    """Calls the policy of PPO or A2C without drawing an action.

    It holds the parts of the policy and not the policy, so that `log_std` is a parameter of a module that can draw it.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        for name, module in policy.named_children():
            self.add_module(name, module)
        for name, parameter in policy.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._policy = (policy,)  # in a tuple, so that it is not registered

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        """Return the output of the action network, and the value."""
        (policy,) = self._policy
        features = policy.extract_features(observation)
        if policy.share_features_extractor:
            actor, critic = policy.mlp_extractor(features)
        else:
            actor = policy.mlp_extractor.forward_actor(features[0])
            critic = policy.mlp_extractor.forward_critic(features[1])
        return policy.action_net(actor), policy.value_net(critic)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ActorCritic":
        """Copy all but the distribution of the last actions: its tensors belong to a graph and cannot be copied."""
        (policy,) = self._policy
        memo[id(policy.action_dist)] = policy.action_dist
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights as Stable-Baselines3 does when it builds the policy."""
        (policy,) = self._policy
        fresh = type(policy)(**policy._get_constructor_parameters())
        policy.load_state_dict(fresh.state_dict())


def find_networks(model: BaseAlgorithm) -> list[Network]:
    """Return the networks of an agent that learn.

    Raises:
        TypeError: If the agent's policy is of an unknown kind.
    """
    policy: Any = model.policy
    example = (_example_observation(model),)
    for name in ("q_net", "quantile_net"):
        if hasattr(policy, name):
            return [Network(name, getattr(policy, name), policy, example, _observation, *_target(model, name))]
    if hasattr(policy, "actor") and hasattr(policy, "critic"):
        draws = hasattr(policy.actor, "get_action_dist_params")
        actor = SquashedGaussianActor(policy.actor) if draws else policy.actor
        found = Network("actor", actor, policy.actor, example, _observation, *_target(model, "actor"))
        return [found, *_critics(policy, example)]
    if isinstance(policy, ActorCriticPolicy):
        return [Network("policy", ActorCritic(policy), policy, example, _observation)]
    raise TypeError(
        f"model: a {type(model).__name__} with a {type(policy).__name__} is not supported; "
        "DQN, QR-DQN, SAC, TQC, TD3, DDPG, PPO and A2C are"
    )


def _observation(observations: Any, actions: Tensor | None) -> tuple[Any, ...]:
    return (observations,)


def _example_observation(model: BaseAlgorithm) -> Any:
    def zeros(space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: zeros(each) for key, each in space.spaces.items()}
        return np.zeros((2, *(space.shape or ())), dtype=space.dtype)

    return model.policy.obs_to_tensor(zeros(model.observation_space))[0]


def _target(model: Any, name: str) -> tuple[nn.Module | None, Callable[[nn.Module], None] | None]:
    target = getattr(model.policy, f"{name}_target", None)

    def replace(module: nn.Module) -> None:
        setattr(model.policy, f"{name}_target", module)
        model._create_aliases()

    return target, None if target is None else replace


def _critics(policy: Any, example: tuple[Any, ...]) -> list[Network]:
    critic, target = policy.critic, getattr(policy, "critic_target", None)  # CrossQ has no target
    networks = []

    def preprocessed(observations: Any, actions: Tensor | None) -> tuple[Any, ...]:
        return (preprocess_obs(observations, critic.observation_space, critic.normalize_images),)

    def joined(observations: Any, actions: Tensor | None) -> tuple[Any, ...]:
        assert actions is not None
        features = critic.extract_features(observations, critic.features_extractor)
        return (torch.cat([features, actions.to(features.dtype)], 1),)

    def replace_critic(index: int, module: nn.Module) -> None:
        assert target is not None
        setattr(target, f"qf{index}", module)
        target.q_networks[index] = module

    trained = {id(p) for group in critic.optimizer.param_groups for p in group["params"]}
    if any(id(parameter) in trained for parameter in critic.features_extractor.parameters()):
        its = getattr(target, "features_extractor", None)
        inputs = preprocessed(example[0], None)
        networks.append(Network("critic.features", critic.features_extractor, critic, inputs, preprocessed, its))
    for index, module in enumerate(critic.q_networks):
        its = None if target is None else target.q_networks[index]
        inputs = (torch.zeros(2, next(module.parameters()).shape[1], device=policy.device),)
        replace = None if target is None else (lambda new, index=index: replace_critic(index, new))
        networks.append(Network(f"critic.{index}", module, critic, inputs, joined, its, replace))
    return networks


@torch.no_grad()
def estimate_values(model: Any, observations: Any, actions: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Return what the agent expects of observations, and of actions if they are given: the least of its critics."""
    policy = model.policy
    inputs = policy.obs_to_tensor(observations)[0]
    if isinstance(model, OnPolicyAlgorithm):
        values = policy.predict_values(inputs).flatten()
    elif hasattr(policy, "critic"):
        taken = policy._predict(inputs) if actions is None else torch.as_tensor(actions, device=model.device)
        found = policy.critic(inputs, taken.float())
        stacked = found.mean(2) if isinstance(found, Tensor) else torch.cat(found, 1)  # TQC returns quantiles
        values = stacked.min(1).values
    else:
        network = policy.q_net if hasattr(policy, "q_net") else policy.quantile_net
        found = network(inputs)
        found = found.mean(1) if found.ndim == 3 else found  # QR-DQN returns quantiles
        index = None if actions is None else torch.as_tensor(actions, device=model.device).long().reshape(-1, 1)
        values = found.max(1).values if index is None else found.gather(1, index).flatten()
    return np.asarray(values.cpu(), dtype=np.float64)
