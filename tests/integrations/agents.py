"""Small agents of Stable-Baselines3, and what their loggers wrote."""

from collections.abc import Callable
from typing import Any

import torch
from sb3_contrib import QRDQN, TQC
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import KVWriter, Logger
from torch import nn


def _off_policy(cls: Any, env: str) -> Callable[..., BaseAlgorithm]:
    def build(**settings: Any) -> BaseAlgorithm:
        sizes = {"learning_starts": 20, "train_freq": 4, "batch_size": 16, "buffer_size": 1000, "seed": 0}
        small = {"policy_kwargs": {"net_arch": [16, 16]}, "device": "cpu"}
        agent: BaseAlgorithm = cls("MlpPolicy", env, **{**sizes, **small, **settings})
        return agent

    return build


def _on_policy(cls: Any, env: str, **sizes: int) -> Callable[..., BaseAlgorithm]:
    def build(**settings: Any) -> BaseAlgorithm:
        small = {"policy_kwargs": {"net_arch": [16, 16], "activation_fn": nn.ReLU}, "device": "cpu", "seed": 0}
        agent: BaseAlgorithm = cls("MlpPolicy", env, **{**sizes, **small, **settings})
        return agent

    return build


AGENTS: dict[str, Callable[..., BaseAlgorithm]] = {
    "DQN": _off_policy(DQN, "CartPole-v1"),
    "QRDQN": _off_policy(QRDQN, "CartPole-v1"),
    "SAC": _off_policy(SAC, "Pendulum-v1"),
    "TQC": _off_policy(TQC, "Pendulum-v1"),
    "TD3": _off_policy(TD3, "Pendulum-v1"),
    "DDPG": _off_policy(DDPG, "Pendulum-v1"),
    "PPO": _on_policy(PPO, "Pendulum-v1", n_steps=32, batch_size=16, n_epochs=2),
    "A2C": _on_policy(A2C, "CartPole-v1", n_steps=16),
}
CONTINUOUS = ("SAC", "TQC", "TD3", "DDPG")
NETWORKS = {
    "DQN": ["q_net"],
    "QRDQN": ["quantile_net"],
    "SAC": ["actor", "critic.0", "critic.1"],
    "TQC": ["actor", "critic.0", "critic.1"],
    "TD3": ["actor", "critic.0", "critic.1"],
    "DDPG": ["actor", "critic.0"],
    "PPO": ["policy"],
    "A2C": ["policy"],
}


class Written(KVWriter):
    """Keeps what a logger writes."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        for key, value in key_values.items():
            self.values.setdefault(key, []).append(float(value))

    def close(self) -> None:
        pass


def keep_log(agent: BaseAlgorithm) -> Written:
    written = Written()
    agent.set_logger(Logger(None, [written]))
    return written


def tensors_of(agent: BaseAlgorithm) -> list[torch.Tensor]:
    """Return all weights and optimizer states."""
    found = [tensor.detach().clone() for tensor in agent.policy.state_dict().values()]
    for name, state in agent.get_parameters().items():
        if "optimizer" in name:
            for values in state["state"].values():
                found += [value.clone() for value in values.values()]
    return found
