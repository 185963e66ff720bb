"""
An agent that learns again
==========================

A DQN of Stable-Baselines3 makes 10 000 updates on its first 200 transitions of CartPole. Without treatment it
soon stops improving. After FIRE, which a callback applies, it begins lower and continues to learn. This page shows
one seed; `Frameworks <../howto-frameworks.html>`__ has the mean of ten.
"""

import copy
import tempfile

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
from stable_baselines3 import DQN
from stable_baselines3.common.monitor import Monitor

import pliant
from pliant.integrations.stable_baselines3 import PliantCallback

STEPS = 4_000


# %%
# Prime an agent: collect 200 transitions, then learn from them much too often.
agent = DQN(
    "MlpPolicy", "CartPole-v1", learning_rate=1e-3, buffer_size=5_000, learning_starts=200, batch_size=64, train_freq=2,
    target_update_interval=200, exploration_fraction=0.1, exploration_final_eps=0.05,
    policy_kwargs={"net_arch": [64, 64], "optimizer_kwargs": {"fused": True}}, seed=2, device="cpu",
)  # fmt: skip
agent.learn(200)
for _ in range(100):
    agent.train(gradient_steps=100, batch_size=64)
    agent.q_net_target.load_state_dict(agent.q_net.state_dict())
path = tempfile.mkdtemp() + "/primed.zip"
agent.save(path)


# %%
# Go on, as it is or after FIRE. The callback also copies the renewed network into the target network.
def learn(with_method: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which episodes end, and their returns."""
    env = Monitor(gymnasium.make("CartPole-v1"))
    again = DQN.load(path, env=env, device="cpu")
    again.replay_buffer = copy.deepcopy(agent.replay_buffer)
    fire = PliantCallback(lambda network: [pliant.FIRE(network, optimizer_state="reset")], at=[0])
    again.learn(STEPS, callback=fire if with_method else None)
    return np.cumsum(env.get_episode_lengths()), np.array(env.get_episode_rewards())


figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
late = {}
for name, with_method in (("as it is", False), ("after FIRE", True)):
    steps, returns = learn(with_method)
    late[name] = round(float(returns[steps > STEPS / 2].mean()), 1)
    axes.plot(steps, [returns[max(0, i - 9) : i + 1].mean() for i in range(len(returns))], label=name)
axes.set(xlabel="environment steps", ylabel="return, mean of ten episodes")
axes.legend()
print("mean return of the second half:", late)
