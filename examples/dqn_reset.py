"""
Renew a DQN in the style of CleanRL
===================================

Renew the Q-network of a DQN loop in the style of CleanRL: two lines, marked with ``# Pliant``.

One file, one loop, no framework: ``python examples/dqn_reset.py --steps 20000``. The loop is ours. Its parts have
the same order as in CleanRL's ``dqn.py``, so the two lines go to the same places there.
"""

import argparse
import random
from collections import deque

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pliant


def q_network(observations: int, actions: int) -> nn.Module:
    """Return a small network from observations to the values of actions."""
    return nn.Sequential(nn.Linear(observations, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions))


def train(steps: int = 20_000, reset_every: int = 5_000, seed: int = 0) -> list[float]:
    """Return the return of each episode."""
    random.seed(seed)
    torch.manual_seed(seed)
    env = gymnasium.make("CartPole-v1")
    network, target = (q_network(env.observation_space.shape[0], int(env.action_space.n)) for _ in range(2))
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=2.5e-4)
    fire = pliant.FIRE(network, optimizer_state="reset")  # Pliant
    buffer: deque[tuple[np.ndarray, int, float, np.ndarray, bool]] = deque(maxlen=10_000)
    returns, total = [], 0.0
    observation, _ = env.reset(seed=seed)
    for step in range(steps):
        epsilon = max(0.05, 1 - step / (0.5 * steps))
        if random.random() < epsilon:
            action = random.randrange(int(env.action_space.n))
        else:
            with torch.no_grad():
                action = int(network(torch.as_tensor(observation)).argmax())
        following, reward, terminated, truncated, _ = env.step(action)
        buffer.append((observation, action, float(reward), following, terminated))
        observation, total = following, total + float(reward)
        if terminated or truncated:
            returns.append(total)
            observation, total = env.reset()[0], 0.0

        if step > 1_000 and step % 10 == 0:
            batch = random.sample(buffer, 128)
            states, actions, rewards, followings, ends = map(np.array, zip(*batch, strict=True))
            with torch.no_grad():
                best = target(torch.as_tensor(followings)).max(1).values
                goal = torch.as_tensor(rewards).float() + 0.99 * best * ~torch.as_tensor(ends)
            values = network(torch.as_tensor(states)).gather(1, torch.as_tensor(actions)[:, None]).squeeze(1)
            optimizer.zero_grad()
            mse_loss(values, goal).backward()
            optimizer.step()
        if step % 500 == 0:
            target.load_state_dict(network.state_dict())
        if step and step % reset_every == 0:
            fire.apply(optimizer, targets=[(network, target)])  # Pliant
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--reset-every", type=int, default=5_000)
    chosen = parser.parse_args()
    found = train(chosen.steps, chosen.reset_every)
    print(f"{len(found)} episodes, mean return of the last 20: {np.mean(found[-20:]):.1f}")
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(found, marker=".")
    axes.set(xlabel="episode", ylabel="return")
