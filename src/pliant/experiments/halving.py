"""Successive halving over settings, within a time budget.

Each round gives every surviving setting one more seed and drops the worse half. All runs have their full length: short
runs would favor methods that leave the network as it is, since a network that was reset is behind at first.

The runs of a round are tested on held-out training data, with a seed that no result has. So neither the test data nor
the seeds of the results choose.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant._validation import check_number, check_positive_int
from pliant.experiments.store import load_run
from pliant.training import direction

_FEWEST_ROUNDS = 2


@dataclass(frozen=True)
class Tried:
    """A setting that took part.

    Args:
        label: The setting.
        scores: Its result on held-out data in each round that it was part of; −∞ where a run did not finish.
    """

    label: str
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the rounds."""
        return math.fsum(self.scores) / len(self.scores) if self.scores else -math.inf


def round_sizes(settings: int) -> list[int]:
    """Return the number of settings in each round: all, half of them, and so on down to two.

    A single setting needs no round. There are two rounds at least, so that no setting is chosen by one seed.

    Example:
        >>> round_sizes(11), round_sizes(2), round_sizes(1)
        ([11, 6, 3, 2], [2, 2], [])
    """
    if settings < 2:
        return []
    sizes = [settings]
    while sizes[-1] > 2 or len(sizes) < _FEWEST_ROUNDS:
        sizes.append(max(2, math.ceil(sizes[-1] / 2)))
    return sizes


def seconds_needed(settings: int, seeds: int, run: float, scratch: float, workers: int, *, rounds: int = 0) -> float:
    """Return the time that the rounds and the results take.

    Args:
        settings: The number of settings.
        seeds: The number of seeds of the results.
        run: Seconds of a run that continues.
        scratch: Seconds of a run from scratch.
        workers: The number of runs at a time.
        rounds: The number of rounds that are done.

    Example:
        >>> seconds_needed(2, 5, 1.0, 1.0, 1)  # two rounds of 2 + 2 runs, then 3 · 5
        23.0
    """
    in_rounds = sum((size + 1) * run + scratch for size in round_sizes(settings)[rounds:])
    return (in_rounds + seeds * (2 * run + scratch)) / workers


def fit_settings(available: int, seeds: int, run: float, scratch: float, workers: int, budget: float) -> int:
    """Return the largest number of settings, up to those available, that fits a budget; 0 if not even one fits.

    Example:
        >>> fit_settings(20, 5, 1.0, 1.0, 1, 40.0), fit_settings(20, 5, 1.0, 1.0, 1, 10.0)
        (8, 0)
    """
    fitting = (n for n in range(available, 0, -1) if seconds_needed(n, seeds, run, scratch, workers) <= budget)
    return next(fitting, 0)


def survivors(tried: Sequence[Tried], size: int) -> list[str]:
    """Return the labels of the best settings, best first; ties keep their order.

    Example:
        >>> survivors([Tried("a", (0.5,)), Tried("b", (0.9,)), Tried("c", (-math.inf,))], 2)
        ['b', 'a']
    """
    return [each.label for each in sorted(tried, key=lambda each: -each.mean)[:size]]


def read_scores(root: Path, runs: Sequence[str], headline: str) -> tuple[float, ...]:
    """Return the headline of each run, with the sign of a loss changed; −∞ for a run that did not finish."""
    results = [run.result if run else {} for run in (load_run(root / "runs" / run) for run in runs)]
    return tuple(direction(headline) * each[headline] if headline in each else -math.inf for each in results)


def halve(
    labels: Sequence[str],
    sizes: Sequence[int],
    run_round: Callable[[int, Sequence[str]], None],
    score: Callable[[str, int], tuple[float, ...]],
    may_continue: Callable[[int], bool],
) -> tuple[str, list[Tried]]:
    """Do the rounds and return the winner, and every setting with its scores, best first.

    Args:
        labels: The settings.
        sizes: The number of settings in each round; see `round_sizes`.
        run_round: Does the runs of a round, given its number and its settings.
        score: Returns the scores of a setting, given the number of rounds that it was part of.
        may_continue: Whether there is time for a round, given its number. The first is always done.

    Returns:
        The winner, and all settings, sorted by how long they stayed and then by their mean.
    """
    alive, taken = list(labels), dict.fromkeys(labels, 0)
    for number, size in enumerate(sizes):
        if number and not may_continue(number):
            break
        alive = survivors([Tried(label, score(label, number)) for label in alive], size) if number else alive
        run_round(number, alive)
        taken |= dict.fromkeys(alive, number + 1)
    tried = [Tried(label, score(label, count)) for label, count in taken.items()]
    tried.sort(key=lambda each: (-len(each.scores), -each.mean))
    return tried[0].label, tried


def check_plan(plan: dict[str, Any], most: int) -> dict[str, Any]:
    """Return a plan from a file; raise a ValueError, KeyError or TypeError if its values do not form a plan."""
    counts = [plan["settings"], *plan.get("begun", []), *([] if plan["stopped"] is None else [plan["stopped"]])]
    for count in counts:
        check_positive_int("settings and rounds", count)
    if plan["settings"] > most or len(plan["seconds"]) != 2:
        raise ValueError(f"there are {most} settings")
    for number in (*plan["seconds"], *plan.get("times", {}).values()):
        check_number("seconds", number, above=True)
    return plan


def seconds_of_runs(folder: Path, startup: float) -> list[float]:
    """Return the seconds of each run's last attempt, with its startup. A damaged or forged log does not count."""
    found = []
    for path in filter(Path.is_dir, (folder / "runs").iterdir()):
        seconds = 0.0
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
            run = load_run(path)
            events = run.events if run else []
            seconds = check_number("seconds", next((e["seconds"] for e in reversed(events) if "seconds" in e), 0.0))
        found.append(seconds + startup)
    return found
