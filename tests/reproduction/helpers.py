"""Results made by hand, for what is said of results."""

from benchmarks.reproduction.kept import Kept


def make_kept(numbers: dict[str, dict[int, dict[str, float]]], headline: str = "x", bad: int = 0) -> Kept:
    return Kept(headline, {}, list(numbers), numbers, {label: [bad] for label in numbers}, dict.fromkeys(numbers, 0))
