"""Small runs, and processes to kill them in."""

import multiprocessing
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pliant.experiments.config import Part, RunConfig
from pliant.experiments.run import execute
from pliant.training import Settings


def small(**changes: Any) -> RunConfig:
    """A run of a second: 6 tasks, 2 epochs each, with a method at every step and one at boundaries."""
    config = RunConfig(
        label="both",
        methods=(Part("l2_init", {"lam": 0.01}), Part("shrink_perturb", {"lam": 0.5})),
        fresh=False,
        data=Part("digits", {"first": 160}),
        model=Part("mlp", {"widths": [16]}),
        stream=Part("label_flip", {"tasks": 6, "epochs": 2}),
        training=Settings(batch_size=16),
        measures=(),
        seed=0,
        purpose="result",
        holdout=0.0,
        device="cpu",
    )
    return replace(config, **changes)


def outputs(root: Path, config: RunConfig) -> dict[str, bytes]:
    """What must be equal, bit for bit, however often a run was interrupted."""
    folder = root / "runs" / config.id
    return {name: (folder / name).read_bytes() for name in ("config.json", "metrics.jsonl", "result.json")}


def in_process(config: RunConfig, root: Path, checkpoint_seconds: float = 0.0) -> BaseProcess:
    """Start a run in a process of its own, forked from one that has torch loaded and nothing else done."""
    context = multiprocessing.get_context("forkserver")
    # torch._dynamo is what the first step of an optimizer would import.
    context.set_forkserver_preload(["pliant.experiments.run", "torch._dynamo"])
    process = context.Process(target=execute, args=(config, root, checkpoint_seconds))
    process.start()
    return process
