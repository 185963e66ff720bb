"""Reinforcement learning: agents of Stable-Baselines3 in streams of environments, as runs that can be resumed.

`pliant.integrations.stable_baselines3` attaches methods to an agent; this package runs experiments with them.
"""
