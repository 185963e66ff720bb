"""Check the trial and the signs on networks whose condition is known, and calibrate the signs by them.

    python -m benchmarks.trial_zoo                     # run what the kept file lacks, then print the tables
    python -m benchmarks.trial_zoo --write-thresholds  # write the limits of healthy networks that `diagnose` reads

The truth is a plain, long learning run, with other held-out examples than the trial's. Each line of
`results/trial_zoo.jsonl` is one trial, one truth or the signs of one network; lines that exist are not made again. The
tables are in `docs/trial.md`.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import pliant
from benchmarks.zoo_networks import ARCHITECTURES, HEALTHY, conditions, digits, make_network
from pliant.diagnostics import measure, measures
from pliant.trial_result import NOTICEABLE, SLOWER

RESULTS = Path(__file__).parent / "results"
KEPT = RESULTS / "trial_zoo.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "trial.md"
DEFINITION = 3
"""Increased whenever the networks, the trial or the truth change; lines of other definitions are left out."""
ALARM_SEEDS, TRUTH_SEEDS = 20, 1
"""How many networks of each healthy condition meet a trial, and how many of them have a known truth."""
DAMAGED_SEEDS = 3
LONG_STEPS, LONG_RUNS = 1500, 3
WORSE = 0.03
"""The best gap of long runs from which on a network learns worse for certain; three runs tell it to about 1 %."""
SEEDS_OF_RULE = 12
"""The seeds below this number were seen when the rule got its condition on the spread of fresh networks."""
FIRST_LIMIT = 0.02
"""The limit before the first trials were seen; the tables show both."""
SIGNS = [name for name in measures.names() if measures.info(name).sign and not measures.info(name).of_step]

Row = dict[str, Any]


def jobs(
    seeds: int = ALARM_SEEDS, networks: Sequence[str] = tuple(ARCHITECTURES)
) -> Iterator[tuple[str, str, str, int]]:
    """Yield what there is to do, the most telling first: kind, architecture, condition, seed."""
    for seed in range(seeds):
        for architecture in networks:
            for condition in conditions(architecture):
                healthy = condition in HEALTHY
                if seed < TRUTH_SEEDS:
                    yield "truth", architecture, condition, seed
                if healthy or seed < DAMAGED_SEEDS:
                    yield "signs", architecture, condition, seed
                    yield "trial", architecture, condition, seed


def run(
    path: Path,
    seeds: int = ALARM_SEEDS,
    networks: Sequence[str] = tuple(ARCHITECTURES),
    kinds: Sequence[str] = ("truth", "signs", "trial"),
) -> None:
    """Do the jobs that are not in the file yet."""
    done = {_network(row): row for row in read(path)}
    work = {"truth": measure_truth, "signs": measure_signs, "trial": hold_trial}
    for kind, architecture, condition, seed in jobs(seeds, networks):
        known = done.get((kind, architecture, condition, seed))
        missing = [
            name for name in SIGNS if has_sign(architecture, name) and name not in (known or {}).get("values", ())
        ]
        if kind not in kinds or (known is not None and not (kind == "signs" and missing)):
            continue
        begun = time.process_time()
        network = make_network(architecture, condition, seed)
        if known is None:
            found = work[kind](architecture, network, seed)
        else:
            found = measure_signs(architecture, network, seed, missing)
        row = {"definition": DEFINITION, "kind": kind, "network": architecture, "condition": condition, "seed": seed,
               **found, "cpu_seconds": round(time.process_time() - begun, 1), "torch": torch.__version__}  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def hold_trial(architecture: str, model: nn.Module, seed: int) -> Row:
    """Hold one trial with the defaults."""
    found = pliant.trial(
        model, digits().new, fresh=ARCHITECTURES[architecture], test=digits().trial_test, seed=seed, stress=seed < 3
    )
    stress = found.stress["fresh"] - found.stress["aged"] if found.stress else None
    return {"verdict": found.verdict, "gap": found.gap, "interval": found.interval, "best_gap": asdict(found.best_gap),
            "pairs": len(found.pairs), "stress_gap": stress}  # fmt: skip


def measure_truth(architecture: str, model: nn.Module, seed: int) -> Row:
    """Compare long learning runs of a network with those of fresh ones."""
    aged = [learn_long(model, run) for run in range(LONG_RUNS)]
    fresh = [fresh_run(architecture, run) for run in range(LONG_RUNS)]
    gain = mean(max(curve) - curve[0] for curve in fresh)
    return {name: (mean(map(number, fresh)) - mean(map(number, aged))) / gain
            for name, number in (("gap", mean), ("best_gap", max), ("final_gap", lambda curve: curve[-1]))}  # fmt: skip


@cache
def fresh_run(architecture: str, run: int) -> tuple[float, ...]:
    """Return the curve of a fresh network."""
    torch.manual_seed(1000 + run)
    return learn_long(ARCHITECTURES[architecture](), run)


def learn_long(model: nn.Module, seed: int) -> tuple[float, ...]:
    """Train a copy on the new digits; return its accuracy on held-out ones at the start and at 30 later steps."""
    model = copy.deepcopy(model)
    (x, y), (x_test, y_test) = digits().new, digits().truth_test
    draws = torch.Generator().manual_seed(seed)
    optimizer = Adam(model.parameters(), lr=1e-3)
    curve = []
    for step in range(LONG_STEPS + 1):
        if step % (LONG_STEPS // 30) == 0:
            with torch.no_grad():
                curve.append(float((model.eval()(x_test).argmax(1) == y_test).float().mean()))
            model.train()
        index = torch.randint(len(x), (64,), generator=draws)
        optimizer.zero_grad()
        cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return tuple(curve)


def measure_signs(architecture: str, model: nn.Module, seed: int, names: Sequence[str] = ()) -> Row:
    """Measure signs of a network and of a fresh one on new data; all that it can have if none are named."""
    torch.manual_seed(2000 + seed)
    x, y = digits().new
    names = names or [name for name in SIGNS if has_sign(architecture, name)]
    found = measure(model, (x[:256], y[:256]), cross_entropy, ARCHITECTURES[architecture](), measures=names)
    return {"values": {name: [found.values.get(name), found.reference.get(name)] for name in names}}


def has_sign(architecture: str, name: str) -> bool:
    """Return whether an architecture can have a sign: only a transformer has attention."""
    return name != "attention_entropy" or architecture == "transformer"


def read(path: Path) -> list[Row]:
    """Return the rows of the current definition. A later line with signs of the same network adds them to the first."""
    rows: dict[tuple[str, str, str, int], Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row.get("definition") != DEFINITION:
            continue
        known = rows.setdefault(_network(row), row)
        if known is not row:
            known["values"] |= row["values"]
    return list(rows.values())


def _network(row: Row) -> tuple[str, str, str, int]:
    return row["kind"], row["network"], row["condition"], row["seed"]


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    return statistics.fmean(values)


def truths(rows: list[Row]) -> dict[tuple[str, str], Row]:
    """Return the truth about each network of the zoo."""
    return {(row["network"], row["condition"]): row for row in rows if row["kind"] == "truth"}


def learns(truth: Row, limit: float = WORSE) -> Literal["as well", "worse", "between"]:
    """Say how a network learns in the long run, beside fresh ones."""
    if truth["best_gap"] > limit or truth["gap"] > SLOWER:
        return "worse"
    return "as well" if truth["best_gap"] < NOTICEABLE and truth["gap"] < SLOWER / 2 else "between"


def rank_correlation(rows: list[Row], measure: str = "gap") -> float:
    """Return how the trials' gaps order the networks, beside those of long runs of the same networks (Spearman)."""
    from scipy.stats import spearmanr

    known = truths(rows)
    pairs = [
        (row[measure], known[row["network"], row["condition"]]["gap"])
        for row in rows
        if row["kind"] == "trial" and row["seed"] < TRUTH_SEEDS and (row["network"], row["condition"]) in known
    ]
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def times_worse(row: Row) -> dict[str, float]:
    """Return how many times worse each sign of a network is than a fresh network's."""
    found = {}
    for name, (value, reference) in row["values"].items():
        sign = measures.info(name).sign
        assert sign is not None
        times = sign.times(value, reference) if value is not None else None
        if times is not None:
            found[name] = times
    return found


def healthy_limits(rows: list[Row]) -> dict[str, float]:
    """Return the largest `times_worse` of each sign that healthy networks have."""
    healthy = [times_worse(row) for row in rows if row["kind"] == "signs" and row["condition"] in HEALTHY]
    found = {name: [each[name] for each in healthy if name in each] for name in SIGNS}
    return {name: max(1.0, *times) for name, times in found.items() if times}


def strongest(row: Row, limits: dict[str, float]) -> float:
    """Return the size of a network's strongest sign, as a multiple of healthy networks."""
    return max(times / limits[name] for name, times in times_worse(row).items() if name in limits)


def severe_limit(rows: list[Row]) -> float:
    """Return the smallest strongest sign among networks that learn worse in the long run."""
    limits, known = healthy_limits(rows), truths(rows)
    worse = {key for key, truth in known.items() if learns(truth) == "worse"}
    sizes = [strongest(r, limits) for r in rows if r["kind"] == "signs" and (r["network"], r["condition"]) in worse]
    return min(sizes)


def separation(rows: list[Row], number: Callable[[Row, dict[str, float]], float] = strongest) -> float:
    """Return the AUC of a number of the signs: damaged networks that learn worse against healthy ones.

    The limits are those of the other architectures, so that no network is judged by its own kind.
    """
    known = truths(rows)
    damaged, healthy = [], []
    for architecture in ARCHITECTURES:
        limits = healthy_limits([row for row in rows if row["network"] != architecture])
        for row in rows:
            key = (row["network"], row["condition"])
            if row["kind"] != "signs" or row["network"] != architecture:
                continue
            if row["condition"] in HEALTHY:
                healthy.append(number(row, limits))
            elif key in known and learns(known[key]) == "worse":
                damaged.append(number(row, limits))
    wins = [(a > b) + (a == b) / 2 for a in damaged for b in healthy]
    return mean(wins)


def write_limits(rows: list[Row], path: Path) -> None:
    """Write the module that `diagnose` reads."""
    networks = sum(row["kind"] == "signs" and row["condition"] in HEALTHY for row in rows)
    lines = [
        '"""How far measures get from a fresh network\'s in healthy networks.',
        "",
        "Written by `python -m benchmarks.trial_zoo --write-thresholds`; do not edit.",
        '"""',
        "",
        f"SEVERE = {round_down(severe_limit(rows))}",
        '"""The weakest among the strongest signs of the zoo\'s networks that learn worse, in healthy limits."""',
        "",
        "LIMITS = {",
        *(f'    "{name}": {round_up(limit)},' for name, limit in healthy_limits(rows).items()),
        "}",
        f'"""How many times worse than a fresh network\'s each measure gets in {networks} healthy networks."""',
        "",
    ]
    path.write_text("\n".join(lines))


def round_up(number: float) -> float:
    """Round up to two significant digits.

    Example:
        >>> round_up(3.41), round_up(61.2), round_up(1.0)
        (3.5, 62.0, 1.0)
    """
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return round(math.ceil(number / unit - 1e-9) * unit, 6)


def round_down(number: float) -> float:
    """Round down to two significant digits.

    Example:
        >>> round_down(3.49)
        3.4
    """
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return round(math.floor(number / unit + 1e-9) * unit, 6)


def summarize(rows: list[Row]) -> str:
    """Return the tables as Markdown."""
    known, limits = truths(rows), healthy_limits(rows)
    lines = [
        "| network | condition | long run: area gap | long run: best gap | trials | strongest sign |",
        "|---|---|---|---|---|---|",
    ]
    for key, truth in sorted(known.items(), key=lambda item: list(ARCHITECTURES).index(item[0][0])):
        own = [row for row in rows if (row["network"], row["condition"]) == key]
        found = [row["verdict"] for row in own if row["kind"] == "trial"]
        verdicts = ", ".join(f"{found.count(v)} {v}" for v in ("plastic", "undecided", "lost") if v in found)
        sizes = [strongest(row, limits) for row in own if row["kind"] == "signs"]
        size = f"{mean(sizes):.1f}x" if sizes and math.isfinite(max(sizes)) else "infinite" if sizes else ""
        lines.append(f"| {key[0]} | {key[1]} | {truth['gap']:+.1%} | {truth['best_gap']:+.1%} | {verdicts} | {size} |")
    trials = [row for row in rows if row["kind"] == "trial"]
    healthy = [row["verdict"] for row in trials if row["condition"] in HEALTHY]
    later = [row["verdict"] for row in trials if row["condition"] in HEALTHY and row["seed"] >= SEEDS_OF_RULE]

    def of_worse(limit: float) -> list[str]:
        judged = [(row["verdict"], known.get((row["network"], row["condition"]))) for row in trials]
        return [verdict for verdict, truth in judged if truth and learns(truth, limit) == "worse"]

    worse, stricter = of_worse(WORSE), of_worse(FIRST_LIMIT)
    lines += [
        "",
        f"- Rank correlation of the trial's gap with the long run's: {rank_correlation(rows):.3f} "
        f"({sum(row['seed'] < TRUTH_SEEDS for row in trials)} networks). "
        f"Of the random labels' gap: {rank_correlation(rows, 'stress_gap'):.3f}.",
        f"- Healthy networks called lost: {healthy.count('lost')} of {len(healthy)} "
        f"({healthy.count('undecided')} undecided); with seeds from {SEEDS_OF_RULE} on, which had no part in the rule: "
        f"{later.count('lost')} of {len(later)}.",
        f"- Networks that learn worse in the long run (best gap above {WORSE:.0%}, or area gap above {SLOWER:.0%}) and "
        f"are called lost: {worse.count('lost')} of {len(worse)}. With the limit that stood first, {FIRST_LIMIT:.0%}: "
        f"{stricter.count('lost')} of {len(stricter)}.",
        f"- AUC of the strongest sign, limits from the other architectures: {separation(rows):.3f}. Of single signs: "
        + ", ".join(f"{name} {separation(rows, one_sign(name)):.2f}" for name in SIGNS) + ".",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_table(rows: list[Row], page: Path) -> None:
    """Write the tables into the documentation."""
    before, _, rest = page.read_text().partition("<!-- zoo -->\n")
    after = rest.partition("<!-- end zoo -->")[2]
    page.write_text(f"{before}<!-- zoo -->\n{summarize(rows)}<!-- end zoo -->{after}")


def one_sign(name: str) -> Callable[[Row, dict[str, float]], float]:
    """Return a function that returns the size of one sign."""
    return lambda row, limits: times_worse(row).get(name, 0.0)


def command() -> None:
    """Run the zoo, or write what follows from it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trial_zoo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=ALARM_SEEDS, help="networks of each healthy condition")
    parser.add_argument("--networks", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    parser.add_argument("--kinds", nargs="+", default=["truth", "signs", "trial"], choices=["truth", "signs", "trial"])
    parser.add_argument(
        "--write-thresholds", action="store_true", help="write the limits and the tables of the docs; run nothing"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if not asked.write_thresholds:
        run(KEPT, asked.seeds, asked.networks, asked.kinds)
    rows = read(KEPT)
    if asked.write_thresholds:
        write_limits(rows, Path(measures.__file__).parent / "_healthy_limits.py")
        write_table(rows, DOCS)
    print(summarize(rows))


if __name__ == "__main__":
    command()
