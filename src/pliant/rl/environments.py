"""Environments by name, with episodes that can be repeated and tasks that change."""

from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from pliant._importing import naming_extra
from pliant._seeding import derive_seed
from pliant.rl.atari import ATARI_OPTIONS, preprocess_atari
from pliant.rl.control_suite import PREFIX, make_control_task
from pliant.streams.environment_streams import EnvironmentSequence, EnvironmentStream


def make_environment(name: str, options: Mapping[str, Any], stream: EnvironmentStream, seed: int) -> gymnasium.Env:
    """Make an environment, with the changes of a stream's tasks.

    Args:
        name: An id of Gymnasium, such as "CartPole-v1", "MinAtar/Breakout-v1" or "ALE/Asterix-v5", or a task of
            dm_control, such as "dm_control/humanoid-walk". `module:id` imports a module that registers the id.
        options: Options of the environment. `preprocessing = "atari"` prepares the frames of an Atari game.
        stream: The stream.
        seed: Seed of the changes.

    Raises:
        ValueError: If the environment cannot be made, if its episodes may never end, or if the changes do not fit.
        ImportError: If its package is not installed.
    """
    given = dict(options)
    preprocessing = given.pop("preprocessing", None)
    if preprocessing not in (None, "atari"):
        raise ValueError(f"preprocessing is {preprocessing!r}; it must be 'atari', or be left out")
    if preprocessing is not None:
        given = ATARI_OPTIONS | given
    _register(name)
    make = make_control_task if name.startswith(PREFIX) else gymnasium.make
    try:
        env = make(name, **given)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError) as error:
        raise ValueError(f"env is {name!r} with options {dict(options)}: {error}") from error
    if not name.startswith(PREFIX) and (env.spec is None or env.spec.max_episode_steps is None):
        raise ValueError(f"env is {name!r}, whose episodes may never end; give max_episode_steps")
    if preprocessing is not None:
        env = preprocess_atari(env)
    return ChangingEnvironment(env, stream, seed) if isinstance(stream, EnvironmentSequence) else env


def _register(name: str) -> None:
    """Import the package whose environments a name means."""
    if name.startswith("ALE/"):
        with naming_extra("an Atari game", "atari"):
            import ale_py  # noqa: F401
    if name.startswith("MinAtar/"):
        with naming_extra("MinAtar", "minatar"):
            from minatar.gym import register_envs
        if not any(each.startswith("MinAtar/") for each in gymnasium.registry):
            register_envs()


class SeededEpisodes(gymnasium.Wrapper):  # type: ignore[misc]
    """Seeds each episode by the step at which it begins, so that a resumed run sees the same episodes.

    Args:
        env: The environment.
        seed: The seed of the run.
        cuts: Steps at which an episode is truncated: the ends of tasks.

    Attributes:
        steps: The steps so far.
        length: The steps of the present episode.
        returns: The returns of the finished episodes, scores if rewards are clipped; the caller may clear them.
    """

    def __init__(self, env: gymnasium.Env, seed: int, cuts: Collection[int]) -> None:
        super().__init__(env)
        self.seed = seed
        self.cuts = frozenset(cuts)
        self.steps = self.length = 0
        self.returns: list[float] = []
        self._return = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, with a seed of its own instead of the given one."""
        self.length, self._return = 0, 0.0
        begun: tuple[Any, dict[str, Any]] = self.env.reset(
            seed=derive_seed("episode", self.seed, self.steps) % 2**31, options=options
        )
        return begun

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.steps, self.length = self.steps + 1, self.length + 1
        self._return += float(info.get("score", reward))
        truncated = truncated or self.steps in self.cuts
        if terminated or truncated:
            self.returns.append(self._return)
        return observation, reward, terminated, truncated, info


class ChangingEnvironment(gymnasium.Wrapper):  # type: ignore[misc]
    """An environment that differs from task to task; `begin` draws a task.

    Args:
        env: The environment.
        stream: What changes.
        seed: Seed of the changes.
    """

    def __init__(self, env: gymnasium.Env, stream: EnvironmentSequence, seed: int) -> None:
        super().__init__(env)
        self.stream, self.seed = stream, seed
        space = env.observation_space
        if {"observations", "signs"} & set(stream.changes):
            if not isinstance(space, spaces.Box) or len(space.shape) != 1:
                raise ValueError(f"changes: observations are {space}; only vectors can be permuted or change signs")
            self.observation_space = spaces.Box(-np.inf, np.inf, space.shape, space.dtype.type)
        if "actions" in stream.changes and not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"changes: actions are {env.action_space}; only discrete actions can be permuted")
        for name in stream.physics:
            if not hasattr(env.unwrapped, name):
                raise ValueError(f"physics: {type(env.unwrapped).__name__} has no attribute {name!r}")
        self.begin(0)

    def begin(self, task: int) -> None:
        """Draw the changes of a task."""
        draw = np.random.default_rng(derive_seed("environment", self.seed, task))
        shape = self.observation_space.shape
        self._order = draw.permutation(*shape) if "observations" in self.stream.changes else slice(None)
        self._signs = draw.choice([-1, 1], shape).astype(np.float32) if "signs" in self.stream.changes else None
        self._actions = draw.permutation(self.action_space.n) if "actions" in self.stream.changes else None
        for name, (low, high) in self.stream.physics.items():
            setattr(self.env.unwrapped, name, draw.uniform(low, high))

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(**options)
        return self._change(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        taken = action if self._actions is None else self._actions[action]
        observation, reward, terminated, truncated, info = self.env.step(taken)
        return self._change(observation), reward, terminated, truncated, info

    def _change(self, observation: Any) -> Any:
        changed = observation[self._order] if self.stream.changes else observation
        return changed if self._signs is None else changed * self._signs


def begin_task(env: gymnasium.Env, task: int) -> None:
    """Change an environment for a task, if its tasks differ."""
    if isinstance(env, ChangingEnvironment):
        env.begin(task)
