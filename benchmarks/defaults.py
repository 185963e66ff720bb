"""Which defaults work: `python -m benchmarks.defaults [FOLDER] [METHOD ...]`.

The protocol: three streams on the embedded digits with an MLP 64-128-128-10 and Adam (random labels, a warm start on
wrong labels, permuted pixels). Every method is tried over the sweep of its main setting (its record's first tunable,
or the one in `MAIN`); its other settings keep their defaults. A sweep goes on past its edge while the best value lies
there. A setting's score on a stream is the share of the gap between plain training and fresh networks that it closes,
between -1 and 1. The setting with the best mean score over the streams is chosen, on three seeds that serve nothing
else. The present default stays if the best is ahead by less than `NOTICED`. The table shows chosen and present
settings on five other seeds.

Runs are kept in FOLDER (`runs/defaults`), so the same command continues; all scores are kept in `results/defaults.json`
and the table in `results/defaults.txt` and `docs/defaults.md`.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pliant
from pliant.methods import registry

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs" / "defaults.md"
CHOOSING_SEEDS = [100, 101, 102]
SEEDS = [0, 1, 2, 3, 4]
NOTICED = 0.05
MAIN = {"redo": "every", "regrama": "every"}  # how often they act matters more than which units they take
STREAMS: dict[str, dict[str, Any]] = {
    "random_labels": {
        "data": {"name": "digits", "first": 400},
        "stream": {"name": "random_labels", "tasks": 8, "epochs": 40},
        "training": {"lr": 3e-3, "batch_size": 40},
    },
    "warm_start": {
        "data": "digits",
        "stream": {"name": "warm_start", "fraction": 0.3, "first_epochs": 300, "epochs": 18, "wrong_labels": 0.5},
        "training": {"lr": 1e-3, "batch_size": 32},
    },
    "pixel_permutation": {
        "data": {"name": "digits", "first": 640},
        "stream": {"name": "pixel_permutation", "tasks": 12, "epochs": 20},
        "training": {"lr": 3e-3, "batch_size": 64},
    },
}


@dataclass(frozen=True)
class Score:
    """What a setting does on one stream.

    Attributes:
        mean: The stream's headline, mean over seeds.
        share: The share of the gap between plain training and fresh networks that is closed.
        low: Lower end of the interval of the difference to plain training.
        high: Upper end.
    """

    mean: float
    share: float
    low: float
    high: float


def label(name: str, setting: dict[str, Any]) -> str:
    """Return the label of a setting, such as `l2 lam=0.001`."""
    return " ".join([name, *(f"{key}={value:g}" for key, value in setting.items())])


def main_setting(record: registry.MethodInfo) -> registry.Tunable:
    """Return the setting of a method that the protocol tunes."""
    return next(tunable for tunable in record.tunables if tunable.name == MAIN.get(record.name, tunable.name))


def grid(record: registry.MethodInfo) -> tuple[str, list[float]]:
    """Return the name of a method's main setting and its values in order; none if it has no setting to tune."""
    if not record.tunables:
        return "", []
    tunable = main_setting(record)
    default = registry.options(record.name).get(tunable.name, tunable.default)
    values = {float(value) for value in (*tunable.sweep, default) if isinstance(value, int | float)}
    return tunable.name, sorted(values)


def extend(record: registry.MethodInfo, values: list[float], best: float) -> float | None:
    """Return the next value of a sweep whose best value lies at its edge, or None if the bounds allow none."""
    tunable = main_setting(record)
    step = 10.0 if min((v for v in values if v > 0), default=1) * 100 <= max(values) else 2.0
    candidate = best * step if best == values[-1] else best / step if best == values[0] else None
    if candidate is None or not candidate or math.isinf(candidate):
        return None
    if isinstance(tunable.default, int):
        candidate = float(round(candidate))
    if candidate < tunable.low or (tunable.high is not None and candidate > tunable.high):
        return None
    return candidate if len(values) < 12 else None


def run(stream: str, wanted: dict[str, tuple[str, dict[str, Any]]], seeds: list[int], folder: Path) -> dict[str, Score]:
    """Run settings on a stream, and plain training and fresh networks with them; return their scores."""
    entries: list[Any] = ["vanilla", "fresh"]
    for text, (name, setting) in wanted.items():
        entries.append({"label": text, "name": name, **setting})
    place = folder / f"{stream}-{seeds[0]}"
    result = pliant.compare(
        entries,
        model={"name": "mlp", "widths": [128, 128]},
        seeds=seeds,
        out=place,
        workers=1,
        checkpoint_seconds=600,
        progress=False,
        **STREAMS[stream],
    )
    table = result.table
    plain, fresh = table.loc["vanilla", "mean"], table.loc["fresh", "mean"]
    scores = {}
    for text in wanted:
        row = table.loc[text]
        missing = not math.isfinite(row["mean"]) or row["diverged"] or row["failed"]
        share = -1.0 if missing else max(-1.0, min(1.0, (row["mean"] - plain) / (fresh - plain)))
        scores[text] = Score(
            float(row["mean"]), float(share), float(row["difference_low"]), float(row["difference_high"])
        )
    return scores


def choose(name: str, folder: Path) -> dict[str, dict[str, Score]]:
    """Try a method's settings on the seeds for choosing; return scores by setting and stream, the sweep extended."""
    record = registry.info(name)
    keyword, values = grid(record)
    while True:
        settings: list[dict[str, Any]] = [{keyword: as_given(record, value)} for value in values] if keyword else [{}]
        wanted = {label(name, setting): (name, setting) for setting in settings}
        found = {stream: run(stream, wanted, CHOOSING_SEEDS, folder) for stream in STREAMS}
        scores = {text: {stream: found[stream][text] for stream in STREAMS} for text in wanted}
        if not keyword:
            return scores
        totals = {value: total(scores[label(name, {keyword: value})]) for value in values}
        best = max(values, key=lambda value: totals[value])
        more = extend(record, values, best)
        if more is None or more in values:
            return scores
        values = sorted([*values, more])


def as_given(record: registry.MethodInfo, value: float) -> float | int:
    """Return a value as the method takes it: whole numbers where the default is one."""
    return int(value) if isinstance(main_setting(record).default, int) else value


def total(scores: dict[str, Score]) -> float:
    """Return the mean score over the streams."""
    return sum(score.share for score in scores.values()) / len(scores)


def main() -> None:
    """Choose and judge the defaults of all methods, or of the named methods."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/defaults")
    for name in sys.argv[2:] or registry.names():
        judge(name, folder)


def judge(name: str, folder: Path) -> None:
    """Choose the setting of a method, judge it on other seeds, and keep the scores."""
    kept_file = RESULTS / "defaults.json"
    kept: dict[str, Any] = json.loads(kept_file.read_text()) if kept_file.exists() else {}
    scores = choose(name, folder)
    keyword, _ = grid(registry.info(name))
    default = registry.options(name).get(keyword) if keyword else None
    present = label(name, {keyword: default}) if isinstance(default, int | float) else None
    best = max(scores, key=lambda text: total(scores[text]))
    if present in scores and total(scores[best]) - total(scores[present]) < NOTICED:
        best = str(present)
    judged = {}
    for text in dict.fromkeys([best, present] if present else [best]):
        setting = {keyword: as_given(registry.info(name), float(str(text).rpartition("=")[2]))} if keyword else {}
        wanted = {str(text): (name, setting)}
        judged[text] = {stream: run(stream, wanted, SEEDS, folder)[str(text)] for stream in STREAMS}
    kept[name] = {
        "present": present,
        "chosen": best,
        "choosing": {text: {s: vars(score) for s, score in each.items()} for text, each in scores.items()},
        "judged": {text: {s: vars(score) for s, score in each.items()} for text, each in judged.items()},
        "seeds": {"choosing": CHOOSING_SEEDS, "judged": SEEDS},
        "version": pliant.__version__,
    }
    kept_file.write_text(json.dumps(kept, indent=1) + "\n")
    write(kept)
    print(show({name: kept[name]}), flush=True)


def write(kept: dict[str, Any]) -> None:
    """Write the table beside the scores and into the documentation."""
    (RESULTS / "defaults.txt").write_text(show(kept))
    before, _, rest = DOCS.read_text().partition("<!-- defaults -->\n")
    after = rest.partition("<!-- end defaults -->")[2]
    DOCS.write_text(f"{before}<!-- defaults -->\n```\n{show(kept)}```\n<!-- end defaults -->{after}")


def show(kept: dict[str, Any]) -> str:
    """Return the table of what was chosen, with scores on the seeds that chose nothing."""
    lines = [
        "# python -m benchmarks.defaults: share of the gap to fresh networks that is closed, five held-out seeds\n",
        f"{'setting':34} {'':8} {'random labels':>14} {'warm start':>14} {'permuted':>14} {'mean':>7}  hurts on",
    ]
    for found in kept.values():
        for text, scores in found["judged"].items():
            shares = [scores[stream]["share"] for stream in STREAMS]
            hurts = ", ".join(stream for stream in STREAMS if scores[stream]["high"] < 0) or "-"
            role = "chosen" if text == found["chosen"] else "present"
            lines.append(
                f"{text:34} {role:8} "
                + " ".join(f"{share:14.2f}" for share in shares)
                + f" {sum(shares) / len(shares):7.2f}  {hurts}"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
