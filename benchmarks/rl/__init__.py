"""Experiments with reinforcement learning, each a script that continues where it stopped."""
