"""The papers' statements held against runs that are kept in this repository.

`claims/` has the statements, `../results/reproduction/` the runs. `python -m benchmarks.reproduction` writes every
number and verdict in docs/results.md, in the tables of the method cards and in the list of recipes, and draws the
figures; a test makes sure that the pages are what it writes. `python -m benchmarks.reproduction.pages` makes a report
of each kept experiment.
"""
