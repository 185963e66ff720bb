"""Environments: their episodes depend on the step alone, and tasks differ as they should."""

import re
import sys

import gymnasium
import numpy as np
import pytest

from pliant.rl.control_suite import _load_suite
from pliant.rl.environments import ChangingEnvironment, SeededEpisodes, make_environment
from pliant.streams import EnvironmentSequence, SingleEnvironment


def test_an_episode_depends_on_the_step_at_which_it_begins() -> None:
    first, second = (SeededEpisodes(gymnasium.make("CartPole-v1"), 0, []) for _ in range(2))
    begun = first.reset(seed=1)[0]
    first.steps = second.steps = 7
    assert not np.array_equal(first.reset(seed=1)[0], begun)
    assert np.array_equal(first.reset(seed=1)[0], second.reset(seed=2)[0])


def test_episodes_are_cut_at_given_steps() -> None:
    env = SeededEpisodes(gymnasium.make("CartPole-v1"), 0, [3])
    env.reset()
    ends = [env.step(step % 2)[2:4] for step in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    assert env.returns == [3.0]
    env.reset()
    assert (env.steps, env.length) == (3, 0)


def test_a_task_permutes_observations_signs_and_actions() -> None:
    stream = EnvironmentSequence(tasks=3)
    plain = gymnasium.make("CartPole-v1")
    changed = ChangingEnvironment(gymnasium.make("CartPole-v1"), stream, seed=5)
    before, after = plain.reset(seed=3)[0], changed.reset(seed=3)[0]
    assert sorted(abs(after)) == pytest.approx(sorted(abs(before)))
    drawn = [changed._actions.tolist()]
    for task in range(1, 9):
        changed.begin(task)
        drawn.append(changed._actions.tolist())
    assert sorted(map(tuple, drawn))[0] != sorted(map(tuple, drawn))[-1]
    for action in (0, 1):
        plain.reset(seed=3)
        changed.reset(seed=3)
        taken = plain.step(changed._actions[action])[0]
        seen = changed.step(action)[0]
        assert seen == pytest.approx(taken[changed._order] * changed._signs)


def test_physics_are_drawn_for_each_task() -> None:
    stream = EnvironmentSequence(tasks=3, changes=(), physics={"gravity": (5.0, 20.0)})
    env = make_environment("CartPole-v1", {}, stream, 0)
    drawn = []
    for task in range(3):
        env.begin(task)
        drawn.append(env.unwrapped.gravity)
    assert len(set(drawn)) == 3
    assert all(5 <= value <= 20 for value in drawn)
    with pytest.raises(ValueError, match="CartPoleEnv has no attribute 'gravitation'"):
        make_environment("CartPole-v1", {}, EnvironmentSequence(physics={"gravitation": (1.0, 2.0)}), 0)


def test_an_environment_without_a_time_limit_is_refused() -> None:
    gymnasium.register("Endless-v0", entry_point=type(gymnasium.make("CartPole-v1").unwrapped))
    with pytest.raises(ValueError, match="whose episodes may never end; give max_episode_steps"):
        make_environment("Endless-v0", {}, SingleEnvironment(), 0)
    assert make_environment("Endless-v0", {"max_episode_steps": 9}, SingleEnvironment(), 0)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("MinAtar/Breakout-v1", "minatar.gym", "minatar"),
        ("ALE/Asterix-v5", "ale_py", "atari"),
        ("dm_control/humanoid-walk", "dm_control", "dm-control"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _load_suite.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'pliant[{extra}]'")):
        make_environment(name, {}, SingleEnvironment(), 0)
