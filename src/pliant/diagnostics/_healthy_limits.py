"""How far measures get from a fresh network's in healthy networks.

Written by `python -m benchmarks.trial_zoo --write-thresholds`; do not edit.
"""

SEVERE = 4.2
"""The weakest among the strongest signs of the zoo's networks that learn worse, in healthy limits."""

LIMITS = {
    "weight_l2": 2.3,
    "spectral_norm": 3.6,
    "weight_effective_rank": 1.3,
    "feature_rank": 1.8,
    "dormant_fraction": 1.2,
    "attention_entropy": 4.8,
    "gradient_effective_rank": 14.0,
    "hessian_rank": 22.0,
    "sharpness": 270.0,
}
"""How many times worse than a fresh network's each measure gets in 300 healthy networks."""
