"""
Reset a SAC agent in the style of CleanRL
=========================================

Reset actor, critics and temperature of a SAC loop in the style of CleanRL: lines marked with ``# Pliant``.

One file, one loop, no framework: ``python examples/sac_reset.py --steps 5000``. The loop is ours; its parts stand in
the same order as in CleanRL's ``sac_continuous_action.py``, so that the lines go to the same places there.
"""

import argparse
import copy
import random
from collections import deque

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pliant


def mlp(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def act(actor: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
    """Draw actions in [−1, 1], and return them with the logarithm of their density."""
    mean, log_std = actor(states).chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    drawn = normal.rsample()
    action = drawn.tanh()
    return action, (normal.log_prob(drawn) - (1 - action**2 + 1e-6).log()).sum(1, keepdim=True)


def train(steps: int = 5_000, reset_every: int = 2_000, seed: int = 0) -> list[float]:
    """Return the return of each episode."""
    random.seed(seed)
    torch.manual_seed(seed)
    env = gymnasium.make("Pendulum-v1")
    states, actions = env.observation_space.shape[0], env.action_space.shape[0]
    scale = float(env.action_space.high[0])
    actor, critics = mlp(states, 2 * actions), nn.ModuleList(mlp(states + actions, 1) for _ in range(2))
    targets = copy.deepcopy(critics)
    log_alpha = torch.zeros(1, requires_grad=True)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=1e-3)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
    resets = [pliant.FullReset(network) for network in (actor, *critics)]  # Pliant
    buffer: deque[tuple[np.ndarray, np.ndarray, float, np.ndarray]] = deque(maxlen=50_000)
    returns, total = [], 0.0
    state, _ = env.reset(seed=seed)
    for step in range(steps):
        with torch.no_grad():
            action = act(actor, torch.as_tensor(state)[None])[0][0].numpy()
        following, reward, _, truncated, _ = env.step(scale * action)
        buffer.append((state, action, float(reward), following))
        state, total = following, total + float(reward)
        if truncated:
            returns.append(total)
            state, total = env.reset()[0], 0.0

        if step >= 200:
            s, a, r, s2 = (torch.as_tensor(np.array(x)).float() for x in zip(*random.sample(buffer, 64), strict=True))
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                a2, density = act(actor, s2)
                least = torch.cat([target(torch.cat([s2, a2], 1)) for target in targets], 1).min(1, keepdim=True).values
                goal = r[:, None] + 0.99 * (least - alpha * density)
            critic_optimizer.zero_grad()
            torch.stack([mse_loss(critic(torch.cat([s, a], 1)), goal) for critic in critics]).sum().backward()
            critic_optimizer.step()

            critics.requires_grad_(False)  # methods that watch activations must not count the actor's pass
            drawn, density = act(actor, s)
            value = torch.cat([critic(torch.cat([s, drawn], 1)) for critic in critics], 1).min(1, keepdim=True).values
            actor_optimizer.zero_grad()
            (alpha * density - value).mean().backward()
            actor_optimizer.step()
            critics.requires_grad_(True)

            alpha_optimizer.zero_grad()
            (-log_alpha.exp() * (density.detach() - actions)).mean().backward()
            alpha_optimizer.step()
            with torch.no_grad():
                for ours, slow in zip(critics.parameters(), targets.parameters(), strict=True):
                    slow.lerp_(ours, 0.005)
        if step and step % reset_every == 0:
            resets[0].apply(actor_optimizer)  # Pliant
            for reset, critic, target in zip(resets[1:], critics, targets, strict=True):  # Pliant
                reset.apply(critic_optimizer, targets=[(critic, target)])  # Pliant
            log_alpha.data.zero_()  # Pliant: the temperature starts again with the networks
            alpha_optimizer.state.clear()  # Pliant
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--reset-every", type=int, default=2_000)
    chosen = parser.parse_args()
    found = train(chosen.steps, chosen.reset_every)
    print(f"{len(found)} episodes, mean return of the last 5: {np.mean(found[-5:]):.1f}")
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(found, marker=".")
    axes.set(xlabel="episode", ylabel="return")
