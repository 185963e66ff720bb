"""Atari games as agents see them: the frames of Mnih et al. 2015, by the wrappers of Stable-Baselines3.

Random no-operations at the start, each action four times, gray frames of 84×84, the last four as channels, rewards
clipped to their signs. A lost life does not end the episode (Machado et al. 2018): each episode begins with a reset of
the game, from which a resumed run can continue.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.atari_wrappers import AtariWrapper

from pliant._importing import naming_extra

ATARI_OPTIONS = {"frameskip": 1, "repeat_action_probability": 0.0, "max_episode_steps": 108_000}
"""Options of a game before its frames are prepared; an episode has at most 108 000 frames, half an hour of play."""
FRAMES = 4


class ClippedReward(gymnasium.Wrapper):  # type: ignore[misc]
    """Gives the agent the sign of each reward; `info["score"]` holds the reward."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(np.sign(reward)), terminated, truncated, {**info, "score": float(reward)}


def preprocess_atari(env: gymnasium.Env) -> gymnasium.Env:
    """Wrap a game of the Arcade Learning Environment.

    Args:
        env: The game, made with `ATARI_OPTIONS`.

    Raises:
        ValueError: If it is not such a game.
        ImportError: If OpenCV is not installed.
    """
    if not hasattr(env.unwrapped, "ale"):
        raise ValueError(f"preprocessing is 'atari', but {env} is not a game of ALE; leave it out")
    with naming_extra("preprocessing of Atari games", "atari"):
        import cv2  # noqa: F401
    frames = AtariWrapper(env, terminal_on_life_loss=False, clip_reward=False)
    height, width, _ = frames.observation_space.shape
    flat = gymnasium.wrappers.TransformObservation(
        ClippedReward(frames), lambda frame: frame[..., 0], spaces.Box(0, 255, (height, width), np.uint8)
    )
    return gymnasium.wrappers.FrameStackObservation(flat, FRAMES)
