"""Networks that Stable-Baselines3 does not have: they compute what their papers say, and methods act on all of them."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import pliant
from pliant.integrations.stable_baselines3 import PliantCallback
from pliant.methods import ShrinkPerturb, create
from pliant.rl.agents import make_agent
from pliant.rl.policies import MinAtarCNN, RunningNorm, make_layer_norm_mlp, make_simba

SMALL = {"learning_starts": 20, "train_freq": 1, "batch_size": 16, "buffer_size": 200}


class Squares(gymnasium.Env):  # type: ignore[misc]
    """Images in the form of MinAtar's: 6×6 Booleans, whose last dimension is the two channels."""

    observation_space = spaces.Box(0, 1, (6, 6, 2), bool)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._draw(), float(action == 1), bool(self.np_random.random() < 0.2), False, {}

    def _draw(self) -> Any:
        return self.np_random.random((6, 6, 2)) < 0.5


def build(policy: str, **options: Any) -> Any:
    if policy == "MinAtarPolicy":
        return make_agent("dqn", {**SMALL, "policy": policy, **options}, Squares(), 0)
    arch: Any = {"pi": [8], "qf": [16, 16]} if policy == "SimBaPolicy" else [16, 16]
    given = {**SMALL, "policy": policy, "policy_kwargs": {"net_arch": arch}, **options}
    return make_agent("sac", given, gymnasium.make("Pendulum-v1"), 0)


NETWORKS = {
    "LayerNormPolicy": ["actor", "critic.0", "critic.1"],
    "SimBaPolicy": ["actor", "critic.0", "critic.1"],
    "MinAtarPolicy": ["q_net"],
}


def norm(x: Tensor) -> Tensor:
    centered = x - x.mean(1, keepdim=True)
    return centered / (centered.square().mean(1, keepdim=True) + 1e-5).sqrt()


def test_simba_is_the_network_of_its_paper() -> None:
    network = make_simba(3, 2, [4, 4]).double()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter))
    named = dict(network.named_parameters())

    def affine(x: Tensor, name: str) -> Tensor:
        weight, bias = named[f"{name}.weight"], named[f"{name}.bias"]
        return x * weight + bias if weight.ndim == 1 else x @ weight.T + bias

    inputs = torch.randn(5, 3, dtype=torch.float64)
    x = affine(inputs, "0")
    for block in ("1", "2"):
        hidden = affine(affine(norm(x), f"{block}.norm"), f"{block}.up").clamp(min=0)
        x = x + affine(hidden, f"{block}.down")
    torch.testing.assert_close(network(inputs), affine(affine(norm(x), "3"), "4"), rtol=1e-10, atol=1e-12)
    assert named["1.up.weight"].shape == (16, 4)
    head = named["4.weight"]
    torch.testing.assert_close(head @ head.T, torch.eye(2, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"net_arch: \[4, 8\]; SimBa's blocks have one width"):
        make_simba(3, 1, [4, 8])


def test_layer_norm_follows_each_linear_layer_but_the_last() -> None:
    agent = build("LayerNormPolicy", policy_kwargs={"net_arch": [8, 4], "n_critics": 1, "activation_fn": "Tanh"})
    assert [type(layer).__name__ for layer in agent.actor.latent_pi] == ["Linear", "LayerNorm", "Tanh"] * 2
    (critic,) = agent.critic.q_networks
    assert [type(layer).__name__ for layer in critic] == [*["Linear", "LayerNorm", "Tanh"] * 2, "Linear"]
    assert critic[0].in_features == 4, "three observations and an action"
    assert agent.critic.qf0 is critic
    trained = {id(p) for group in agent.critic.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in critic.parameters()}
    inputs = torch.randn(5, 4)
    assert torch.equal(agent.critic_target.q_networks[0](inputs), critic(inputs))
    first = make_layer_norm_mlp(3, -1, [6])
    torch.testing.assert_close(first(inputs[:, :3]), norm(first[0](inputs[:, :3])).relu(), rtol=1e-5, atol=1e-6)


def test_the_policies_have_the_papers_sizes() -> None:
    agent = make_agent("sac", {"policy": "SimBaPolicy"}, gymnasium.make("Pendulum-v1"), 0)
    widths = [(network[0].out_features, len(network) - 3) for network in agent.critic.q_networks]
    assert widths == [(512, 2)] * 2
    assert agent.actor.latent_pi[0].out_features == 128
    assert agent.actor.mu.in_features == 128
    extractor = MinAtarCNN(spaces.Box(0, 1, (10, 10, 4), bool))
    assert [tuple(p.shape) for p in extractor.parameters()] == [(16, 4, 3, 3), (16,), (128, 1024), (128,)]


def test_observations_are_normalized_by_what_was_seen() -> None:
    layer = RunningNorm(spaces.Box(-np.inf, np.inf, (3,), np.float32))
    batches = [torch.randn(size, 3) * 5 + 2 for size in (4, 10, 1)]
    for batch in batches:
        layer(batch)
    seen = torch.cat(batches)
    torch.testing.assert_close(layer.running_mean, seen.mean(0))
    torch.testing.assert_close(layer.running_var, seen.var(0, correction=0))
    with torch.no_grad():
        normalized = layer(seen)
    layer.eval()
    assert torch.equal(layer(seen), normalized)
    assert layer.running_count == 15
    torch.testing.assert_close(normalized.mean(0), torch.zeros(3), rtol=0, atol=1e-5)


def test_the_target_normalizes_as_the_critic_does() -> None:
    agent = build("SimBaPolicy")
    agent.learn(30)
    statistics = agent.critic.features_extractor
    assert statistics.running_count > 0
    assert torch.equal(agent.critic_target.features_extractor.running_mean, statistics.running_mean)
    before = statistics.running_mean.clone()
    agent.predict(np.full((1, 3), 1e3, dtype=np.float32))
    assert torch.equal(statistics.running_mean, before)


@pytest.mark.parametrize("policy", NETWORKS)
def test_methods_and_measures_work_on_each_network(policy: str) -> None:
    agent = build(policy)

    def make(network: nn.Module, example: Any) -> list[Any]:
        made = [create(name, network, example=example) for name in ("fire", "l2_init", "spectral")]
        return [*made, create("redo", network, example=example, every=7)]

    monitors: list[pliant.Monitor] = []
    callback = PliantCallback(make, at=[30], measures=("weight_l2", "dormant_fraction", "feature_rank"))
    agent.learn(40, callback=callback)
    assert [network.name for network in callback.networks] == NETWORKS[policy]
    assert len(callback.receipts) == len(NETWORKS[policy])
    for network, (_, receipt) in zip(callback.networks, callback.receipts, strict=True):
        weights = [m for m in network.module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        assert receipt.tensors == len(weights), "FIRE acts on each linear and convolution layer"
    measured = callback.measure()
    assert len(measured) == 3 * len(NETWORKS[policy])
    assert len({measured[f"{name}/weight_l2"] for name in NETWORKS[policy]}) == len(NETWORKS[policy])
    for network in callback.networks:
        monitor = pliant.Monitor(
            network.module,
            network.optimizer,
            every=1,
            measures=["dormant_fraction"],
            probe=network.example,
            budget=None,
        )
        found = pliant.diagnose(network.module, network.example, measures=["weight_l2", "dormant_fraction"])
        assert found.signs.values["weight_l2"] == pytest.approx(measured[f"{network.name}/weight_l2"])
        monitors.append(monitor)
    agent.train(2, batch_size=4)
    assert all("dormant_fraction" in monitor.records[-1].values for monitor in monitors)


@pytest.mark.parametrize("policy", NETWORKS)
def test_a_reset_to_the_initial_weights_is_exact(policy: str) -> None:
    agent = build(policy)
    callback = PliantCallback(lambda network: [ShrinkPerturb(network, lam=1.0)])
    callback.init_callback(agent)
    initial = [[p.clone() for p in network.module.parameters()] for network in callback.networks]
    agent.learn(40, callback=callback)
    assert not torch.equal(initial[0][0], next(callback.networks[0].module.parameters()))
    callback.on_new_data()
    for network, values in zip(callback.networks, initial, strict=True):
        for parameter, value in zip(network.module.parameters(), values, strict=True):
            assert torch.equal(parameter, value)
        if network.target is not None:
            for parameter, value in zip(network.target.parameters(), values, strict=True):
                assert torch.equal(parameter, value)


def test_a_full_reset_draws_as_the_policy_does() -> None:
    agent = build("SimBaPolicy")
    callback = PliantCallback(lambda network: [create("full_reset", network, seed=0)], at=[20])
    agent.learn(20, callback=callback)
    callback.on_new_data()
    for critic in agent.critic.q_networks:
        head = critic[-1].weight
        torch.testing.assert_close(head @ head.T, torch.eye(1), rtol=1e-5, atol=1e-6)
        assert not critic[1].up.bias.any()


def test_an_agent_is_saved_and_loaded(tmp_path: Any) -> None:
    for policy in NETWORKS:
        agent = build(policy)
        agent.learn(30)
        agent.save(tmp_path / "agent.zip")
        loaded = type(agent).load(tmp_path / "agent.zip", device="cpu")
        for name, value in agent.policy.state_dict().items():
            assert torch.equal(loaded.policy.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "SimbaPolicy"}, "policy is 'SimbaPolicy'; did you mean 'SimBaPolicy'"),
        (
            {"policy_kwargs": {"optimizer_class": "AdamV"}},
            "policy_kwargs.optimizer_class is 'AdamV'; it must be the name",
        ),
    ],
)
def test_wrong_names_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_agent("sac", options, gymnasium.make("Pendulum-v1"), 0)


def test_the_policy_for_images_refuses_vectors() -> None:
    with pytest.raises(ValueError, match=r"MinAtarPolicy needs images \[height, width, channels\], got"):
        make_agent("dqn", {"policy": "MinAtarPolicy"}, gymnasium.make("CartPole-v1"), 0)
