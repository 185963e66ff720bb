"""Benchmarks of speed, and reproductions of the papers' statements.

`python -m benchmarks` measures speed as ratios within one run, because absolute times on a shared machine vary; outputs
are kept in `results/*.txt`. The reproductions are in `reproduction/`.
"""
