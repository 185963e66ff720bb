"""Runs of agents with forged checkpoints, a damaged first task and weights that are not finite."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("stable_baselines3")

from pliant.experiments.agent_run import make_agent_learner
from pliant.experiments.experiment import rehearse
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part
from pliant.experiments.store import RunFolder
from tests.experiments.helpers import outputs
from tests.hostile.attacks import flip_bit
from tests.hostile.test_store import checkpoints, forge
from tests.rl.helpers import DQN, PPO, SAC, small

STREAM = Part("intervention", {"steps": 120, "at": [60], "evaluate_every": 30, "episodes": 1})
CONFIG = small(stream=STREAM, model=Part("dqn", DQN.options | {"policy_kwargs": {"net_arch": [8]}}))


class _Interrupted(BaseException):
    """Like a signal, not an error of the run."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("undisturbed")
    assert execute(CONFIG, root).status == "finished"
    return outputs(root, CONFIG)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose run stopped in its second task, with two checkpoints."""
    root, save = tmp_path_factory.mktemp("interrupted"), RunFolder.save_checkpoint

    def save_or_stop(self: RunFolder, state: dict[str, Any], number: int, sources: dict[str, str]) -> None:
        save(self, state, number, sources)
        if state["env"]["steps"] >= 90 and len(checkpoints(self.path)) == 2:
            raise _Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", save_or_stop)
        with pytest.raises(_Interrupted):
            execute(CONFIG, root, checkpoint_seconds=0.0)
    return root


def moments(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["agent"]["parameters"]["policy.optimizer"]["state"][0]
    return found


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "method in place of a number": lambda state: state["agent"]["counters"].update(train=5),
    "counter as text": lambda state: state["agent"]["counters"].update(num_timesteps="many"),
    "no policy": lambda state: state["agent"]["counters"].update(policy=None),
    "variable that is not there": lambda state: state["agent"]["variables"].update(policy=torch.zeros(1)),
    "no buffer": lambda state: state["agent"].update(buffer=None),
    "place before the buffer": lambda state: state["agent"]["buffer"].update(pos=-5),
    "place behind the buffer": lambda state: state["agent"]["buffer"].update(pos=10**9),
    "full as text": lambda state: state["agent"]["buffer"].update(full="yes"),
    "array that is a method": lambda state: state["agent"]["buffer"]["arrays"].update(reset=torch.zeros(3)),
    "array missing": lambda state: state["agent"]["buffer"]["arrays"].pop("rewards"),
    "array too short": lambda state: state["agent"]["buffer"]["arrays"].update(rewards=torch.zeros(3, 1)),
    "task that is not there": lambda state: state["position"].update(task=99),
    "task as text": lambda state: state["position"].update(task="1"),
    "stages": lambda state: state["position"].update(stages=[]),
    "method": lambda state: state["position"].update(run=None),
    "epoch of another step": lambda state: state["position"].update(epoch=0),
    "evaluations as text": lambda state: state["position"].update(evaluations=["best"]),
    "begun as text": lambda state: state["position"].update(begun="no"),
    "steps before the first": lambda state: state["env"].update(steps=-1),
    "steps behind the last": lambda state: state["env"].update(steps=10**6),
    "no generators": lambda state: state.update(random=None),
    "primed without priming": lambda state: state["position"].update(primed=5),
    "primed as text": lambda state: state["position"].update(primed="5"),
    "tensor in a record": lambda state: state["position"]["pending"].update(measures=torch.zeros(2)),
    "infinity in a record": lambda state: state["position"]["pending"].update(x=float("inf")),
    "moment of another shape": lambda state: moments(state).update(exp_avg=torch.zeros(3)),
    "moment without a shape": lambda state: moments(state).update(exp_avg=torch.zeros(())),
    "part that is not there": lambda state: state["agent"]["parameters"].update(collect_rollouts={}),
    "part missing": lambda state: state["agent"]["parameters"].pop("policy"),
}


def test_a_forged_state_is_refused(interrupted: Path) -> None:
    """A forged number would otherwise become a result, or a failure that every attempt meets again."""
    newest = checkpoints(interrupted / "runs" / CONFIG.id)[0]
    state = torch.load(newest, weights_only=True)["state"]
    learner = make_agent_learner(CONFIG)
    learner.load_state_dict(copy.deepcopy(state))
    assert learner.task == 1
    for name, change in FORGERIES.items():
        forged = copy.deepcopy(state)
        change(forged)
        try:
            learner.load_state_dict(forged)
        except (ValueError, TypeError, KeyError):
            continue
        pytest.fail(f"{name} was loaded")


def test_a_forged_checkpoint_costs_only_itself(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(interrupted, root)
    forge(root / "runs" / CONFIG.id, lambda saved: saved["state"]["position"].update(task=99))
    outcome = execute(CONFIG, root)
    assert outcome.status == "finished", outcome.error
    (note,) = outcome.notes
    assert "is rejected (ValueError: task is 99; the stream has tasks 0 … 1)" in note
    assert outputs(root, CONFIG) == undisturbed


def test_a_damaged_first_task_is_done_again_with_a_word(
    interrupted: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(interrupted / "first_tasks", root / "first_tasks")
    (first,) = (root / "first_tasks" / "runs").iterdir()
    for path in checkpoints(first):
        flip_bit(path)
    outcome = execute(CONFIG, root)
    assert outcome.status == "finished", outcome.error
    assert "is rejected (ValueError: the content is not what was saved)" in outcome.notes[0]
    assert outputs(root, CONFIG) == undisturbed


@pytest.mark.parametrize(("agent", "env"), [(PPO, "CartPole-v1"), (SAC, "Pendulum-v1")], ids=["ppo", "sac"])
def test_weights_that_are_not_finite_end_a_run_as_diverged(tmp_path: Path, agent: Part, env: str) -> None:
    """Their distributions raise a ValueError; the run did not fail, and no other attempt would end differently."""
    stream = Part("environment", {"steps": 80, "evaluate_every": 40, "episodes": 1})
    options = agent.options | {"learning_rate": 1e30}
    wild = small(data=Part(env, {"max_episode_steps": 20}), model=Part(agent.name, options), stream=stream)
    outcome = execute(wild, tmp_path)
    assert outcome.status == "diverged", outcome.error
    assert "not finite" in outcome.error


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": {"name": "dqn", "policy_kwargs": "big"}},
        {"agent": {"name": "dqn", "policy": ["MlpPolicy"]}},
        {"agent": {"name": "dqn", "policy_kwargs": {"features_extractor_class": "os.system"}}},
        {"agent": {"name": "dqn", "buffer_size": 10**15}},
        {"agent": {"name": "ppo", "n_steps": 10**15}},
        {"env": {"name": "CartPole-v1", "max_episode_steps": "many"}},
        {"env": {"name": "CartPole-v1", "render_mode": 5}},
    ],
    ids=str,
)
def test_wrong_options_of_an_agent_are_named_before_anything_is_trained(changes: dict[str, Any]) -> None:
    values = {
        "domain": "rl",
        "env": "CartPole-v1",
        "agent": "dqn",
        "stream": {"name": "environment", "steps": 80, "evaluate_every": 40, "episodes": 1},
        "methods": ["vanilla"],
        "seeds": 1,
    }
    with pytest.raises(ValueError, match=r"vanilla: |stream: "):
        rehearse(make_recipe(values | changes))
