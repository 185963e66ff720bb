"""Cost of many experiments: scheduling, a second process, a store of ten thousand runs."""

import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.timing import row
from pliant._json import seal
from pliant.experiments.engines import ProcessEngine, usable_cores
from pliant.experiments.run import Outcome
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.scheduler import run_all
from pliant.experiments.store import load_runs
from pliant.training import Settings


class Silent:
    """Shows nothing."""

    def begin(self, waiting: Sequence[RunConfig], done: Sequence[RunConfig]) -> None:
        """Show nothing."""

    def tick(self, active: Iterable[RunConfig]) -> None:
        """Show nothing."""

    def ended(self, config: RunConfig, outcome: Outcome) -> None:
        """Check that the run finished."""
        assert outcome.status == "finished", outcome.error


def config(seed: int, epochs: int) -> RunConfig:
    return RunConfig(
        label="vanilla",
        methods=(),
        fresh=False,
        data=Part("digits"),
        model=Part("mlp"),
        stream=Part("single", {"epochs": epochs}),
        training=Settings(batch_size=16),
        measures=(),
        seed=seed,
        purpose="result",
        holdout=0.0,
        device="cpu",
    )


def timed(engine: ProcessEngine, configs: Sequence[RunConfig], root: Path) -> float:
    start = time.perf_counter()
    run_all(configs, root, engine, Silent())
    return time.perf_counter() - start


def warm(engine: ProcessEngine, root: Path) -> None:
    """Start all processes and import everything."""
    run_all([config(10**6 + i, 1) for i in range(2 * engine.capacity())], root, engine, Silent())


def scheduling(root: Path) -> None:
    """Wall time of many short runs in one process beyond what the runs themselves take."""
    engine = ProcessEngine(1)
    warm(engine, root)
    wall = timed(engine, [config(seed, 1) for seed in range(100)], root)
    engine.close()
    inside = 0.0
    for run in load_runs(root):
        if run.config.seed < 100:
            inside += run.events[-1]["seconds"]
    row("milliseconds a run beyond its training, 100 runs", 1000 * (wall - inside) / 100, "≤ 50")


def speedup(root: Path) -> None:
    """A sweep in one process and in two, in turns."""
    one, two = ProcessEngine(1), ProcessEngine(2)
    warm(one, root)
    warm(two, root)
    ratios = []
    for turn in range(3):
        seeds = range(1000 * (turn + 1), 1000 * (turn + 1) + 8)
        alone = timed(one, [config(seed, 10) for seed in seeds], root)
        both = timed(two, [config(seed + 500, 10) for seed in seeds], root)
        ratios.append(alone / both)
    one.close()
    two.close()
    load = os.getloadavg()[0]
    row("a sweep of 8 runs in one process / in two, median of 3 turns", sorted(ratios)[1], "≥ 1.8")
    print(f"  (load average {load:.1f} on {usable_cores()} cores; unreliable on a busy machine)")


def ten_thousand(root: Path) -> None:
    """Time listing and loading ten thousand finished runs, and finding that none is left to do."""
    base = config(0, 200)
    result = {f"{kind}_{name}": 0.5 for kind in ("final", "mean") for name in ("test_accuracy", "train_accuracy")}
    for index in range(10_000):
        each = replace(base, label=f"method {index % 20}", seed=index)
        folder = root / "runs" / each.id
        folder.mkdir(parents=True)
        end = {"config": json.loads(each.to_json()), "status": "finished", "result": result, "error": ""}
        (folder / "config.json").write_bytes(seal(json.loads(each.to_json())))
        (folder / "result.json").write_bytes(seal(end | {"metrics": ""}))
    start = time.perf_counter()
    runs = load_runs(root)
    row("seconds to list and load the results of 10 000 finished runs", time.perf_counter() - start, "≤ 10")
    assert len(runs) == 10_000
    engine = ProcessEngine(1)
    start = time.perf_counter()
    run_all([run.config for run in runs], root, engine, Silent())
    row("seconds to find that all 10 000 are done", time.perf_counter() - start, "")
    engine.close()


def main() -> None:
    for benchmark in (scheduling, speedup, ten_thousand):
        with tempfile.TemporaryDirectory() as folder:
            benchmark(Path(folder))
