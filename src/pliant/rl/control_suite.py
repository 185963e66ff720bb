"""Tasks of dm_control's suite as environments of Gymnasium: `dm_control/humanoid-walk`.

Observations are one flat vector, actions lie in [-1, 1]. An episode depends on its seed alone. It is truncated by the
suite's time limit, which is 1 000 steps in most tasks, or after `max_episode_steps`.
"""

import functools
import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from pliant._importing import naming_extra
from pliant._names import suggest

PREFIX = "dm_control/"


class ControlTask(gymnasium.Env):  # type: ignore[misc]
    """A task of the suite.

    Args:
        domain: Such as "humanoid".
        task: Such as "walk".
        max_episode_steps: The most steps of an episode.
        options: Arguments of the task, `task_kwargs` of the suite.

    Raises:
        ValueError: If there is no such task.
    """

    def __init__(self, domain: str, task: str, max_episode_steps: int = 1000, **options: Any) -> None:
        suite = _load_suite()
        known = {f"{each}-{name}" for each, name in suite.ALL_TASKS}
        if f"{domain}-{task}" not in known:
            raise ValueError(f"env is '{PREFIX}{domain}-{task}'; {suggest(f'{domain}-{task}', sorted(known))}")
        self._suite = suite.load(domain, task, task_kwargs={"random": 0, **options})
        sizes = [int(np.prod(spec.shape)) for spec in self._suite.observation_spec().values()]
        self.observation_space = spaces.Box(-np.inf, np.inf, (sum(sizes),), np.float32)
        actions = self._suite.action_spec()
        self._low, self._high = (np.broadcast_to(end, actions.shape) for end in (actions.minimum, actions.maximum))
        self.action_space = spaces.Box(-1.0, 1.0, actions.shape, np.float32)
        self._most_steps, self._steps = max_episode_steps, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        # The suite draws from one generator for its lifetime: a new one for each episode makes episodes repeatable.
        self._suite.task._random = np.random.RandomState(self.np_random.integers(2**32))
        self._steps = 0
        return _flatten(self._suite.reset().observation), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Take a step with an action in [-1, 1]."""
        clipped = np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        found = self._suite.step(self._low + (clipped + 1) / 2 * (self._high - self._low))
        self._steps += 1
        terminated = bool(found.last() and found.discount == 0)
        truncated = not terminated and bool(found.last() or self._steps >= self._most_steps)
        return _flatten(found.observation), float(found.reward), terminated, truncated, {}


def make_control_task(name: str, **options: Any) -> gymnasium.Env:
    """Make a task by its name.

    Args:
        name: Such as "dm_control/humanoid-walk".
        options: `max_episode_steps` and arguments of the task.

    Raises:
        ValueError: If there is no such task.
        ImportError: If dm_control is not installed.
    """
    domain, _, task = name.removeprefix(PREFIX).partition("-")
    return ControlTask(domain, task, **options)


@functools.cache
def _load_suite() -> Any:
    # dm_control looks for a display when it is imported. Nothing is drawn here.
    os.environ.setdefault("MUJOCO_GL", "disabled")
    with naming_extra("dm_control", "dm-control"):
        from dm_control import suite
    return suite


def _flatten(observation: dict[str, Any]) -> NDArray[np.float32]:
    return np.concatenate([np.ravel(each) for each in observation.values()]).astype(np.float32)
