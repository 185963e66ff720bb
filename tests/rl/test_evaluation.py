"""Greedy evaluation: returns, and overestimation by its definition."""

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import DQN, SAC

from pliant.rl.atari import ClippedReward
from pliant.rl.evaluation import evaluate, overestimate


@pytest.mark.parametrize("last", [0.0, 3.0])
def test_overestimation_is_the_value_minus_the_discounted_return(last: float) -> None:
    random = np.random.default_rng(0)
    values, rewards, gamma = random.normal(size=20), random.normal(size=20).tolist(), 0.9
    slow = [
        values[t] - sum(gamma ** (k - t) * rewards[k] for k in range(t, 20)) - gamma ** (20 - t) * last
        for t in range(20)
    ]
    np.testing.assert_allclose(overestimate(values, rewards, gamma, last), slow)


def test_an_evaluation_plays_greedily_and_draws_nothing() -> None:
    agent = DQN("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), agent.action_space.np_random.bit_generator.state
    found = evaluate(agent, [gymnasium.make("CartPole-v1") for _ in range(2)], [11, 12])
    after = torch.get_rng_state(), np.random.get_state()[1], agent.action_space.np_random.bit_generator.state
    assert before[0].equal(after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]
    returns, errors = [], []
    for seed in (11, 12):
        env = gymnasium.make("CartPole-v1")
        observation, ended, values, rewards = env.reset(seed=seed)[0], False, [], []
        while not ended:
            q = agent.q_net(torch.as_tensor(observation)[None])[0]
            observation, reward, terminated, truncated, _ = env.step(int(q.argmax()))
            values.append(float(q.max().detach()))
            rewards.append(reward)
            ended = terminated or truncated
        returns.append(sum(rewards))
        errors += [v - sum(0.99**k * r for k, r in enumerate(rewards[t:])) for t, v in enumerate(values)]
    assert found.returns == tuple(returns)
    assert found.overestimation == pytest.approx(np.mean(errors), rel=1e-5)


def test_a_truncated_episode_continues_with_the_value_of_its_last_observation() -> None:
    agent = SAC("MlpPolicy", "Pendulum-v1", seed=0, device="cpu", policy_kwargs={"net_arch": [8]})
    with torch.no_grad():
        for critic in agent.critic.q_networks:
            for parameter in critic.parameters():
                parameter.zero_()
            critic[-1].bias.fill_(5.0)
    env = gymnasium.make("Pendulum-v1", max_episode_steps=3)
    env.reset(seed=4)
    found = evaluate(agent, [env], [4])
    again = gymnasium.make("Pendulum-v1", max_episode_steps=3)
    observation, rewards = again.reset(seed=4)[0], []
    for _ in range(3):
        observation, reward, *_ = again.step(agent.predict(observation, deterministic=True)[0])
        rewards.append(float(reward))
    expected = [5 - sum(0.99**k * r for k, r in enumerate(rewards[t:])) - 0.99 ** (3 - t) * 5 for t in range(3)]
    assert found.overestimation == pytest.approx(np.mean(expected), rel=1e-5)


def test_returns_are_scores_where_the_agent_sees_clipped_rewards() -> None:
    agent = DQN("MlpPolicy", "CartPole-v1", seed=0, device="cpu")
    plain = gymnasium.make("CartPole-v1")
    fives = gymnasium.wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 5 * reward)
    expected, found = evaluate(agent, [plain], [3]), evaluate(agent, [ClippedReward(fives)], [3])
    assert found.returns == (5 * expected.returns[0],)
    assert found.overestimation == expected.overestimation
