"""Callbacks for training frameworks: one module each, imported on demand.

- `pliant.integrations.transformers`: Hugging Face `Trainer`
- `pliant.integrations.lightning`: Lightning's `Trainer`
- `pliant.integrations.stable_baselines3`: agents of Stable-Baselines3 and sb3-contrib
"""
