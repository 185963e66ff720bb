"""What is measured and kept: speed, and what became of the papers' statements.

Speed, as ratios inside one run (absolute times on a shared machine mean nothing): `python -m benchmarks`, outputs in
`results/*.txt`. The papers: `reproduction/`.
"""
