"""Greedy evaluation of an agent: the return, and how much its values overestimate it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from pliant._seeding import undrawn
from pliant.integrations._agents import estimate_values


@dataclass(frozen=True)
class Evaluation:
    """What an agent achieves, and what it expected.

    Args:
        returns: The undiscounted return of each episode; of the scores where the agent sees clipped rewards.
        overestimation: The mean over all steps of Q(s, a) minus the discounted return from there.
    """

    returns: tuple[float, ...]
    overestimation: float


def evaluate(agent: Any, envs: Sequence[gymnasium.Env], seeds: Sequence[int]) -> Evaluation:
    """Play one episode in each environment, all at once; no random generator of the training is used.

    Args:
        agent: An agent of Stable-Baselines3.
        envs: The environments.
        seeds: The seed of each episode.
    """
    with undrawn():
        seen = [[env.reset(seed=seed)[0]] for env, seed in zip(envs, seeds, strict=True)]
        rewards: list[list[float]] = [[] for _ in envs]
        scores: list[list[float]] = [[] for _ in envs]
        ended: list[bool | None] = [None for _ in envs]  # Whether the episode was truncated; None while it goes on.
        while alive := [index for index, end in enumerate(ended) if end is None]:
            chosen, _ = agent.predict(np.stack([seen[index][-1] for index in alive]), deterministic=True)
            for index, action in zip(alive, chosen, strict=True):
                observation, reward, terminated, truncated, info = envs[index].step(action)
                seen[index].append(observation)
                rewards[index].append(float(reward))
                scores[index].append(float(info.get("score", reward)))
                if terminated or truncated:
                    ended[index] = bool(truncated and not terminated)
        errors = [
            _find_errors(agent, np.stack(seen[index]), rewards[index], bootstraps=bool(ended[index]))
            for index in range(len(envs))
        ]
    return Evaluation(tuple(map(math.fsum, scores)), float(np.concatenate(errors).mean()))


def _find_errors(
    agent: Any, observations: NDArray[Any], rewards: list[float], *, bootstraps: bool
) -> NDArray[np.float64]:
    actions, _ = agent.predict(observations, deterministic=True)
    if isinstance(agent, OffPolicyAlgorithm) and isinstance(agent.action_space, spaces.Box):
        actions = agent.policy.scale_action(actions)
    values = estimate_values(agent, observations, actions)
    return overestimate(values[:-1], rewards, agent.gamma, values[-1] if bootstraps else 0.0)


def overestimate(
    values: NDArray[np.float64], rewards: Sequence[float], gamma: float, last: float = 0.0
) -> NDArray[np.float64]:
    """Return Q(s, a) minus the discounted return from there, for each step of an episode.

    Args:
        values: The estimate at each step.
        rewards: The reward of each step.
        gamma: The discount.
        last: The value of what follows the last step, for an episode that was truncated.

    Example:
        >>> overestimate(np.array([4.0, 2.0]), [1.0, 1.0], 0.5, 4.0).tolist()
        [1.5, -1.0]
    """
    returns, following = np.zeros(len(rewards)), last
    for step in reversed(range(len(rewards))):
        returns[step] = following = rewards[step] + gamma * following
    return np.asarray(values - returns, dtype=np.float64)
