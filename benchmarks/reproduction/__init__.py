"""Compare the papers' statements with the runs kept in this repository.

The statements are in `claims/`, the runs in `../results/reproduction/`. `python -m benchmarks.reproduction` writes all
numbers and verdicts in docs/results.md and docs/results/, in the leaderboard, in the method cards and in the list of
recipes, and draws the figures. A test checks that the pages are up to date. `python -m benchmarks.reproduction.pages`
makes a report of each kept experiment.
"""
