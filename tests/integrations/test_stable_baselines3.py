"""The callback on real agents: it finds their networks, keeps targets in step, and its state survives save and load."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import set_random_seed
from torch import nn

import pliant
from pliant.integrations.stable_baselines3 import PliantCallback, diagnose_agent
from tests.integrations.agents import AGENTS, CONTINUOUS, NETWORKS, keep_log, tensors_of


@pytest.mark.parametrize("name", AGENTS)
def test_each_network_gets_its_methods_on_its_own_optimizer(name: str) -> None:
    agent, seen = AGENTS[name](), []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            seen.append({name: len(method.optimizers) for name, method in callback.methods.items()})
            return True

    callback = PliantCallback(lambda network: [pliant.L2Init(network), pliant.FIRE(network)])
    agent.learn(64, callback=[callback, Look()])
    expected = [f"{network}/{method}" for network in NETWORKS[name] for method in ("l2_init", "fire")]
    assert list(callback.methods) == expected
    assert all(counts == dict.fromkeys(expected, 1) for counts in seen)
    assert not any(method.optimizers for method in callback.methods.values())  # learn() is over
    steps = {key: sum(callback.methods[f"{key}/l2_init"].steps) for key in NETWORKS[name]}
    assert all(steps.values()), steps


@pytest.mark.parametrize("name", AGENTS)
def test_reinitializers_act_at_their_steps_and_targets_follow(name: str) -> None:
    agent = AGENTS[name]()
    copied: list[bool] = []

    class Checked(PliantCallback):
        def on_new_data(self, batches: Any = None, loss_fn: Any = None) -> list[pliant.Receipt]:
            receipts = super().on_new_data(batches, loss_fn)
            for network in self._networks.values():
                if network.target is not None:
                    pairs = zip(network.module.parameters(), network.target.parameters(), strict=True)
                    copied.append(all(torch.equal(ours, target) for ours, target in pairs))
            return receipts

    stored = agent.replay_buffer.size if hasattr(agent, "replay_buffer") else None
    callback = Checked(lambda network: [pliant.FullReset(network)], at=[40, 0.75])
    agent.learn(128, callback=callback)
    steps = sorted({step for step, _ in callback.receipts})
    assert len(steps) == 2
    assert 40 <= steps[0] < 96 <= steps[1]
    assert all(receipt.entries for _, receipt in callback.receipts)
    assert all(copied)
    assert len(copied) == 2 * sum(network.target is not None for network in callback._networks.values())
    if stored is not None:
        assert agent.replay_buffer.size() == 128


@pytest.mark.parametrize("name", AGENTS)
def test_a_callback_that_only_measures_leaves_the_training_bit_equal(name: str) -> None:
    trained = []
    for callback in (None, PliantCallback(lambda network: [], measure_every=16)):
        agent = AGENTS[name]()
        agent.learn(100, callback=callback)
        trained.append(tensors_of(agent))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("name", AGENTS)
def test_measures_go_to_the_logger(name: str) -> None:
    agent = AGENTS[name]()
    written = keep_log(agent)
    agent.learn(450, callback=PliantCallback(lambda network: [], measure_every=64), log_interval=1)
    agent.dump_logs()
    for network in NETWORKS[name]:
        for measure in ("dormant_fraction", "feature_rank", "weight_l2", "gradient_l2"):
            assert written.values[f"pliant/{network}/{measure}"]
    assert np.isfinite(written.values["pliant/overestimation"]).all()


@pytest.mark.parametrize("name", AGENTS)
def test_a_diagnosis_sees_each_network_and_leaves_the_training_bit_equal(name: str) -> None:
    agents = [AGENTS[name](), AGENTS[name]()]
    measures = ["weight_l2", "dormant_fraction", "feature_rank"]
    for diagnosed, agent in enumerate(agents):
        set_random_seed(3)
        agent.learn(64)
        if diagnosed:
            found = diagnose_agent(agent, measures=measures)
            assert list(found) == NETWORKS[name]
            assert all({*measures} <= each.signs.values.keys() for each in found.values())
        agent.learn(64, reset_num_timesteps=False)
    first, second = map(tensors_of, agents)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_diagnosis_tells_twin_critics_apart() -> None:
    agent: Any = AGENTS["SAC"]()
    agent.learn(64)
    with torch.no_grad():
        for layer in agent.critic.q_networks[1][:-1:2]:
            layer.bias.fill_(-100.0)
    found = diagnose_agent(agent, measures=["dormant_fraction"])
    assert found["critic.1"].signs.values["dormant_fraction"] == 1.0
    assert found["critic.0"].signs.values["dormant_fraction"] < 0.5
    present = {name: any(sign.present for sign in each.signs.findings()) for name, each in found.items()}
    assert present == {"actor": False, "critic.0": False, "critic.1": True}


def test_a_diagnosis_needs_transitions() -> None:
    for name in ("DQN", "PPO"):
        with pytest.raises(ValueError, match="model: it has no transitions; call learn"):
            diagnose_agent(AGENTS[name]())


def test_the_gradient_norm_is_that_of_the_networks_own_loss() -> None:
    agent = AGENTS["SAC"]()
    written, seen = keep_log(agent), []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = agent.policy.critic.q_networks[0].parameters()
        seen.append(float(torch.cat([p.grad.flatten() for p in parameters]).norm()))

    agent.policy.critic.optimizer.register_step_pre_hook(note)
    agent.learn(64, callback=PliantCallback(lambda network: [], measure_every=64))
    agent.dump_logs()
    assert written.values["pliant/critic.0/gradient_l2"][-1] == pytest.approx(
        seen[-2]
    )  # measured before the last update


def test_overestimation_is_value_minus_discounted_return() -> None:
    """A network whose value is 7 for all states, in episodes of known length."""
    agent = AGENTS["DQN"](learning_starts=10_000, gamma=0.5, policy_kwargs={"net_arch": [4]})
    with torch.no_grad():
        for parameter in agent.policy.q_net.parameters():
            parameter.zero_()
        agent.policy.q_net.q_net[-1].bias.fill_(7.0)
    written = keep_log(agent)
    agent.learn(200, callback=PliantCallback(lambda network: [], measure_every=199), log_interval=10_000)
    agent.dump_logs()
    lengths = [int(info["l"]) for info in agent.ep_info_buffer]
    expected = np.mean([7 - (1 - 0.5**length) / (1 - 0.5) for length in lengths])
    assert written.values["pliant/overestimation"][-1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3", "PPO"])
def test_resume_after_save_and_load_is_bit_equal(name: str, tmp_path: Path) -> None:
    def make(network: nn.Module, example: Any) -> list[pliant.Method]:
        return [
            pliant.L2Init(network, lam=1e-2),
            pliant.ReDo(network, example, every=3, tau=0.5),
            pliant.HareTortoise(network, every=7),
            pliant.FullReset(network, seed=1),
        ]

    def go_on(agent: BaseAlgorithm, callback: PliantCallback) -> list[torch.Tensor]:
        env = gymnasium.make(agent.env.envs[0].spec.id if agent.env is not None else environment)
        agent.set_env(env, force_reset=True)
        set_random_seed(3)
        agent.set_random_seed(3)
        agent.learn(64, callback=callback, reset_num_timesteps=False)
        return tensors_of(agent)

    agent = AGENTS[name]()
    environment = agent.env.envs[0].spec.id
    callback = PliantCallback(make, at=[32, 96])
    agent.learn(64, callback=callback)
    agent.save(tmp_path / "agent.zip")
    if hasattr(agent, "replay_buffer"):
        agent.save_replay_buffer(tmp_path / "buffer.pkl")
    loaded = type(agent).load(tmp_path / "agent.zip", env=gymnasium.make(environment))
    if hasattr(agent, "replay_buffer"):
        loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    again = PliantCallback(make, at=[32, 96])
    uninterrupted, resumed = go_on(agent, callback), go_on(loaded, again)
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted, resumed, strict=True))
    assert [step for step, _ in again.receipts] == [step for step, _ in callback.receipts if step > 64]
    initial, kept = callback.methods, again.methods
    for key, method in initial.items():
        if method.name == "l2_init":
            pairs = zip(method.state_dict()["state"].values(), kept[key].state_dict()["state"].values(), strict=True)
            for ours, theirs in pairs:
                assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_state_of_other_methods_is_not_used_and_a_warning_says_so(tmp_path: Path) -> None:
    agent = AGENTS["DQN"]()
    agent.learn(32, callback=PliantCallback(lambda network: [pliant.L2Init(network)]))
    agent.save(tmp_path / "agent.zip")
    loaded = DQN.load(tmp_path / "agent.zip", env=gymnasium.make("CartPole-v1"))
    with pytest.warns(UserWarning, match=r"no state of q_net/l2.*start from the present weights"):
        loaded.learn(8, callback=PliantCallback(lambda network: [pliant.L2(network)]))


@pytest.mark.parametrize("name", AGENTS)
def test_layer_norm_and_crelu_rebuild_optimizer_and_target(name: str) -> None:
    agent = AGENTS[name]()
    agent.learn(64)

    def make(network: nn.Module, example: Any) -> list[pliant.Method]:
        return [pliant.LayerNormInsertion(network, example), pliant.CReLUConversion(network, example)]

    before = {id(p) for p in agent.policy.parameters()}
    callback = PliantCallback(make)
    agent.learn(64, callback=callback, reset_num_timesteps=False)
    for network in callback._networks.values():
        held = {id(p) for group in network.optimizer.param_groups for p in group["params"]}
        new = [p for p in network.module.parameters() if id(p) not in before]
        assert new
        assert all(id(p) in held for p in new)
        assert all(p in network.optimizer.state for p in new)  # they were stepped
        assert any(isinstance(module, nn.LayerNorm) for module in network.module.modules())
        if network.target is not None:
            assert [p.shape for p in network.target.parameters()] == [p.shape for p in network.module.parameters()]
            assert not {id(p) for p in network.target.parameters()} & {id(p) for p in network.module.parameters()}
    if name == "DQN":
        assert agent.q_net_target is agent.policy.q_net_target
    settings = {key: value for key, value in network.optimizer.param_groups[0].items() if key != "params"}
    fresh = AGENTS[name]()
    owner = getattr(fresh, "critic", fresh.policy)
    assert settings == {key: value for key, value in owner.optimizer.param_groups[0].items() if key != "params"}


def rebuild_layers(network: nn.Module, example: Any) -> list[pliant.Method]:
    return [
        pliant.LayerNormInsertion(network, example),
        pliant.CReLUConversion(network, example),
        pliant.L2Init(network, lam=1e-2),
    ]


@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3", "PPO", "QRDQN", "TQC"])
def test_agents_with_changed_layers_are_loaded_as_any_other(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]()
    callback = PliantCallback(rebuild_layers)
    agent.learn(64, callback=callback)
    agent.save(tmp_path / "agent.zip")
    env = gymnasium.make(agent.env.envs[0].spec.id)
    loaded = type(agent).load(tmp_path / "agent.zip", env=env)
    assert any(isinstance(module, nn.LayerNorm) for module in loaded.policy.modules())
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(agent), tensors_of(loaded), strict=True))

    if hasattr(agent, "replay_buffer"):
        agent.save_replay_buffer(tmp_path / "buffer.pkl")
    trained = []
    for each, its in ((agent, callback), (loaded, PliantCallback(rebuild_layers))):
        if hasattr(agent, "replay_buffer"):
            each.load_replay_buffer(tmp_path / "buffer.pkl")
        each.set_env(gymnasium.make(agent.env.envs[0].spec.id), force_reset=True)
        set_random_seed(3)
        each.set_random_seed(3)
        each.learn(64, callback=its, reset_num_timesteps=False)
        trained.append(tensors_of(each))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    loaded.save(tmp_path / "again.zip")
    type(agent).load(tmp_path / "again.zip", env=env)


def test_changed_layers_and_another_make(tmp_path: Path) -> None:
    agent = AGENTS["SAC"]()
    agent.learn(48, callback=PliantCallback(rebuild_layers))
    agent.save(tmp_path / "agent.zip")
    loaded = type(agent).load(tmp_path / "agent.zip", env=gymnasium.make("Pendulum-v1"))
    with pytest.raises(
        ValueError, match="make: it changes the layers of the agent in another way than in the saved agent"
    ):
        loaded.learn(8, callback=PliantCallback(lambda network, example: [pliant.LayerNormInsertion(network, example)]))
    loaded.learn(32, callback=PliantCallback(lambda network: [pliant.L2(network)]))  # the layers stay
    assert any(isinstance(module, nn.LayerNorm) for module in loaded.policy.modules())


def test_reinitializers_take_their_times_from_the_callback() -> None:
    with pytest.raises(ValueError, match=r"make: fire has steps of its own.* pass at= to the callback"):
        AGENTS["DQN"]().learn(8, callback=PliantCallback(lambda network: [pliant.FIRE(network, every=10)]))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_actors_pass_through_the_critic_is_not_watched(name: str) -> None:
    """Units are scored on the critic's own passes alone, and nothing is frozen outside of training."""
    agent = AGENTS[name]()
    seen: list[tuple[bool, int]] = []

    class Counting(pliant.ReDo):
        def _add_activity(self, name: str, values: torch.Tensor, dim: int) -> None:
            seen.append((values.requires_grad, len(values)))
            super()._add_activity(name, values, dim)

    def make(network: nn.Module, example: Any) -> list[pliant.Method]:
        return [Counting(network, example, every=1)] if isinstance(network, nn.Sequential) else []

    callback = PliantCallback(make)
    agent.learn(80, callback=callback)
    updates = sum(callback.methods["critic.0/redo"].steps)
    critics, layers = len(NETWORKS[name]) - 1, 2
    assert len(seen) == updates * critics * layers
    assert all(p.requires_grad for p in agent.policy.critic.parameters())


def test_temperature_is_reset_if_asked() -> None:
    temperatures = {}
    for reset in (False, True):
        agent = AGENTS["SAC"](ent_coef="auto_0.5")

        class Look(BaseCallback):
            def _on_rollout_start(self, reset: bool = reset) -> None:
                if self.model.num_timesteps == 60:
                    model: Any = self.model
                    temperatures[reset] = (float(model.log_ent_coef.exp()), len(model.ent_coef_optimizer.state))

            def _on_step(self) -> bool:
                return True

        callback = PliantCallback(lambda network: [pliant.FIRE(network)], at=[60], reset_temperature=reset)
        agent.learn(80, callback=[callback, Look()])
    assert temperatures[True] == (0.5, 0)
    assert temperatures[False][0] != 0.5


def test_full_reset_draws_as_stable_baselines3_builds_a_policy() -> None:
    agent = PPO("MlpPolicy", "Pendulum-v1", n_steps=32, batch_size=16, n_epochs=1, seed=0, device="cpu")
    callback = PliantCallback(lambda network: [pliant.FullReset(network, seed=0)], at=[32])

    class Look(BaseCallback):
        def _on_rollout_start(self) -> None:
            if self.model.num_timesteps == 32:
                weight = self.model.policy.action_net.weight
                torch.testing.assert_close(weight @ weight.T, 0.01**2 * torch.eye(1))  # an orthogonal draw
                weight = self.model.policy.mlp_extractor.policy_net[2].weight
                torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(64), atol=1e-4, rtol=0)
                assert not self.model.policy.log_std.any()

        def _on_step(self) -> bool:
            return True

    agent.learn(64, callback=[callback, Look()])
    assert callback.receipts


def test_a_trained_extractor_of_the_critic_is_a_network_of_its_own() -> None:
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Extractor(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 8)
            self.layer = nn.Linear(space.shape[0], 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x))

    kwargs = {"net_arch": [16], "features_extractor_class": Extractor}
    agent = AGENTS["SAC"](policy_kwargs=kwargs)
    callback = PliantCallback(lambda network: [pliant.FIRE(network)], at=[40], measure_every=32)
    agent.learn(64, callback=callback)
    assert list(callback.methods) == ["actor/fire", "critic.features/fire", "critic.0/fire", "critic.1/fire"]


@pytest.mark.parametrize("at", [-1, 1.0, 0.0, "10", [5, True]])
def test_times_out_of_range(at: Any) -> None:
    with pytest.raises(ValueError, match=r"at: .*environment steps from 0 on, or fractions of the run between 0 and 1"):
        PliantCallback(lambda network: [], at=at)


def test_make_must_return_methods() -> None:
    with pytest.raises(TypeError, match=r"make: it must return methods"):
        AGENTS["DQN"]().learn(8, callback=PliantCallback(lambda network: network))


def test_another_callback_takes_the_place_of_the_first() -> None:
    agent = AGENTS["SAC"]()
    first = PliantCallback(lambda network: [pliant.L2Init(network)])
    agent.learn(32, callback=first)
    second = PliantCallback(lambda network: [pliant.L2Init(network)])
    agent.learn(32, callback=second, reset_num_timesteps=False)
    one, other = first.methods["actor/l2_init"], second.methods["actor/l2_init"]
    assert sum(other.steps) > sum(one.steps)  # it continues the count
