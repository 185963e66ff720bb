"""Cost of a report, and coverage of its intervals."""

import math
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.timing import row
from pliant.experiments.report.document import make_report
from pliant.experiments.report.statistics import bands
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder
from pliant.training import Settings

LAYERS = ("0", "2", "4", "6")
MEASURES = ("weight_growth", "feature_rank", "dormant_fraction", "hessian_rank", "gradient_l2")


def write_run(root: Path, method: int, seed: int, tasks: int, epochs: int, measured: bool) -> None:
    """Write a run through the store, with curves that look like learning."""
    label = ("vanilla", "fresh", f"method {method}")[min(method, 2)]
    config = RunConfig(
        label=label,
        methods=(Part("l2", {"lam": 10.0**-method}),) if method > 1 else (),
        fresh=label == "fresh",
        data=Part("digits"),
        model=Part("mlp"),
        stream=Part("label_flip", {"tasks": tasks, "epochs": epochs}),
        training=Settings(),
        measures=MEASURES if measured else (),
        seed=seed,
        purpose="result",
        holdout=0.0,
        device="cpu",
    )
    draw = random.Random(f"{method} {seed}")
    ends = []
    with RunFolder(root, config).open() as folder:
        folder.start({"host": "bench", "python": "3", "torch": "2"})
        for task in range(tasks):
            top = 0.9 - (0.4 * task / tasks if method == 0 else 0.01 * method % 0.2) + draw.gauss(0, 0.01)
            for epoch in range(1, epochs + 1):
                accuracy = top * (1 - math.exp(-3 * epoch / epochs)) + draw.gauss(0, 0.005)
                record = {"task": task, "epoch": epoch, "step": 0, "progress": 0.5, "receipts": [], "lr": 1e-3}
                record |= {"loss": 1 - accuracy, "online_accuracy": accuracy, "test_accuracy": accuracy - 0.02}
                if measured:
                    values = {name: 1 + 0.1 * task + draw.random() for name in MEASURES}
                    values |= {f"weight_growth/{layer}": 1 + 0.2 * task + draw.random() for layer in LAYERS}
                    record["measures"] = values
                if epoch == epochs:
                    record |= {"train_accuracy": accuracy, "train_loss": 0.1, "task_online_accuracy": accuracy - 0.1}
                    ends.append(accuracy)
                folder.append(record)
        mean = sum(ends) / len(ends)
        folder.finish("finished", {"final_test_accuracy": ends[-1] - 0.02, "mean_test_accuracy": mean - 0.02})
        folder.note(
            "end", status="finished", seconds=10.0 + draw.random(), steps=1000, bytes={"model": 4, "methods": 1}
        )


def build(methods: int, seeds: int, tasks: int, epochs: int, limit: str, measured: bool) -> None:
    """Write a store, then time reading it, analyzing it and writing the page."""
    # Temporary files stay in memory.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        root = Path(name)
        for method in range(methods):
            for seed in range(seeds):
                write_run(root, method, seed, tasks, epochs, measured)
        start, work = time.perf_counter(), time.process_time()
        (page,) = make_report(root).save(root / "report.html")
        seconds, work = time.perf_counter() - start, time.process_time() - work
        what = f"{methods * seeds:,} runs ({methods} methods, {seeds} seeds, {tasks} tasks of {epochs} epochs)"
        row(f"seconds for a page of {what}", seconds, limit)
        row("  the same, seconds of processor time", work, "")
        row("  its size in MB", page.stat().st_size / 1e6, "≤ 3 for a normal comparison")


def coverage() -> None:
    """Print how often 95 % intervals of normal samples cover the true mean."""
    draw = np.random.default_rng(0)
    for seeds in (3, 5, 10, 20):
        _, low, high = bands(draw.standard_normal((seeds, 10_000)))
        row(f"share of 95 % intervals of {seeds} seeds that cover the true mean", ((low <= 0) & (high >= 0)).mean(), "")


def main() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    row("other processes per core", load / cores, "≤ 0.5 for wall-clock times to be meaningful")
    build(20, 10, 10, 20, "≤ 15", measured=True)
    build(50, 200, 5, 10, "≤ 60", measured=False)
    coverage()
