"""Streams of environments: a task is a number of steps that an agent takes in an environment.

The classes hold settings only. `pliant.rl` makes the environments, and trains the agent in them.
"""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from pliant._validation import check_choice, require_positive

_MOST_EPISODES = 1000
EnvironmentChange = Literal["observations", "signs", "actions"]


@dataclass(frozen=True)
class Stage:
    """One task of a stream of environments.

    Args:
        steps: Environment steps.
        updates: Further updates on the replay buffer after the last step.
        is_new: Whether the environment differs from the one before. The agent then starts with an empty replay
            buffer and its first exploration rate; its networks and optimizers stay.
    """

    steps: int
    updates: int = 0
    is_new: bool = False


@dataclass(frozen=True)
class EnvironmentStream(ABC):
    """A sequence of tasks in one environment.

    Args:
        steps: Environment steps; of each task if the environment changes.
        evaluate_every: Environment steps between evaluations.
        episodes: Episodes of each evaluation, played greedily.
        reset_temperature: Whether to reset the temperature of SAC when a method acts at a task boundary.
    """

    steps: int = 3000
    evaluate_every: int = 250
    episodes: int = 10
    reset_temperature: bool = False

    paper: ClassVar[str]
    headline: ClassVar[str] = "final_late_return"
    alike: ClassVar[bool] = False
    shares_first_task: ClassVar[bool] = False
    """Whether all methods start from the end of the first task, which is trained once for each seed."""

    def __post_init__(self) -> None:
        require_positive(steps=self.steps, evaluate_every=self.evaluate_every, episodes=self.episodes)
        if self.episodes > _MOST_EPISODES:  # Each has its own environment.
            raise ValueError(f"episodes is {self.episodes}; it must be 1 … {_MOST_EPISODES}")

    @abstractmethod
    def stages(self) -> list[Stage]:
        """Return the tasks."""


@dataclass(frozen=True)
class SingleEnvironment(EnvironmentStream):
    """One environment, without a boundary."""

    paper: ClassVar[str] = "-"

    def stages(self) -> list[Stage]:
        """Return the only task."""
        return [Stage(self.steps)]


@dataclass(frozen=True)
class Intervention(EnvironmentStream):
    """One environment; methods that act at task boundaries act at given steps.

    Args:
        at: The steps, increasing.
    """

    at: tuple[int, ...] = (1500,)
    paper: ClassVar[str] = "FIRE"
    shares_first_task: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (0, *self.at, self.steps)
        if not self.at or any(later <= earlier for earlier, later in itertools.pairwise(ends)):
            raise ValueError(f"at is {list(self.at)}; it must hold increasing steps between 0 and {self.steps}")

    def stages(self) -> list[Stage]:
        """Return the parts between the interventions."""
        ends = (0, *self.at, self.steps)
        return [Stage(later - earlier) for earlier, later in itertools.pairwise(ends)]


@dataclass(frozen=True)
class EnvironmentSequence(EnvironmentStream):
    """An environment that changes at each task boundary, where the replay buffer is cleared.

    Args:
        tasks: Number of tasks.
        changes: What is drawn for each task: a permutation of the "observations", their "signs", a permutation of the
            "actions".
        physics: Attributes of the environment to draw for each task, with the least and the largest value, such as
            `{"gravity": [5, 20]}`. The environment must read them at each step.
    """

    tasks: int = 10
    steps: int = 1500
    changes: tuple[EnvironmentChange, ...] = ("observations", "signs", "actions")
    physics: dict[str, tuple[float, float]] = field(default_factory=dict)
    paper: ClassVar[str] = "-"
    headline: ClassVar[str] = "later_late_return"
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(tasks=self.tasks)
        for change in self.changes:
            check_choice("changes", change, get_args(EnvironmentChange))
        for name, (low, high) in self.physics.items():
            if low > high:
                raise ValueError(f"physics: {name} is between {low} and {high}; the first must be the smaller one")

    def stages(self) -> list[Stage]:
        """Return the tasks."""
        return [Stage(self.steps, is_new=index > 0) for index in range(self.tasks)]


@dataclass(frozen=True)
class Priming(EnvironmentStream):
    """Many updates on the first transitions, then learning as usual.

    Args:
        first: Environment steps before priming.
        updates: Updates on their transitions.
    """

    first: int = 200
    updates: int = 10_000
    steps: int = 20_000
    evaluate_every: int = 1000
    paper: ClassVar[str] = "The primacy bias"
    shares_first_task: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(first=self.first, **({"updates": self.updates} if self.updates else {}))

    def stages(self) -> list[Stage]:
        """Return the primed part and the rest."""
        return [Stage(self.first, self.updates), Stage(self.steps)]
