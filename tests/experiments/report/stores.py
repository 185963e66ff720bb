"""Experiments' folders with planted results, written by the store's own writer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pliant._files import write_atomically
from pliant._json import seal
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder, Status
from pliant.training import Settings

NASTY = "<script>alert(1)</script> & 100% \\ $x_1$ | `a` [b] {c} #\"'"
"""A name with something in it for every format to trip over."""


def config(label: str, seed: int, **changes: Any) -> RunConfig:
    """A run of a method, or of a baseline if it is called so."""
    plain = label in ("vanilla", "fresh")
    values: dict[str, Any] = {
        "label": label,
        "methods": () if plain else (Part("l2", {"lam": 0.1}),),
        "fresh": label == "fresh",
        "data": Part("digits"),
        "model": Part("mlp"),
        "stream": Part("label_flip", {"tasks": 3, "epochs": 2}),
        "training": Settings(),
        "measures": (),
        "seed": seed,
        "purpose": "result",
        "holdout": 0.0,
        "device": "cpu",
    }
    return RunConfig(**values | changes)


def write_run(
    root: Path,
    run: RunConfig,
    ends: Sequence[float],
    *,
    epochs: int = 2,
    status: Status = "finished",
    error: str = "",
    seconds: float = 10.0,
    measures: dict[str, Sequence[float]] | None = None,
    entries: Sequence[float] | None = None,
    extra: dict[str, float] | None = None,
    sources: dict[str, str] | None = None,
) -> Path:
    """Write a run that ends each task with these test accuracies.

    Args:
        root: The experiment's folder.
        run: The run.
        ends: The test accuracy at the end of each task; it is half of that after every epoch before.
        epochs: Epochs of each task.
        status: How it ends; "unfinished" leaves it open.
        error: What went wrong.
        seconds: How long it took, for 100 steps.
        measures: For each measure its value in each task.
        entries: Test accuracy at the start of each task but the first.
        extra: More numbers of the result.
        sources: Digests of what it was made of.
    """
    with RunFolder(root, run).open() as folder:
        folder.start({"host": "here", "pid": 1, "python": "3.11", "torch": "2.13"})
        for task, end in enumerate(ends):
            for epoch in range(1, epochs + 1):
                accuracy = end if epoch == epochs else end / 2
                progress = (task + epoch / epochs) / len(ends)
                record = {"task": task, "epoch": epoch, "step": 1, "progress": progress, "receipts": [], "lr": 1e-3}
                record |= {"loss": 1 - accuracy, "online_accuracy": accuracy, "test_accuracy": accuracy}
                if epoch == 1 and task and entries is not None:
                    record["entry_test_accuracy"] = entries[task - 1]
                if epoch == epochs:
                    record |= {"train_accuracy": end, "train_loss": 0.1, "task_online_accuracy": end}
                if measures is not None and epoch == 1:
                    record["measures"] = {name: values[task] for name, values in measures.items()}
                folder.append(record)
        if status != "unfinished":
            result = {"final_test_accuracy": ends[-1], "mean_test_accuracy": sum(ends) / len(ends)} | (extra or {})
            folder.finish(status, result if status == "finished" else {}, error)
            sizes = {"model": 100, "optimizer": 200, "methods": 30 if run.methods else 0}
            told = {} if sources is None else {"sources": sources}
            folder.note("end", status=status, seconds=seconds, steps=100, bytes=sizes, **told)
    return folder.path


def write_results(root: Path, results: dict[str, Sequence[float]], tasks: int = 3, **changes: Any) -> Path:
    """Write runs of several contenders: for each its results, one a seed, which all its tasks end with.

    Args:
        root: The experiment's folder.
        results: By label, the mean test accuracy of each seed.
        tasks: How many tasks.
        changes: What differs in the runs' configurations.

    Returns:
        The folder.
    """
    for label, values in results.items():
        for seed, value in enumerate(values):
            write_run(root, config(label, seed, **changes), [value] * tasks)
    return root


def write_recipe(root: Path, **changes: Any) -> dict[str, Any]:
    """Write a recipe that asks for the runs of `config`."""
    values: dict[str, Any] = {
        "title": "Planted",
        "data": "digits",
        "model": "mlp",
        "stream": {"name": "label_flip", "tasks": 3, "epochs": 2},
        "methods": ["vanilla", "fresh", {"name": "l2", "label": "L2", "lam": 0.1}],
    }
    recipe = make_recipe(values | changes).model_dump(mode="json")
    root.mkdir(parents=True, exist_ok=True)
    write_atomically(root / "recipe.json", seal(recipe))
    return recipe
