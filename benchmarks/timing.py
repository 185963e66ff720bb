"""Timing on a noisy machine: contestants take turns and are compared within each round."""

import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType


def _nothing() -> None:
    pass


def rounds_of(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 5,
    prepare: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Return each contestant's processor seconds in every round; each is called once per round.

    Processor time does not include waiting for other processes.

    Args:
        contestants: What to time, by name.
        rounds: Timed rounds.
        warmup: Rounds before them, not timed.
        prepare: What to call before a contestant in every round, not timed.
    """
    for _ in range(warmup):
        for name, run in contestants.items():
            prepare.get(name, _nothing)()
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for _ in range(rounds):
        order.append(order.pop(0))  # Vary which contestant ran before, since it leaves its data in the cache.
        for name in order:
            prepare.get(name, _nothing)()
            start = time.process_time()
            contestants[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def in_a_row(step: Callable[[], object], steps: int = 4) -> Callable[[], None]:
    """Return a turn of several steps, as a training loop makes them.

    After the turn of another network, the first step finds neither its weights nor its instructions in the cache.
    """

    def turn() -> None:
        for _ in range(steps):
            step()

    return turn


def medians(
    contestants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 5,
    prepare: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> dict[str, float]:
    """Return each contestant's median seconds per call."""
    seconds = rounds_of(contestants, rounds, warmup, prepare)
    return {name: statistics.median(values) for name, values in seconds.items()}


def added(contestants: Mapping[str, Callable[[], object]], *, base: str, rounds: int) -> dict[str, float]:
    """Return the extra time of each contestant as a fraction of the base: the median over rounds."""
    seconds = rounds_of(contestants, rounds)
    middle = statistics.median(seconds[base])
    return {
        name: statistics.median(x - y for x, y in zip(values, seconds[base], strict=True)) / middle
        for name, values in seconds.items()
        if name != base
    }


def over_builds(measure: Callable[[], Mapping[str, float]], builds: int = 9) -> dict[str, float]:
    """Return the medians of a measurement that rebuilds its contestants each time.

    The memory layout of a network changes the time of a small step by several percent until it is rebuilt.
    """
    found = [measure() for _ in range(builds)]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def row(what: str, ratio: float, limit: str) -> None:
    """Print one line of a table of ratios."""
    print(f"{what:<78} {ratio:8.3f}   {limit}")
