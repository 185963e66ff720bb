"""Every method on every stream that all methods ran: `python -m benchmarks.leaderboard METHOD` adds a method.

A stream is one kept file with plain training, fresh networks and the methods at one or more settings. Each seed is
scored with the setting that is best on the other seeds, so no setting is judged by the runs that chose it. A method's
score on a stream is the share of the gap between plain training and fresh networks that it closes; its rank is by the
mean score. `python -m benchmarks.reproduction` writes the table into docs/leaderboard.md.
"""

import argparse
import random
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks import defaults
from benchmarks.reproduction.markdown import link, write_table
from pliant.experiments.archive import pack, unpack
from pliant.experiments.recipe import make_recipe
from pliant.experiments.store import Run, load_recipe_values, load_runs
from pliant.methods import info, names

RESULTS = Path(__file__).parent / "results"
STREAMS = {
    "random labels, digits": "defaults/random_labels-0",
    "warm start, digits": "defaults/warm_start-0",
    "permuted pixels, digits": "defaults/pixel_permutation-0",
    "random labels, MNIST": "reproduction/methods_effect",
    "permuted text": "reproduction/ours_language_permuted_vocabulary",
}
"""The file of each stream; a line more adds a stream, which counts once its file is kept."""
BESIDE = {
    "permuted text, one setting each": "reproduction/ours_language_core",
    "ten tasks of an agent (DQN)": "reproduction/ours_rl_task_sequence",
}
"""Streams that are listed below the table and rank nobody: few methods ran on them, or they were not tuned alike."""
RESAMPLES = 1000
SEEDS = 4
"""The seeds that a setting must have, or those of plain training if they are fewer; its others need not be complete."""
PLAIN, FRESH = "vanilla", "fresh"
Scores = dict[str, dict[int, float]]
"""The headline of each method by seed; losses are negated, so that more is better."""


@dataclass(frozen=True)
class Standing:
    """A method's place on the streams.

    Args:
        method: Its name.
        shares: The share of the gap that it closes, by stream.
        rank: Its mean rank over the streams.
        low: Lower end of the rank's 95 % interval.
        high: Upper end.
    """

    method: str
    shares: dict[str, float]
    rank: float
    low: float
    high: float


def choose_held_out(settings: dict[str, dict[int, float]]) -> dict[int, float]:
    """Score each seed with the setting that is best on the other seeds.

    Args:
        settings: The headline by setting and seed.

    Example:
        >>> choose_held_out({"weak": {0: 0.9, 1: 0.1, 2: 0.2}, "strong": {0: 0.5, 1: 0.5, 2: 0.5}})
        {0: 0.5, 1: 0.1, 2: 0.2}
    """
    seeds = set.intersection(*(set(values) for values in settings.values()))
    chosen = {}
    for seed in sorted(seeds):
        others = sorted(seeds - {seed}) or [seed]
        best = max(settings, key=lambda setting: fmean(settings[setting][other] for other in others))
        chosen[seed] = settings[best][seed]
    return chosen


def read_scores(runs: list[Run], headline: str) -> Scores:
    """Return the headline of each method by seed; settings with a diverged run or too few seeds are left out."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    diverged = set()
    for run in runs:
        parts = run.config.methods
        if run.config.purpose != "result" or len(parts) > 1:
            continue
        if not parts and not run.config.fresh and run.config.label != PLAIN:
            continue  # a control, such as the optimizer's own weight decay
        method = parts[0].name if parts else FRESH if run.config.fresh else PLAIN
        if run.status != "finished":
            diverged.add((method, run.config.label))
            continue
        sign = -1 if headline.endswith("loss") else 1
        found[method][run.config.label][run.config.seed] = sign * run.result[headline]
    enough = min(SEEDS, len(found[PLAIN][PLAIN]))
    complete = {
        method: {label: v for label, v in settings.items() if len(v) >= enough and (method, label) not in diverged}
        for method, settings in found.items()
    }
    return {method: choose_held_out(settings) for method, settings in complete.items() if settings}


def kept_streams(streams: dict[str, str] = STREAMS) -> dict[str, str]:
    """Return the streams whose files are kept."""
    return {stream: file for stream, file in streams.items() if (RESULTS / f"{file}.jsonl.gz").exists()}


@cache
def load_stream(file: str) -> Scores:
    """Read the scores of a kept file."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "stream"
        unpack(RESULTS / f"{file}.jsonl.gz", root)
        return read_scores(load_runs(root), make_recipe(load_recipe_values(root)).deciding)


def share(scores: Scores, method: str, seeds: list[int]) -> float:
    """Return the share of the gap between plain training and fresh networks that a method closes on some seeds."""
    plain, fresh, own = (fmean(scores[one][seed] for seed in seeds) for one in (PLAIN, FRESH, method))
    return (own - plain) / (fresh - plain)


def rank(values: dict[str, float]) -> dict[str, float]:
    """Rank methods from the highest value on; equal values share the mean of their ranks.

    Example:
        >>> rank({"a": 0.5, "b": 0.9, "c": 0.5})
        {'a': 2.5, 'b': 1.0, 'c': 2.5}
    """
    return {
        one: 1 + sum(other > value for other in values.values()) + (list(values.values()).count(value) - 1) / 2
        for one, value in values.items()
    }


def stand(streams: dict[str, Scores]) -> list[Standing]:
    """Rank the methods that all streams have, best first, with bootstrap intervals over seeds."""
    methods = sorted(set.intersection(*(set(scores) for scores in streams.values())) - {PLAIN, FRESH})
    seeds = {
        stream: sorted(set.intersection(*(set(scores[one]) for one in (PLAIN, FRESH, *methods))))
        for stream, scores in streams.items()
    }

    def mean_ranks(drawn: dict[str, list[int]]) -> dict[str, float]:
        ranks = [rank({one: fmean(streams[s][one][seed] for seed in drawn[s]) for one in methods}) for s in streams]
        return {one: fmean(each[one] for each in ranks) for one in methods}

    source = random.Random(0)
    samples = [
        mean_ranks({s: source.choices(known, k=len(known)) for s, known in seeds.items()}) for _ in range(RESAMPLES)
    ]
    means = mean_ranks(seeds)
    standings = []
    for one in methods:
        ordered = sorted(sample[one] for sample in samples)
        shares = {stream: share(scores, one, seeds[stream]) for stream, scores in streams.items()}
        standings.append(Standing(one, shares, means[one], ordered[RESAMPLES // 40], ordered[-RESAMPLES // 40 - 1]))
    return sorted(standings, key=lambda standing: standing.rank)


def leaderboard_block(_: str) -> str:
    """Make the table of methods that ran on all streams, and list those that did not yet."""
    streams = {stream: load_stream(file) for stream, file in kept_streams().items()}
    standings = stand(streams)
    rows = [["method", "mean rank (95 % interval)", *streams, "told"]]
    for place, one in enumerate(standings, start=1):
        cells = [f"{value:.2f}" for value in one.shares.values()]
        told = "yes" if info(one.method).needs_telling else ""
        name = link(f"`{one.method}`", f"methods/{one.method}.md")
        rows.append([f"{place}. {name}", f"{one.rank:.1f} ({one.low:.1f}–{one.high:.1f})", *cells, told])
    ranked = {one.method for one in standings}
    lines = [write_table(rows)]
    beside = {stream: load_stream(file) for stream, file in kept_streams(BESIDE).items()}
    for stream, scores in {**streams, **beside}.items():
        seeds = sorted(scores[PLAIN].keys() & scores[FRESH].keys())
        if fmean(scores[PLAIN][seed] for seed in seeds) >= fmean(scores[FRESH][seed] for seed in seeds):
            lines.append(f"On *{stream}*, plain training does not end below a fresh network: there is no gap to close.")
            continue
        shown = scores.keys() - (ranked if stream in streams else set()) - {PLAIN, FRESH}
        rest = {m: share(scores, m, sorted(scores[m])) for m in shown}
        listed = sorted(rest, key=lambda method: -rest[method])
        if listed:
            said = ", ".join(f"`{method}` {rest[method]:.2f}" for method in listed)
            why = "Not on all streams yet, by" if stream in streams else "Not ranked, by"
            lines.append(f"{why} *{stream}* ({len(seeds)} seeds): {said}.")
    return "\n\n".join(lines)


def run_command() -> None:
    """Tune a method on seeds that only choose, judge it on others, and add its runs to the kept files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard", description=__doc__)
    parser.add_argument("method", choices=names(), metavar="METHOD", help="a method of `pliant list methods`")
    method = parser.parse_args().method
    folder = Path("runs/leaderboard")
    kept = sorted((RESULTS / "defaults").glob("*.jsonl.gz"))
    for file in kept:
        place = folder / file.name.removesuffix(".jsonl.gz")
        if not place.exists():
            unpack(file, place)
    defaults.judge(method, folder)
    for file in kept:
        print(file, pack(folder / file.name.removesuffix(".jsonl.gz"), file), "runs")
    print("Now run: python -m benchmarks.reproduction")


if __name__ == "__main__":
    run_command()
