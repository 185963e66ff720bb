"""Which explanations of lost plasticity hold? The runs of `p3_fig1_explanations`, with every measure on.

    pliant run p3_fig1_explanations seeds=5 training.evaluate_every=20 'measures=[…]' --out runs/p3_fig1
    python -m benchmarks.explanations runs/p3_fig1     # keep what the tables rest on, then print them
    python -m benchmarks.explanations                  # print the tables from what was kept

Kept in `results/explanations.jsonl.gz`: for every run and task the error at its end, and of every measure the value
at the task's first step and the mean over the task.
"""

import gzip
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from pliant.experiments.store import load_runs

RESULTS = Path(__file__).parent / "results" / "explanations.jsonl.gz"
Tasks = list[dict[str, float]]

# What the source says of figure 1 (§3 and appendix A): who, which number, and how it moves over the tasks.
STATEMENTS = (
    ("ReLU", "error", "rises", "ReLU loses plasticity"),
    ("leaky-ReLU", "error", "rises", "leaky-ReLU loses plasticity"),
    ("tanh", "error", "stays", "tanh does not"),
    ("identity", "error", "stays", "the identity does not"),
    ("ReLU", "mean update_l1", "falls", "its updates shrink"),
    ("leaky-ReLU", "mean update_l1", "rises", "its updates grow, though it loses plasticity"),
    ("ReLU", "first feature_rank", "falls", "its representation loses rank"),
    ("tanh", "first feature_rank", "falls", "its representation loses rank, though it keeps plasticity"),
    ("ReLU", "first dormancy", "rises", "its units go dormant"),
    ("leaky-ReLU", "first dormancy", "stays", "its units do not, though it loses plasticity"),
    ("identity", "first weight_l1", "rises", "its weights grow, though it keeps plasticity"),
    ("ReLU", "first hessian_rank", "falls", "it loses directions of curvature"),
    ("leaky-ReLU", "first hessian_rank", "falls", "it loses directions of curvature"),
)


def summarise(records: list[dict[str, Any]]) -> Tasks:
    """Return the numbers of each task of a run that is complete."""
    tasks: Tasks = []
    for index in sorted({record["task"] for record in records}):
        own = [record for record in records if record["task"] == index]
        end = own[-1].get("train_accuracy")
        if end is None:
            continue
        numbers = {"error": 1 - end}
        measured = [record["measures"] for record in own if "measures" in record]
        for name in dict.fromkeys(key for values in measured for key in values if "/" not in key):
            values = [each[name] for each in measured if each.get(name) is not None]
            if measured[0].get(name) is not None:
                numbers[f"first {name}"] = measured[0][name]
            if values:
                numbers[f"mean {name}"] = fmean(values)
        tasks.append({key: float(f"{value:.6g}") for key, value in numbers.items()})
    return tasks


def keep(root: Path) -> None:
    """Write down what the tables rest on."""
    runs = [
        {"label": run.config.label, "seed": run.config.seed, "status": run.status, "tasks": summarise(run.records)}
        for run in load_runs(root)
    ]
    RESULTS.write_bytes(gzip.compress("\n".join(map(json.dumps, runs)).encode(), mtime=0))


def change(tasks: Tasks, number: str) -> float | None:
    """Return the mean over the last five tasks minus that over the first five."""
    values = [task[number] for task in tasks if number in task]
    return fmean(values[-5:]) - fmean(values[:5]) if len(values) >= 10 else None


def judge(changes: list[float]) -> tuple[str, str]:
    """Return how a number moves, from its changes by seed, and the change with its 95 % interval."""
    middle = fmean(changes)
    if len(changes) < 3:
        return "open", f"{middle:+.3g}"
    half = float(stats.sem(changes) * stats.t.ppf(0.975, len(changes) - 1))
    moves = "rises" if middle - half > 0 else "falls" if middle + half < 0 else "stays"
    return moves, f"{middle:+.3g} ± {half:.2g}"


def report(folder: str | None) -> None:
    if folder is not None:
        keep(Path(folder))
    runs = [json.loads(line) for line in gzip.decompress(RESULTS.read_bytes()).splitlines()]
    by_label: dict[str, list[Tasks]] = {}
    for run in runs:
        by_label.setdefault(run["label"], []).append(run["tasks"])
    for label, each in by_label.items():
        print(f"{label}: tasks done by seed: {', '.join(str(len(tasks)) for tasks in each)}")
    print(
        "\n| | number | the source | here | last five tasks − first five, 95 % interval | |\n|---|---|---|---|---|---|"
    )
    for label, number, stated, meaning in STATEMENTS:
        found = [value for tasks in by_label.get(label, []) if (value := change(tasks, number)) is not None]
        moves, text = judge(found) if found else ("open", "no run with ten tasks yet")
        print(f"| {label} | {number} | {stated} | {moves} | {text} ({len(found)} seeds) | {meaning} |")
    shown = ("error", "mean update_l1", "first feature_rank", "first dormancy", "first weight_l1", "first hessian_rank")
    for number in shown:
        most = max((len(tasks) for each in by_label.values() for tasks in each), default=0)
        chosen = [task for task in (0, 1, 4, 9, 14, 19, 24) if task < most]
        print(f"\n{number}, mean over seeds, by task\n\n| | " + " | ".join(str(t + 1) for t in chosen) + " |")
        print("|---" * (len(chosen) + 1) + "|")
        for label, each in by_label.items():
            cells = []
            for t in chosen:
                values = [tasks[t][number] for tasks in each if t < len(tasks) and number in tasks[t]]
                cells.append(f"{fmean(values):.4g}" if values else "")
            print(f"| {label} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    report(sys.argv[1] if len(sys.argv) > 1 else None)
