"""Small runs of agents."""

from dataclasses import replace
from typing import Any

from pliant.experiments.run_config import Part, RunConfig
from pliant.training import Settings

DQN = Part(
    "dqn",
    {"learning_starts": 20, "train_freq": 1, "gradient_steps": 1, "target_update_interval": 10, "buffer_size": 500},
)
SAC = Part("sac", {"learning_starts": 20, "batch_size": 16, "policy_kwargs": {"net_arch": [8, 8]}})
PPO = Part("ppo", {"n_steps": 20, "batch_size": 20, "n_epochs": 2})
INTERVENTION = Part("intervention", {"steps": 240, "at": [120], "evaluate_every": 40, "episodes": 2})
SEQUENCE = Part("environment_sequence", {"tasks": 3, "steps": 80, "evaluate_every": 40, "episodes": 2})
PRIMING = Part("priming", {"first": 40, "updates": 30, "steps": 120, "evaluate_every": 40, "episodes": 2})


def small(**changes: Any) -> RunConfig:
    """A run of a second or two."""
    config = RunConfig(
        label="agent",
        methods=(),
        fresh=False,
        data=Part("CartPole-v1"),
        model=DQN,
        stream=INTERVENTION,
        training=Settings(),
        measures=(),
        seed=0,
        purpose="result",
        holdout=0.0,
        device="cpu",
    )
    return replace(config, **changes)
