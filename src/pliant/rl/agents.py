"""Agents of Stable-Baselines3 by name, and their complete state."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.type_aliases import TrainFrequencyUnit
from stable_baselines3.common.utils import polyak_update
from torch import nn
from torch.optim import Optimizer

from pliant._names import check_names, suggest
from pliant._optimizer_state import load_optimizer_state
from pliant.rl.policies import POLICIES

AGENTS: dict[str, type[BaseAlgorithm]] = {"dqn": DQN, "sac": SAC, "td3": TD3, "ppo": PPO}

_OURS = ("self", "policy", "env", "seed", "device", "_init_setup_model")
_CLASSES = {"activation_fn": torch.nn, "optimizer_class": torch.optim}
_AT_ONCE = 100
"""Updates of priming between two places where the agent's state may be saved."""
_COUNTERS = (
    "num_timesteps",
    "_episode_num",
    "_n_updates",
    "_n_calls",
    "_current_progress_remaining",
    "exploration_rate",
)


def make_agent(
    name: str, options: Mapping[str, Any], env: gymnasium.Env, seed: int, device: str = "cpu"
) -> BaseAlgorithm:
    """Make an agent.

    Args:
        name: "dqn", "sac", "td3" or "ppo".
        options: Arguments of the agent's class in Stable-Baselines3. `policy` is "MlpPolicy" by default, or another of
            its names, or one of `pliant.rl.policies`. Classes in `policy_kwargs` may be given by their names in torch.
        env: The environment.
        seed: Seed of networks, exploration and replay.
        device: Where the networks are.

    Raises:
        ValueError: If a name is unknown or the options do not fit.
    """
    if name not in AGENTS:
        raise ValueError(f"agent is {name!r}; {suggest(name, AGENTS)}")
    allowed = [each for each in inspect.signature(AGENTS[name]).parameters if each not in _OURS]
    check_names(f"agent {name!r}", options, ["policy", *allowed])
    given = {"policy": "MlpPolicy", **copy.deepcopy(dict(options))}  # The agent adds to its policy_kwargs.
    if isinstance(frequency := given.get("train_freq"), list):
        given["train_freq"] = tuple(frequency)  # JSON has no tuples.
    given["policy"] = _find_policy(name, given["policy"])
    for key, module in _CLASSES.items():
        if isinstance(found := given.get("policy_kwargs", {}).get(key), str):
            given["policy_kwargs"][key] = _find_class(f"policy_kwargs.{key}", found, module)
    try:
        agent = AGENTS[name](env=env, seed=seed, device=device, **given)
    except (TypeError, AssertionError, AttributeError) as error:
        raise ValueError(f"agent {name!r} with options {dict(options)}: {error}") from error
    agent.set_logger(Logger(None, []))
    return agent


def _find_policy(agent: str, name: Any) -> Any:
    """Return a policy of ours by its name; leave names of Stable-Baselines3 and classes to it."""
    ours, theirs = POLICIES.get(agent, {}), AGENTS[agent].policy_aliases
    if isinstance(name, str) and name not in {*ours, *theirs}:
        raise ValueError(f"agent {agent!r}: policy is {name!r}; {suggest(name, (*theirs, *ours))}")
    return ours.get(name, name) if isinstance(name, str) else name


def _find_class(where: str, name: str, module: Any) -> Any:
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ValueError(f"{where} is {name!r}; it must be the name of a class in {module.__name__}")
    return found


def rollout_steps(agent: Any) -> int:
    """Return the environment steps between two rounds of updates."""
    if isinstance(agent, OnPolicyAlgorithm):
        return int(agent.n_steps)
    agent._convert_train_freq()
    if agent.train_freq.unit is not TrainFrequencyUnit.STEP:
        raise ValueError(f"agent: train_freq is {agent.train_freq}; it must be a number of steps, not of episodes")
    return int(agent.train_freq.frequency)


def prime(agent: Any, updates: int, done: int = 0) -> int:
    """Do an agent's next updates on its replay buffer; update the target network of a DQN as in training.

    The agent's state may be saved after every call: the updates are the same in however many processes they are done.

    Args:
        agent: The agent.
        updates: The number of updates in all.
        done: How many of them are done.

    Returns:
        How many are done now: about a hundred more, or all.
    """
    agent.policy.set_training_mode(True)
    every = agent.target_update_interval if isinstance(agent, SAC) else 1  # SAC counts from the start of a call.
    end: int = min(done + every * -(-_AT_ONCE // every), updates)
    if not isinstance(agent, DQN):
        agent.train(end - done, agent.batch_size)
        return end
    per_rollout = agent.gradient_steps if agent.gradient_steps >= 0 else rollout_steps(agent)
    between = max(1, agent.target_update_interval * per_rollout // rollout_steps(agent))
    end = min(end, done + between - done % between)
    agent.train(end - done, agent.batch_size)
    if end % between == 0 or end == updates:
        polyak_update(agent.q_net.parameters(), agent.q_net_target.parameters(), agent.tau)
    return end


def restart(agent: Any) -> None:
    """Empty the replay buffer and restart exploration; networks and optimizers stay."""
    agent.num_timesteps = 0
    agent._last_obs = None
    agent._current_progress_remaining = 1.0
    if hasattr(agent, "exploration_rate"):
        agent.exploration_rate = agent.exploration_initial_eps
    if getattr(agent, "replay_buffer", None) is not None:
        agent.replay_buffer.reset()


def copy_networks(source: Any, agent: Any) -> None:
    """Copy networks, optimizers and temperature of another agent."""
    agent.set_parameters(source.get_parameters(), device=agent.device)
    _, variables = agent._get_torch_save_params()
    for name in variables:
        getattr(agent, name).data.copy_(getattr(source, name).data)


def agent_state(agent: Any) -> dict[str, Any]:
    """Return all that a resumed agent needs at the start of an episode, as tensors and plain types."""
    _, variables = agent._get_torch_save_params()
    buffer = getattr(agent, "replay_buffer", None)
    return {
        "parameters": agent.get_parameters(),
        "variables": {name: getattr(agent, name).data for name in variables if hasattr(agent, name)},
        "counters": {name: getattr(agent, name) for name in _COUNTERS if hasattr(agent, name)},
        "actions": agent.action_space.np_random.bit_generator.state,
        "buffer": None if buffer is None else _buffer_state(buffer),
    }


def load_agent_state(agent: Any, state: Mapping[str, Any]) -> None:
    """Restore a state of `agent_state`; the next step begins an episode.

    Raises:
        ValueError: If the state is of another agent.
    """
    own = {name: getattr(agent, name) for name in _COUNTERS if hasattr(agent, name)}
    if {name: type(value) for name, value in state["counters"].items()} != {name: type(own[name]) for name in own}:
        raise ValueError(f"counters are {state['counters']!r}; the agent has {own!r}")
    variables = [name for name in agent._get_torch_save_params()[1] if hasattr(agent, name)]
    if sorted(state["variables"]) != sorted(variables):
        raise ValueError(f"variables are {sorted(state['variables'])}; the agent has {sorted(variables)}")
    parts = agent._get_torch_save_params()[0]
    if sorted(state["parameters"]) != sorted(parts):
        raise ValueError(f"the state is of {sorted(state['parameters'])}, but the agent has {sorted(parts)}")
    for name in parts:
        _load_part(recursive_getattr(agent, name), state["parameters"][name], name)
    for name in variables:
        getattr(agent, name).data.copy_(state["variables"][name])
    for name in own:
        setattr(agent, name, state["counters"][name])
    agent.action_space.np_random.bit_generator.state = state["actions"]
    agent._last_obs = None
    buffer = getattr(agent, "replay_buffer", None)
    if (state["buffer"] is None) != (buffer is None):
        raise ValueError(f"the state has {'no' if buffer is not None else 'a'} replay buffer, unlike the agent")
    if buffer is not None:
        _load_buffer_state(buffer, state["buffer"])


def _load_part(part: nn.Module | Optimizer, state: Any, name: str) -> None:
    if isinstance(part, Optimizer):
        load_optimizer_state(part, state, f"the state of {name}", with_rate=True)
        return
    try:
        part.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _buffer_state(buffer: Any) -> dict[str, Any]:
    return {
        "pos": buffer.pos,
        "full": buffer.full,
        "arrays": {name: torch.from_numpy(array.copy()) for name, array in _filled_arrays(buffer).items()},
    }


def _filled_arrays(buffer: Any) -> dict[str, Any]:
    # One more, as with optimize_memory_usage the last transition's next observation lies there.
    filled = buffer.buffer_size if buffer.full else min(buffer.pos + 1, buffer.buffer_size)
    return {name: value[:filled] for name, value in vars(buffer).items() if isinstance(value, np.ndarray)}


def _load_buffer_state(buffer: Any, state: Mapping[str, Any]) -> None:
    pos, full = state["pos"], state["full"]
    if type(pos) is not int or type(full) is not bool or not 0 <= pos < buffer.buffer_size:
        raise ValueError(f"the replay buffer is at {pos!r}, full: {full!r}; it has {buffer.buffer_size} places")
    buffer.pos, buffer.full = pos, full
    arrays, saved = _filled_arrays(buffer), {name: array.numpy() for name, array in state["arrays"].items()}
    if {name: (each.shape, each.dtype) for name, each in saved.items()} != {
        name: (each.shape, each.dtype) for name, each in arrays.items()
    }:
        raise ValueError("the saved replay buffer does not fit the agent's: names, shapes or types of arrays differ")
    for name, array in arrays.items():
        array[:] = saved[name]
