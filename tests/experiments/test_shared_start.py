"""Runs that start their second task from a checkpoint of a first task that all runs of a seed share."""

from pathlib import Path
from typing import Any

import pytest

from pliant.experiments.recipe import RecipeError, make_recipe
from pliant.experiments.run import execute
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder, load_runs
from pliant.training import Settings
from tests.experiments.helpers import interrupt, outputs, small

EPOCHS = 6


@pytest.fixture
def texts(tmp_path: Path) -> Part:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("to be or not to be, that is the question; " * 12)
    (folder / "b.txt").write_text("the quick brown fox jumps over the lazy dog. " * 12)
    return Part(str(folder), {"window": 8})


def run_of(texts: Part, checkpoint: str | None, first_epochs: int = EPOCHS, **changes: Any) -> RunConfig:
    stream = {"first_epochs": first_epochs, "epochs": 2} | ({"checkpoint": checkpoint} if checkpoint else {})
    settings = Settings("adamw", lr=1e-2, batch_size=16)
    model = Part("gpt", {"depth": 1, "width": 16, "heads": 2})
    base = small(
        label="plain", methods=(), data=texts, model=model, stream=Part("text_warm_start", stream), training=settings
    )
    return RunConfig(**{**vars(base), **changes})


def finish(config: RunConfig, root: Path) -> list[dict[str, Any]]:
    outcome = execute(config, root)
    assert outcome.status == "finished", outcome.error
    return RunFolder(root, config).records()


@pytest.mark.parametrize("changes", [{}, {"measures": ("weight_l2",)}, {"fresh": True}])
def test_the_last_checkpoint_changes_nothing(texts: Part, tmp_path: Path, changes: dict[str, Any]) -> None:
    shared, alone = (run_of(texts, checkpoint, **changes) for checkpoint in ("last", None))
    assert finish(shared, tmp_path) == finish(alone, tmp_path)


def test_an_earlier_checkpoint_is_a_shorter_first_task(texts: Part, tmp_path: Path) -> None:
    middle, short = finish(run_of(texts, "middle"), tmp_path), finish(run_of(texts, None, EPOCHS // 2), tmp_path)
    assert [record["loss"] for record in middle] == [record["loss"] for record in short]
    assert [record["test_loss"] for record in middle] == [record["test_loss"] for record in short]
    best = [record for record in finish(run_of(texts, "best"), tmp_path) if record["task"] == 0]
    whole = [record for record in finish(run_of(texts, "last"), tmp_path) if record["task"] == 0]
    assert best == whole[: len(best)]
    assert best[-1]["test_loss"] == min(record["test_loss"] for record in whole)


def test_all_methods_share_one_first_task_per_seed(
    texts: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    append = RunFolder.append

    def count(self: RunFolder, record: dict[str, Any]) -> None:
        append(self, record)
        if "first_tasks" in self.path.parts:
            trained.append(record["epoch"])

    monkeypatch.setattr(RunFolder, "append", count)
    arms = {"plain": (), "fire": (Part("fire"),), "l2_init": (Part("l2_init", {"lam": 0.1}),)}
    records = {
        (label, seed): finish(run_of(texts, checkpoint, label=label, methods=methods, seed=seed), tmp_path)
        for label, methods in arms.items()
        for seed in (0, 1)
        for checkpoint in ("last", "best")
    }
    assert trained == [*range(1, EPOCHS + 1)] * 2
    for seed in (0, 1):
        first = [[record for record in records[label, seed] if record["task"] == 0] for label in arms]
        second = [records[label, seed][-1]["test_loss"] for label in arms]
        assert first[0] == first[1] == first[2]
        assert len(set(second)) == 3
    assert records["plain", 0] != records["plain", 1]


def test_seconds_steps_and_tokens_are_those_of_the_second_task(texts: Part, tmp_path: Path) -> None:
    config = run_of(texts, "last")
    steps = [record["step"] for record in finish(config, tmp_path)]
    end = load_runs(tmp_path)[0].events[-1]
    assert end["steps"] == steps[-1] - steps[EPOCHS - 1]
    assert end["tokens_per_step"] == 8 * 16
    assert end["tokens_per_second"] == round(8 * 16 * end["steps"] / end["seconds"])


def test_penalties_pull_toward_the_untrained_network(texts: Part, tmp_path: Path) -> None:
    reset = (Part("shrink_perturb", {"lam": 1.0}),)
    untrained = finish(run_of(texts, "last", methods=reset), tmp_path)
    (task, receipts) = next((record["task"], record["receipts"]) for record in untrained if record["receipts"])
    assert (task, len(receipts)) == (1, 1)
    shared, alone = (run_of(texts, checkpoint, methods=reset) for checkpoint in ("last", None))
    assert finish(shared, tmp_path) == finish(alone, tmp_path)


@pytest.mark.parametrize("step", [9, 30], ids=["in the first task", "in the second task"])
def test_a_killed_run_resumes_bit_for_bit(texts: Part, tmp_path: Path, step: int) -> None:
    network = "gpt(shape, classes, depth=1, width=16, heads=2)"
    (tmp_path / "own.py").write_text(
        "import itertools, os, sys, time\n"
        "from pathlib import Path\n"
        "from pliant.models import gpt\n"
        f"FOLDER = Path({str(tmp_path)!r})\n"
        "STEPS = sys.__dict__.setdefault('steps_of_all_networks', itertools.count(1))\n"
        "def build(shape, classes):\n"
        f"    network = {network}\n"
        "    def wait(module, inputs):\n"
        f"        if module.training and next(STEPS) == {step}:\n"
        "            (FOLDER / f'{os.getpid()}.waits').touch()\n"
        "            until = time.monotonic() + 600\n"
        "            while not (FOLDER / 'go').exists() and time.monotonic() < until:\n"
        "                time.sleep(0.05)\n"
        "    network.register_forward_pre_hook(wait)\n"
        "    return network\n"
    )
    config = run_of(texts, "middle", model=Part(f"{tmp_path / 'own.py'}:build"), methods=(Part("l2_init"),))
    interrupt(config, tmp_path)
    finish(config, tmp_path)
    finish(config, tmp_path / "whole")
    assert outputs(tmp_path, config) == outputs(tmp_path / "whole", config)
    (first,) = load_runs(tmp_path / "first_tasks")
    resumed = "resume" in [event["event"] for event in load_runs(tmp_path)[0].events]
    assert resumed == (step == 30)
    assert first.status == "finished"


def test_a_damaged_checkpoint_is_trained_again_with_a_word(texts: Part, tmp_path: Path) -> None:
    config = run_of(texts, "middle")
    before = finish(config, tmp_path)
    (file,) = (tmp_path / "first_tasks" / "middle").rglob("checkpoint-*.pt")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    (RunFolder(tmp_path, config).path / "result.json").unlink()
    outcome = execute(config, tmp_path)
    assert outcome.status == "finished", outcome.error
    assert "is rejected (ValueError: the content is not what was saved)" in outcome.notes[0]
    assert RunFolder(tmp_path, config).records() == before


def test_a_first_task_that_diverges_ends_all_runs(texts: Part, tmp_path: Path) -> None:
    wild = Settings("sgd", lr=1e30, batch_size=16)
    for label in ("one", "other"):
        outcome = execute(run_of(texts, "last", label=label, training=wild), tmp_path)
        assert outcome.status == "diverged", outcome.error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["crelu"]}, "crelu changes the network, which the checkpoint then does not fit"),
        ({"stream": {"name": "text_warm_start", "checkpoint": "first"}}, "stream.checkpoint is 'first'"),
    ],
)
def test_wrong_recipes_are_refused(texts: Part, changes: dict[str, Any], message: str) -> None:
    values = {
        "data": {"name": texts.name}, "model": "gpt", "methods": ["vanilla"],
        "stream": {"name": "text_warm_start", "checkpoint": "best"},
    }  # fmt: skip
    with pytest.raises(RecipeError, match=message):
        make_recipe({**values, **changes})
