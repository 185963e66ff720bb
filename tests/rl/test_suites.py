"""MinAtar, Atari games and dm_control: episodes depend on their seeds alone, and runs in them resume bit for bit."""

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from pliant.experiments.agent_run import make_agent_learner
from pliant.experiments.recipe_files import find_recipe, load_recipe
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part
from pliant.experiments.store import RunFolder
from pliant.rl.environments import make_environment
from pliant.streams import SingleEnvironment
from tests.experiments.helpers import outputs
from tests.rl.helpers import DQN, small
from tests.rl.test_agent_run import _interrupt_after

MINATAR = Part("MinAtar/Breakout-v1", {"max_episode_steps": 60})
ATARI = Part("ALE/Asterix-v5", {"preprocessing": "atari", "max_episode_steps": 60})
CARTPOLE = Part("dm_control/cartpole-swingup", {"max_episode_steps": 40})


def play(env: Any, seed: int, steps: int) -> list[Any]:
    """Return all that an episode shows."""
    random = np.random.default_rng(0)
    seen: list[Any] = [np.array(env.reset(seed=seed)[0])]
    for _ in range(steps):
        env.action_space.seed(int(random.integers(2**31)))
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        seen += [np.array(observation), reward, terminated, truncated]
        if terminated or truncated:
            break
    return seen


@pytest.mark.parametrize("part", [MINATAR, ATARI, CARTPOLE], ids=lambda part: part.name)
def test_an_episode_depends_on_its_seed_alone(part: Part) -> None:
    used, new = (make_environment(part.name, part.options, SingleEnvironment(), 0) for _ in range(2))
    for seed in (4, 5):
        play(used, seed, 20)
    first, again, other = play(used, 3, 50), play(new, 3, 50), play(new, 4, 50)
    assert len(first) == len(again)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(first) != len(other) or any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_atari_frames_are_those_of_the_nature_paper() -> None:
    env = make_environment(ATARI.name, {"preprocessing": "atari"}, SingleEnvironment(), 0)
    assert env.observation_space.shape == (4, 84, 84)
    assert env.observation_space.dtype == np.uint8
    rewards, scores, infos = [], [], []
    env.reset(seed=0)
    for step in range(400):
        _, reward, terminated, _, info = env.step(step % 9)
        rewards.append(reward)
        scores.append(info["score"])
        infos.append(info["frame_number"])
        if terminated:
            break
    assert set(np.diff(infos[:-1])) == {4}, "each action acts for four frames, unless the game ends"
    assert set(rewards) <= {-1.0, 0.0, 1.0}
    assert max(scores) >= 50, "Asterix gives 50 points for an object"
    assert [np.sign(score) for score in scores] == rewards


def test_actions_of_dm_control_are_scaled() -> None:
    env = make_environment("dm_control/reacher-easy", {}, SingleEnvironment(), 0)
    assert env.action_space.low.tolist() == [-1, -1]
    env.reset(seed=0)
    env._low, env._high = np.array([0.0, -4.0]), np.array([2.0, 0.0])
    env.step(np.array([0.5, 3.0]))
    assert env._suite.physics.control().tolist() == [1.5, 0.0]


def test_an_episode_of_dm_control_is_truncated_after_1000_steps() -> None:
    env = make_environment(CARTPOLE.name, {}, SingleEnvironment(), 0)
    seen = play(env, 0, 2000)
    assert (len(seen) - 1) // 4 == 1000
    assert seen[-2:] == [False, True]


def test_wrong_names_and_options_are_named() -> None:
    for name, options, message in [
        ("dm_control/humanoid-wlk", {}, "did you mean 'humanoid-walk'"),
        ("dm_control/humanoid-walk", {"gravity": 1}, "env is 'dm_control/humanoid-walk' with options"),
        ("MinAtar/Breakout-v1", {}, "whose episodes may never end; give max_episode_steps"),
        ("MinAtar/Breakout-v1", {"preprocessing": "ale"}, "preprocessing is 'ale'; it must be 'atari'"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_environment(name, options, SingleEnvironment(), 0)


@pytest.mark.parametrize(
    "config",
    [
        small(data=MINATAR, model=Part("dqn", {**DQN.options, "policy": "MinAtarPolicy", "batch_size": 8})),
        small(
            data=ATARI,
            model=Part("dqn", {**DQN.options, "policy": "CnnPolicy", "batch_size": 4, "gradient_steps": 1}),
            stream=Part("intervention", {"steps": 120, "at": [60], "evaluate_every": 30, "episodes": 1}),
        ),
        small(
            data=CARTPOLE,
            model=Part(
                "sac",
                {
                    "policy": "SimBaPolicy",
                    "learning_starts": 20,
                    "batch_size": 8,
                    "policy_kwargs": {"net_arch": {"pi": [8], "qf": [8]}, "optimizer_class": "AdamW"},
                },
            ),
            stream=Part("intervention", {"steps": 120, "at": [60], "evaluate_every": 30, "episodes": 1}),
        ),
    ],
    ids=lambda config: config.data.name,
)
def test_an_interrupted_run_is_bit_equal(tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = execute(config, tmp_path / "whole")
    assert whole.status == "finished", whole.error
    records = len(RunFolder(tmp_path / "whole", config).records())
    _interrupt_after(config, tmp_path, records - 2, monkeypatch)
    assert execute(config, tmp_path).status == "finished"
    assert outputs(tmp_path, config) == outputs(tmp_path / "whole", config)


NATURE = {"q_net": [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136), (ANY, 512)]}
SIMBA = {
    "actor": [(128, ANY), (512, 128), (128, 512), (ANY, 128), (ANY, 128)],
    **{key: [(512, ANY), *([(2048, 512), (512, 2048)] * 2), (1, 512)] for key in ("critic.0", "critic.1")},
}
WIDE = {
    "actor": [(256, ANY), (256, 256), (ANY, 256), (ANY, 256)],
    "critic.0": [(256, ANY), (256, 256), (1, 256)],
}
PAPER_SCALE = {
    "p4_fig4a_asterix": (NATURE, 1, 32, "FIRE"),
    "p4_fig4a_beamrider": (NATURE, 1, 32, "S&P"),
    "p4_fig4a_demonattack": (NATURE, 1, 32, "full reset"),
    "p4_fig4b_humanoid_walk": (SIMBA, 2, 256, "FIRE"),
    "p4_fig4b_humanoid_run": (SIMBA, 2, 256, "S&P"),
    "p4_fig4b_dog_walk": (SIMBA, 2, 256, "full reset"),
    "p2_fig5_hopper_hop": (WIDE, 16, 256, "spectral 1e-4"),
    "p2_fig5_quadruped_walk": (WIDE, 16, 256, "LayerNorm"),
}
"""The papers' networks by the shapes of their weights, updates of each step, batch size, and the method to run."""
IN_EVERY_RUN = ("p4_fig4a_asterix", "p2_fig5_hopper_hop")


@pytest.mark.parametrize(
    "name", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long) for name in PAPER_SCALE]
)
def test_the_first_updates_at_paper_scale(name: str) -> None:
    """Networks, batches and replay ratio are the paper's; only the training is shorter, and the buffer smaller."""
    shapes, ratio, batch, label = PAPER_SCALE[name]
    less = ("agent.learning_starts=20", "agent.buffer_size=100", "env.max_episode_steps=400")
    shorter = ("stream.steps=26", "stream.at=[23]", "stream.evaluate_every=13", "stream.episodes=1")
    recipe = load_recipe(find_recipe(name), [*less, *shorter])
    (entry,) = [entry for entry in recipe.methods if entry.label == label]
    (variant,) = entry.variants()
    learner = make_agent_learner(recipe.config(entry, variant, 0, "result"))
    found = {
        network.name: [tuple(p.shape) for p in network.module.parameters() if p.ndim > 1]
        for network in learner.methods.networks
    }
    assert found == shapes
    sampled: list[int] = []
    sample = learner.agent.replay_buffer.sample
    learner.agent.replay_buffer.sample = lambda size, env=None: (sampled.append(size), sample(size, env=env))[1]
    records: list[Any] = []
    learner.run(records.append, lambda: None)
    assert learner.agent._n_updates == 6 * ratio
    assert sampled.count(batch) >= 6 * ratio
    assert [record["step"] for record in records] == [13, 23, 26]
    for network in found:
        key = f"gradient_l2 ({network})" if len(found) > 1 else "gradient_l2"
        assert 0 < records[-1]["measures"][key] < np.inf
