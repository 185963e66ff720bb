"""Runs of agents: bit-equal after an interruption, from a shared first task, with the records that were promised."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.utils import polyak_update
from torch.utils._pytree import tree_leaves

from pliant.diagnostics import measure
from pliant.experiments.agent_run import AgentSession, train_first_task
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder, load_runs
from pliant.rl.agent_learner import MEASURES, AgentLearner
from pliant.rl.agents import make_agent, prime
from tests.experiments.helpers import in_process, outputs, wait_until
from tests.rl.helpers import DQN, INTERVENTION, PPO, PRIMING, SAC, SEQUENCE, small


class _Interrupted(BaseException):
    """Like a signal, not an error of the run."""


def _interrupt_after(config: RunConfig, root: Path, records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until an attempt has written some records, and stop it in the middle of what follows."""
    run, written = AgentSession.run, []

    def stop(self: AgentSession, append: Callable[[Any], None], save: Callable[[], None]) -> None:
        def append_and_count(record: Any) -> None:
            append(record)
            written.append(record)

        def save_or_stop() -> None:
            save()
            if len(written) >= records:
                written.append(None)
            if len(written) >= records + 3:  # A few episodes later.
                raise _Interrupted

        run(self, append_and_count, save_or_stop)

    with monkeypatch.context() as patch:
        patch.setattr(AgentSession, "run", stop)
        with pytest.raises(_Interrupted):
            execute(config, root, checkpoint_seconds=0.0)


@pytest.mark.parametrize(
    "config",
    [
        small(methods=(Part("l2_init"), Part("fire"))),
        small(stream=SEQUENCE, methods=(Part("redo", {"every": 7, "tau": 0.3}), Part("shrink_perturb"))),
        small(stream=SEQUENCE, fresh=True),
        small(stream=PRIMING, methods=(Part("full_reset"),)),
        small(
            data=Part("Pendulum-v1", {"max_episode_steps": 9}),
            model=SAC,
            methods=(Part("layer_norm"), Part("spectral"), Part("full_reset")),
        ),
        small(model=PPO, methods=(Part("hare_tortoise", {"every": 5}),)),
    ],
    ids=["intervention", "sequence", "fresh", "priming", "sac", "ppo"],
)
def test_an_interrupted_run_is_bit_equal(tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = execute(config, tmp_path / "whole")
    assert whole.status == "finished", whole.error
    records = len(RunFolder(tmp_path / "whole", config).records())
    _interrupt_after(config, tmp_path, records - 2, monkeypatch)
    assert len(RunFolder(tmp_path, config).records()) < records
    assert execute(config, tmp_path).status == "finished"
    assert "resume" in [event["event"] for event in load_runs(tmp_path)[0].events]
    assert outputs(tmp_path, config) == outputs(tmp_path / "whole", config)


def test_a_killed_process_resumes(tmp_path: Path) -> None:
    config = small(stream=Part("environment", {"steps": 1600, "evaluate_every": 40, "episodes": 1}))
    process = in_process(config, tmp_path)
    folder = RunFolder(tmp_path, config)
    wait_until(lambda: len(folder.records()) > 3 or not process.is_alive())
    process.kill()
    process.join()
    before = len(folder.records())
    assert 3 < before < 40
    assert execute(config, tmp_path).status == "finished"
    assert execute(config, tmp_path / "whole").status == "finished"
    assert outputs(tmp_path, config) == outputs(tmp_path / "whole", config)


def test_all_arms_start_from_the_same_first_task(tmp_path: Path) -> None:
    arms = [small(label=name, methods=parts) for name, parts in (("plain", ()), ("fire", (Part("fire"),)))]
    for arm in arms:
        assert execute(arm, tmp_path).status == "finished"
    plain, fire = (RunFolder(tmp_path, arm).records() for arm in arms)
    assert plain[:3] == fire[:3]
    assert plain[3] != fire[3]
    (first,) = (tmp_path / "first_tasks" / "runs").iterdir()
    assert len(RunFolder(tmp_path / "first_tasks", load_runs(tmp_path / "first_tasks")[0].config).records()) == 3
    assert [each.suffix for each in first.glob("checkpoint-*")] == [".pt"]


def test_an_interrupted_first_task_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    append, written = RunFolder.append, []

    def append_or_stop(self: RunFolder, record: dict[str, Any]) -> None:
        append(self, record)
        written.append(record)
        if len(written) == 3:
            raise _Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", append_or_stop)
        with pytest.raises(_Interrupted):
            train_first_task(config, tmp_path, checkpoint_seconds=0.0)
    resumed: list[int] = []
    run = AgentLearner.run
    monkeypatch.setattr(
        AgentLearner, "run", lambda self, *args, **options: (resumed.append(self.step), run(self, *args, **options))
    )
    _, records = train_first_task(config, tmp_path)
    assert 0 < resumed[0] < 120
    assert records == train_first_task(config, tmp_path / "whole")[1]


@pytest.mark.parametrize("model", [DQN, PPO], ids=["dqn", "ppo"])
def test_sharing_the_first_task_changes_nothing(tmp_path: Path, model: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(model=model, methods=(Part("full_reset"), Part("fire")))
    assert execute(config, tmp_path).status == "finished"
    monkeypatch.setattr("pliant.streams.Intervention.shares_first_task", False)
    assert execute(config, tmp_path / "alone").status == "finished"
    assert outputs(tmp_path, config)["metrics.jsonl"] == outputs(tmp_path / "alone", config)["metrics.jsonl"]


def test_a_method_that_acts_at_every_step_has_a_first_task_of_its_own(tmp_path: Path) -> None:
    for parts in ((), (Part("l2_init"),), (Part("fire"), Part("l2_init"))):
        assert execute(small(methods=parts), tmp_path).status == "finished"
    assert len(list((tmp_path / "first_tasks" / "runs").iterdir())) == 2


def test_records_hold_the_measures_of_each_network(tmp_path: Path) -> None:
    config = small(data=Part("Pendulum-v1"), model=SAC)
    assert execute(config, tmp_path).status == "finished"
    records = RunFolder(tmp_path, config).records()
    assert [record["step"] for record in records] == [40, 80, 120, 160, 200, 240]
    assert [record["task"] for record in records] == [0, 0, 0, 1, 1, 1]
    for record in records:
        assert {"evaluation_return", "overestimation"} <= record.keys()
    networks = ("actor", "critic.0", "critic.1")
    names = ("weight_l2", "spectral_norm_max", "dormant_fraction", "feature_rank", "gradient_l2")
    assert records[-1]["measures"].keys() == {f"{name} ({network})" for network in networks for name in names}
    assert records[-1]["measures"]["weight_l2 (critic.0)"] != records[-1]["measures"]["weight_l2 (critic.1)"]


def test_an_agent_without_replay_buffer_is_measured_on_its_last_rollout() -> None:
    """PPO empties its rollout buffer before the next rollout begins, which is when records are written."""
    from pliant.experiments.agent_run import make_agent_learner

    learner = make_agent_learner(small(model=PPO))
    records: list[dict[str, Any]] = []
    learner.run(records.append, lambda: None)
    last = torch.as_tensor(learner.agent.rollout_buffer.observations)
    assert last.shape == (20, 4)
    assert torch.equal(learner.methods.rollout, last)
    assert records[0]["measures"] == {}
    assert all(record["measures"].keys() >= {*MEASURES} for record in records[1:])
    (network,) = learner.methods.networks
    expected = measure(network.module, last, measures=MEASURES).values
    assert learner.methods.measure() == {f"policy/{name}": expected[name] for name in MEASURES}
    of_nothing = measure(network.module, torch.zeros_like(last), measures=MEASURES).values
    assert expected["dormant_fraction"] != of_nothing["dormant_fraction"]


def test_twin_critics_are_reset_to_different_weights(tmp_path: Path) -> None:
    from pliant.experiments.agent_run import make_agent_learner

    learner = make_agent_learner(small(data=Part("Pendulum-v1"), model=SAC, methods=(Part("full_reset"),)))
    learner.methods.on_new_data()
    first, second = learner.agent.critic.q_networks
    assert not any(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True) if a.ndim == 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Part("CartPole-v9")}, "env is 'CartPole-v9'"),
        ({"model": Part("dqm")}, "did you mean 'dqn'"),
        ({"model": Part("dqn", {"learning_rates": 1.0})}, "did you mean 'learning_rate'"),
        ({"model": SAC}, "agent 'sac'"),
        ({"model": Part("dqn", {"train_freq": [1, "episode"]})}, "it must be a number of steps"),
        ({"model": Part("dqn", {"train_freq": 7})}, "evaluate_every is 40; it must be a multiple"),
        ({"stream": Part("intervention", {"steps": 100, "at": [100]})}, "increasing steps between 0 and 100"),
        ({"model": PPO, "stream": PRIMING}, "PPO has no replay buffer"),
        (
            {"data": Part("Pendulum-v1"), "model": SAC, "stream": SEQUENCE},
            "only discrete actions can be permuted",
        ),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    outcome = execute(small(**changes), tmp_path)
    assert outcome.status == "failed"
    assert message in outcome.error


def test_the_replay_ratio_counts_updates(tmp_path: Path) -> None:
    from pliant.experiments.agent_run import make_agent_learner

    config = small(model=Part("dqn", DQN.options | {"gradient_steps": 4}), stream=INTERVENTION)
    learner = make_agent_learner(config)
    learner.run(lambda record: None, lambda: None)
    assert learner.agent._n_updates == 4 * (240 - 20)


TD3 = Part("td3", {"learning_starts": 20, "batch_size": 16, "policy_kwargs": {"net_arch": [8, 8]}})
PENDULUM = {"data": Part("Pendulum-v1", {"max_episode_steps": 9})}


@pytest.mark.parametrize("updates", [250, 1000])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": Part("sac", SAC.options | {"target_update_interval": 30}), **PENDULUM},
        {"model": TD3, "methods": (Part("redo", {"every": 70, "tau": 0.3}),), **PENDULUM},
    ],
    ids=["dqn", "sac", "td3"],
)
def test_priming_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], updates: int
) -> None:
    config = small(stream=Part("priming", PRIMING.options | {"updates": updates}), **changes)
    save, saved = RunFolder.save_checkpoint, []

    def save_or_stop(self: RunFolder, state: dict[str, Any], number: int, sources: dict[str, str]) -> None:
        save(self, state, number, sources)
        saved.append(state["position"]["primed"])
        if saved[-1] >= updates // 2:
            raise _Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", save_or_stop)
        with pytest.raises(_Interrupted):
            train_first_task(config, tmp_path, checkpoint_seconds=0.0)
    assert 0 < saved[-1] < updates
    begun: list[int] = []
    monkeypatch.setattr(
        "pliant.rl.agent_learner.prime",
        lambda agent, updates, done: (begun.append(done), prime(agent, updates, done))[1],
    )
    assert execute(config, tmp_path).status == "finished"
    assert begun[0] == saved[-1]
    assert execute(config, tmp_path / "whole").status == "finished"
    assert outputs(tmp_path, config) == outputs(tmp_path / "whole", config)


@pytest.mark.parametrize(
    ("name", "options", "calls"),
    [("sac", SAC.options | {"target_update_interval": 30}, [700]), ("td3", TD3.options, [700]), ("dqn", {}, [64] * 11)],
)
def test_priming_in_pieces_is_the_priming_of_the_paper(name: str, options: dict[str, Any], calls: list[int]) -> None:
    """Without pieces: one call of the agent's own training, or one between two updates of DQN's target network."""
    states = []
    for in_pieces in (True, False):
        given = DQN.options | {"target_update_interval": 64, "gradient_steps": 1} if name == "dqn" else options
        env = gymnasium.make("CartPole-v1" if name == "dqn" else "Pendulum-v1", max_episode_steps=20)
        agent: Any = make_agent(name, given, env, seed=0)
        agent.learn(60, log_interval=None)
        torch.manual_seed(0)
        np.random.seed(0)
        done = 0
        while in_pieces and done < 700:
            done = prime(agent, 700, done)
        agent.policy.set_training_mode(True)
        for size in () if in_pieces else calls:
            agent.train(min(size, 700 - done), agent.batch_size)
            done += size
            if name == "dqn":
                polyak_update(agent.q_net.parameters(), agent.q_net_target.parameters(), agent.tau)
        assert agent._n_updates > 700
        states.append([value for network in agent.get_parameters().values() for value in tree_leaves(network)])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
