"""Long streams and many runs: memory stays flat, and a store of many runs is read whole."""

import gc
import json
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from pliant import data, methods, models, streams
from pliant._json import seal
from pliant.experiments.scheduler import run_all
from pliant.experiments.store import load_runs
from pliant.training import Learner, Settings, train
from tests.experiments.helpers import small
from tests.experiments.test_scheduler import Notebook


def resident_after(*tasks: int) -> list[float]:
    """Train over a thousand tasks; return the megabytes in memory after some of them."""
    dataset = data.load("digits", first=64)
    stream = streams.create("pixel_permutation", dataset, tasks=1000, epochs=1)
    model = models.create("mlp", dataset.shape, 10)
    attached = [methods.create(name, model) for name in ("l2_init", "shrink_perturb")]
    learner = Learner(model, Settings(batch_size=64, new_optimizer=True), attached)
    sizes = []
    for record in train(learner, stream, 0):
        if record["task"] in tasks:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * resource.getpagesize() / 2**20)
    return sizes


def test_memory_is_flat_over_a_thousand_tasks() -> None:
    # In a process of its own: what other tests have freed would hide what this one keeps.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        early, late = pool.submit(resident_after, 199, 999).result()
    # A task's permuted data is 27 kB, 0.1 MB as the network meets it: kept for 800 tasks, it would be 20 or 90 MB.
    assert late - early < 10


class Nobody:
    """An engine that must not be asked for anything."""

    def capacity(self) -> int:
        return 1

    def submit(self, job: object) -> None:
        raise AssertionError("nothing is left to do")

    def close(self) -> None:
        pass


def test_a_thousand_finished_runs_are_read_but_not_run_again(tmp_path: Path) -> None:
    configs = [replace(small(), label=f"method {seed % 7}", seed=seed) for seed in range(1000)]
    for config in configs:
        folder = tmp_path / "runs" / config.id
        folder.mkdir(parents=True)
        end = {"config": json.loads(config.to_json()), "status": "finished", "result": {"x": config.seed}, "error": ""}
        (folder / "config.json").write_bytes(seal(end["config"]))
        (folder / "result.json").write_bytes(seal(end | {"metrics": ""}))
    (tmp_path / "runs" / "empty").mkdir()
    runs = load_runs(tmp_path)
    assert len(runs) == 1000
    by_seed = sorted(runs, key=lambda run: run.config.seed)
    assert [(run.config, run.result["x"]) for run in by_seed] == [(config, config.seed) for config in configs]
    notebook = Notebook()
    assert set(run_all(configs, tmp_path, Nobody(), notebook).values()) == {"finished"}
    assert (notebook.waiting, notebook.done) == (0, 1000)
