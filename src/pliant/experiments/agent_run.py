"""A run of an agent in a stream of environments: from its configuration to its learner.

The configuration's data is the environment, its model the agent. Where a stream shares its first task, the task is
trained once for each seed, in `ROOT/first_tasks`. All methods that act at task boundaries start from its end. A method
that acts at every step has a first task of its own.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pliant import methods
from pliant._importing import naming_extra
from pliant._seeding import derive_seed, seed_everything, undrawn
from pliant.experiments.run import count_bytes
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import RunFolder, Sources
from pliant.rl.results import summarize
from pliant.streams import stream_class
from pliant.streams.environment_streams import EnvironmentStream
from pliant.training import Record

with naming_extra("an agent", "rl"):
    import gymnasium
    import stable_baselines3

    from pliant.rl.agent_learner import AgentLearner
    from pliant.rl.agents import make_agent
    from pliant.rl.environments import SeededEpisodes, make_environment

_FIRST_TASKS = "first_tasks"


class AgentSession:
    """An agent that learns a stream of environments.

    Args:
        config: The run.
        root: The folder of the experiment, for the shared first task.
    """

    def __init__(self, config: RunConfig, root: Path) -> None:
        self.config, self.root = config, root
        self.learner = make_agent_learner(config)
        self.sources: Sources = {}
        self.notes: list[str] = []
        self.state_dict = self.learner.state_dict
        self.load_state_dict = self.learner.load_state_dict

    @property
    def position(self) -> dict[str, int]:
        """Task, epoch and environment step."""
        return {name: getattr(self.learner, name) for name in ("task", "epoch", "step")}

    @property
    def age(self) -> int:
        """A number that grows from checkpoint to checkpoint."""
        return self.learner.age

    def run(self, append: Callable[[Record], None], save: Callable[[], None]) -> None:
        """Train to the end."""
        if self.learner.step == 0 and self.learner.stream.shares_first_task:
            state, records = train_first_task(self.config, self.root, notes=self.notes)
            self.learner.load_state_dict(state)
            for record in records:
                append(record)
        self.learner.run(append, save)

    def facts(self) -> dict[str, Any]:
        """Return the bytes of networks, optimizers and methods, and the versions of the agent's packages."""
        state = self.learner.state_dict()
        parts = {"model": state["agent"]["parameters"], "methods": state["methods"]}
        versions = {package.__name__: package.__version__ for package in (stable_baselines3, gymnasium)}
        return {"bytes": {name: count_bytes(part) for name, part in parts.items()}, "versions": versions}

    def summarize(self, records: list[Record]) -> dict[str, float]:
        """Summarize the records in a result."""
        return summarize(records)


def train_first_task(
    config: RunConfig, root: Path, checkpoint_seconds: float = 30.0, notes: list[str] | None = None
) -> tuple[dict[str, Any], list[Record]]:
    """Train the first task without the methods that act at task boundaries, or read it if it is done.

    Args:
        config: The run that needs it.
        root: The folder of the experiment.
        checkpoint_seconds: The least time between two checkpoints.
        notes: Gets one message for each damaged file.

    Returns:
        The state at its end, and its records.
    """
    acting = tuple(part for part in config.methods if methods.info(part.name).kind != "reinitializer")
    folder = RunFolder(root / _FIRST_TASKS, replace(config, label="first task", methods=acting, fresh=False))
    with folder.open(patience=math.inf):  # Another run of the same seed may be training it.
        learner = make_agent_learner(folder.config)
        loaded = folder.load_checkpoint(learner.load_state_dict, {})
        if notes is not None:
            notes += folder.troubles
        if not loaded and folder.troubles:
            learner = make_agent_learner(folder.config)  # The failed loading may have changed the learner.
        saved = time.monotonic()

        def save() -> None:
            nonlocal saved
            if time.monotonic() - saved >= checkpoint_seconds:
                folder.save_checkpoint(learner.state_dict(), learner.age, {})
                saved = time.monotonic()

        if learner.task == 0:
            learner.run(folder.append, save, tasks=1)
            folder.save_checkpoint(learner.state_dict(), learner.age, {})
        return learner.state_dict(), folder.records()


def make_agent_learner(config: RunConfig) -> AgentLearner:
    """Make the environments, the agent and its methods.

    Raises:
        ValueError: If an option does not fit.
    """
    stream = make_environment_stream(config)
    ends = itertools.accumulate(stage.steps for stage in stream.stages())

    def make_env() -> gymnasium.Env:
        return make_environment(config.data.name, config.data.options, stream, config.seed)

    def make_fresh(task: int) -> Any:
        with undrawn():
            seed = derive_seed("task", config.seed, task) % 2**31
            return make_agent(config.model.name, config.model.options, make_env(), seed, config.device)

    def make_methods(network: nn.Module, example: Any) -> list[methods.Method]:
        index = next(networks)
        made = []
        for position, part in enumerate(config.methods):
            seed = derive_seed("method", config.seed, position, index)
            made.append(methods.create(part.name, network, example=example, **{"seed": seed} | part.options))
        return made

    networks = itertools.count()
    env = SeededEpisodes(make_env(), config.seed, list(ends))
    agent = make_agent(config.model.name, config.model.options, env, config.seed, config.device)
    learner = AgentLearner(
        agent,
        env,
        [make_env() for _ in range(stream.episodes)],
        stream,
        make_methods,
        config.measures,
        config.seed,
        make_fresh if config.fresh else None,
    )
    seed_everything(config.seed)
    return learner


def make_environment_stream(config: RunConfig) -> EnvironmentStream:
    """Make the stream of a run."""
    cls = stream_class(config.stream.name)
    assert issubclass(cls, EnvironmentStream)
    options: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in config.stream.options.items()
    }
    return cls(**options)
