"""Runs whose second task starts from a checkpoint of the first task: FIRE §4.2's best, middle and last.

    ROOT/first_tasks/runs/RUN                    the training on the first task, without methods
    ROOT/first_tasks/{best,middle,last}/runs/RUN the checkpoints that it leaves

The first task is trained once for each seed, by the run that needs it first. All other runs of that seed wait for it,
then start from its checkpoints.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pliant._seeding import set_random_state
from pliant.experiments.run import SupervisedSession
from pliant.experiments.run_config import Part, RunConfig
from pliant.experiments.store import RunFolder, environment
from pliant.streams.language import CHECKPOINTS
from pliant.training import DivergedError, Record, count_steps, summarize, train

_FIRST_TASKS = "first_tasks"


class SharedStartSession(SupervisedSession):
    """A network that learns the second task of a stream, from a checkpoint of the first.

    Args:
        config: The run.
        root: The folder of the experiment, for the first task.
    """

    def __init__(self, config: RunConfig, root: Path) -> None:
        super().__init__(config)
        state, self._first_records, notes = load_start(config, root, config.stream.options["checkpoint"])
        self.notes += notes
        learner = self.learner
        learner.model.load_state_dict(state["model"])
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.task, learner.step = 1, state["position"]["step"]
        first = self.stream[0]
        self._left_out = count_steps(first, config.training) * first.epochs - learner.step
        set_random_state(state["random"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; raise a KeyError, TypeError or ValueError if it does not fit."""
        super().load_state_dict(state)
        self._first_records = []

    def _check_position(self, position: Mapping[str, Any]) -> None:
        super()._check_position({**position, "step": position["step"] + self._left_out})

    def run(self, append: Callable[[Record], None], save: Callable[[], None]) -> None:
        """Train on the second task to its end. The records of the first task come first."""
        for record in self._first_records:
            append(record)
        super().run(append, save)


def load_start(
    config: RunConfig, root: Path, checkpoint: str, checkpoint_seconds: float = 30.0
) -> tuple[dict[str, Any], list[Record], list[str]]:
    """Train the first task, or read a checkpoint of it if it is done.

    Args:
        config: The run that needs it.
        root: The folder of the experiment.
        checkpoint: One of `CHECKPOINTS`.
        checkpoint_seconds: The least time between two checkpoints of the training itself.

    Returns:
        The learner's state at the checkpoint, the records up to there, and one message for each damaged file.

    Raises:
        DivergedError: If the first task diverged.
    """
    options = {name: value for name, value in config.stream.options.items() if name != "checkpoint"}
    stream = Part(config.stream.name, options)
    first = replace(config, label="first task", methods=(), fresh=False, stream=stream)
    whole = RunFolder(root / _FIRST_TASKS, first)
    kept: dict[str, RunFolder] = {name: RunFolder(root / _FIRST_TASKS / name, first) for name in CHECKPOINTS}
    found: dict[str, Any] = {}
    with whole.open(patience=math.inf):  # Another run of the same seed may be training it.
        session = SupervisedSession(first)
        if whole.status == "diverged":
            raise DivergedError("the first task diverged")
        if whole.status != "finished" or not _read(kept[checkpoint], found, session):
            _train_first_task(session, whole, kept, checkpoint_seconds)
            _read(kept[checkpoint], found, session)
        troubles = [*whole.troubles, *kept[checkpoint].troubles]
        return found, whole.records()[: found["position"]["epoch"]], troubles


def _read(folder: RunFolder, found: dict[str, Any], session: SupervisedSession) -> bool:
    with folder.open():
        return folder.load_checkpoint(found.update, session.sources)


def _train_first_task(
    session: SupervisedSession, whole: RunFolder, kept: dict[str, RunFolder], checkpoint_seconds: float
) -> None:
    """Train the first task to its end, and keep the checkpoints of `CHECKPOINTS`."""
    whole.start(environment())
    if not whole.load_checkpoint(session.load_state_dict, session.sources) and whole.troubles:
        session = SupervisedSession(session.config)  # The failed loading may have changed the session.
    learner, epochs = session.learner, session.stream[0].epochs
    best = min((record["test_loss"] for record in whole.records() if "test_loss" in record), default=math.inf)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        if time.monotonic() - saved >= checkpoint_seconds:
            whole.save_checkpoint(learner.state_dict(), session.position["step"], session.sources)
            saved = time.monotonic()

    learner.after_step = save
    try:
        for record in train(learner, session.stream, session.config.seed) if learner.epoch < epochs else ():
            whole.append(record)
            loss = record.get("test_loss", math.inf)
            due = {"best": loss < best, "middle": learner.epoch == (epochs + 1) // 2, "last": learner.epoch == epochs}
            best = min(best, loss)
            for name in (name for name in CHECKPOINTS if due[name]):
                with kept[name].open():
                    kept[name].drop_checkpoints()
                    kept[name].save_checkpoint(learner.state_dict(), learner.epoch, session.sources)
            save()
            if learner.epoch == epochs:
                break
    except DivergedError as error:
        whole.finish("diverged", {}, str(error))
        raise
    whole.finish("finished", summarize(whole.records()))
    whole.drop_checkpoints()
