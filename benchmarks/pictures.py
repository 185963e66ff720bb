"""The pictures of the README and of the site's start page: `python -m benchmarks.pictures` draws them from kept runs.

`python -m benchmarks.pictures --trial` first holds the trial behind the picture of `decide` again (a minute), and keeps
its curves in `results/trial_curves.json`.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import altair as alt

from benchmarks.leaderboard import kept_streams, load_stream, stand
from benchmarks.reproduction.drawings import write_picture
from benchmarks.reproduction.kept import estimate, kept_runs
from benchmarks.reproduction.numbers import end_errors, split_tasks
from pliant.experiments.archive import unpack
from pliant.experiments.report.chart_style import LIGHT, print_config
from pliant.experiments.store import Run, load_runs

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
TRIAL = RESULTS / "trial_curves.json"
PLAIN, FRESH, TREATED = "#c2410c", "#6b7280", "#1d6fb8"
"""Orange, gray and blue have a contrast of at least 4.5:1 with white, and differ for every kind of color vision."""
Rows = list[dict[str, Any]]

TASKS = {
    "vanilla": "plain training",
    "spectral 1e-3": "with spectral regularization",
    "fresh": "a fresh network each time",
}
AGENTS = {"primed": "as it is", "fire": "after FIRE", "unprimed": "never damaged"}
REMEDIES = {"continue": "continue", "fire": "apply FIRE, then continue", "train from scratch": "train from scratch"}


def make_plasticity_rows() -> Rows:
    """Return the training accuracy at the end of each task on random labels, over the kept seeds."""
    runs, _ = kept_runs("methods_effect")
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        if run.status == "finished" and run.config.label in TASKS:
            for task, error in enumerate(end_errors(split_tasks(run)), start=1):
                found[TASKS[run.config.label], task].append(1 - error)
    return [{"line": line, "x": task, **spread(found[line, task], 0, 1)} for line, task in sorted(found)]


def make_agent_rows() -> Rows:
    """Return the mean training return in every 2 000 steps of the kept agents, over ten seeds."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for text in (RESULTS / "priming.jsonl").read_text().splitlines():
        run = json.loads(text)
        if run["condition"] not in AGENTS:
            continue
        parts: dict[int, list[float]] = defaultdict(list)
        for step, value in run["returns"]:
            parts[min(int(step), 19_999) // 2000].append(value)
        for part, values in parts.items():
            found[AGENTS[run["condition"]], part].append(sum(values) / len(values))
    return [
        {"line": line, "x": 2000 * part + 1000, **spread(found[line, part], 0, 500)} for line, part in sorted(found)
    ]


def make_remedy_rows() -> Rows:
    """Return the test accuracies of the treated CIFAR-10 checkpoint, over five seeds."""
    with unpacked(RESULTS / "treat" / "worn.jsonl.gz") as runs:
        found: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            if run.config.purpose == "result" and run.status == "finished":
                found[run.config.label].append(run.result["final_test_accuracy"])
    remedy = {label: label.partition("(")[0] for label in found}
    return [{"line": REMEDIES[remedy[label]], **spread(found[label], 0, 1)} for label in sorted(found)]


def make_rank_rows() -> Rows:
    """Return the mean rank of each method on the leaderboard, with its interval."""
    standings = stand({stream: load_stream(file) for stream, file in kept_streams().items()})
    rows = [{"line": one.method, "mean": one.rank, "low": one.low, "high": one.high} for one in standings]
    return [{key: round(value, 3) if key != "line" else value for key, value in row.items()} for row in rows]


def make_trial_rows() -> Rows:
    """Return the held-out accuracies of the kept trial, of every pair."""
    kept = json.loads(TRIAL.read_text())
    return [
        {"line": line, "x": step, "pair": pair, "mean": value}
        for line in ("your network", "a fresh network")
        for pair, curve in enumerate(kept[line])
        for step, value in zip(kept["steps"], curve, strict=True)
    ]


def hold_trial() -> None:
    """Hold the trial of a network that had learned twelve sets of random labels, and keep its curves."""
    import torch
    from torch import nn

    import pliant
    from pliant import data

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
        )

    torch.manual_seed(0)
    x, y = (part.clone() for part in data.load("digits").train.batch(torch.arange(1000)))
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(12):
        labels = torch.randint(10, (len(y),))
        for _ in range(400):
            rows = torch.randint(len(y), (32,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
            optimizer.step()
    found = pliant.trial(model, (x, y), fresh=build, steps=400)
    kept = {
        "verdict": found.verdict,
        "steps": found.steps,
        "your network": [[round(value, 4) for value in pair.aged] for pair in found.pairs],
        "a fresh network": [[round(value, 4) for value in pair.fresh] for pair in found.pairs],
    }
    TRIAL.write_text(json.dumps(kept) + "\n")
    print(found)


def spread(values: list[float], least: float, most: float) -> dict[str, float]:
    """Return the mean and the ends of its 95 % interval, within the range of the quantity."""
    mean = estimate(values)
    return {
        "mean": round(mean.mean, 4),
        "low": round(max(mean.low, least), 4),
        "high": round(min(mean.high, most), 4),
    }


@contextmanager
def unpacked(archive: Path) -> Iterator[list[Run]]:
    """Unpack an archive for a while."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        unpack(archive, root)
        yield load_runs(root)


def draw_curves(rows: Rows, colors: dict[str, str], x: str, y: str, percent: bool, width: int, height: int) -> Any:
    """Draw a curve with a band for each line, with its name at the top."""
    names = list(colors)
    hue = alt.Color(
        "line:N",
        scale=alt.Scale(domain=names, range=list(colors.values())),
        legend=alt.Legend(
            title=None,
            orient="top",
            symbolType="stroke",
            symbolStrokeWidth=3,
            symbolOpacity=1,
            columnPadding=28,
            labelFontSize=13,
            labelLimit=300,
        ),
    )
    across = alt.X("x:Q", title=x, axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(nice=False))
    up = alt.Y("mean:Q", title=y, axis=alt.Axis(format="%" if percent else "d", tickCount=5))
    if percent:
        up = up.scale(domain=[0, 1])
    base = alt.Chart().encode(x=across, color=hue)
    detail = ["pair:N"] if "pair" in rows[0] else []
    line = base.mark_line(strokeWidth=2 if detail else 3).encode(y=up, **({"detail": detail} if detail else {}))
    if detail:
        chart = alt.layer(line, data=alt.InlineData(values=rows))
    else:
        band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", title=y), y2="high:Q")
        chart = alt.layer(band, line, data=alt.InlineData(values=rows))
    return chart.properties(width=width, height=height)


def draw_dots(rows: Rows, x: str, percent: bool, colors: list[str], height: int) -> Any:
    """Draw a dot with its interval for each line."""
    order = alt.Y(
        "line:N",
        sort=[row["line"] for row in rows],
        title=None,
        axis=alt.Axis(labelFontSize=13, ticks=False, domain=False, labelLimit=260),
    )
    scale = alt.Scale(zero=False, nice=True)
    hue = alt.Color("line:N", scale=alt.Scale(domain=[row["line"] for row in rows], range=colors), legend=None)
    base = alt.Chart().encode(y=order, color=hue)
    axis = alt.Axis(format="%" if percent else "d", grid=True, tickCount=6)
    span = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=x, scale=scale, axis=axis), x2="high:Q")
    dot = base.mark_point(filled=True, size=110, opacity=1).encode(x="mean:Q")
    return alt.layer(span, dot, data=alt.InlineData(values=rows)).properties(width=400, height=height)


def draw_plasticity(rows: Rows) -> Any:
    """Draw the loss of plasticity, and a remedy."""
    colors = dict(zip(TASKS.values(), (PLAIN, TREATED, FRESH), strict=True))
    return draw_curves(rows, colors, "task: each brings new labels", "accuracy at the task's end", True, 560, 230)


def draw_agents(rows: Rows) -> Any:
    """Draw an agent that stopped learning, and learns again."""
    colors = dict(zip(AGENTS.values(), (PLAIN, TREATED, FRESH), strict=True))
    return draw_curves(rows, colors, "environment steps", "return of an episode", False, 460, 190)


def draw_remedies(rows: Rows) -> Any:
    """Draw what a checkpoint reaches with the best remedy, and without."""
    return draw_dots(rows, "test accuracy after tonight's training", True, [PLAIN, TREATED, FRESH], 110)


def draw_ranks(rows: Rows) -> Any:
    """Draw the leaderboard."""
    return draw_dots(rows, "mean rank over all streams (1 is best)", False, [TREATED] * len(rows), 220)


def draw_trial(rows: Rows) -> Any:
    """Draw the pairs of a trial."""
    colors = {"your network": PLAIN, "a fresh network": FRESH}
    return draw_curves(rows, colors, "training steps on the new data", "held-out accuracy", True, 460, 190)


PICTURES: dict[str, tuple[Callable[[], Rows], Callable[[Rows], Any]]] = {
    "plasticity": (make_plasticity_rows, draw_plasticity),
    "decide": (make_trial_rows, draw_trial),
    "treat": (make_remedy_rows, draw_remedies),
    "attach": (make_agent_rows, draw_agents),
    "compare": (make_rank_rows, draw_ranks),
}
"""By name of the file: how its numbers are read, and how they are drawn."""


def draw_pictures(folder: Path = IMAGES) -> list[Path]:
    """Draw every picture into a file that begins with the digest of its numbers."""
    config = print_config([])
    del config["range"]
    axis = config["axis"] | {"labelFontSize": 12, "titleFontSize": 12.5, "labelColor": LIGHT["ink"]}
    paths = []
    for name, (read, draw) in PICTURES.items():
        rows = read()
        padding = {"left": 34, "right": 40, "top": 14, "bottom": 12}  # Browsers set text wider than it was measured.
        spec = draw(rows).to_dict() | {"config": config | {"axis": axis}, "padding": padding}
        paths.append(write_picture(spec, rows, folder / f"{name}.svg"))
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trial", action="store_true", help="hold the trial behind decide.svg again")
    if parser.parse_args().trial:
        hold_trial()
    for path in draw_pictures():
        print(path)
