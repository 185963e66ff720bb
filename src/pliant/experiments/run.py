"""Do one run: from its configuration to its result, from wherever it stopped before."""

import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pliant import data, methods, models, streams
from pliant.experiments.config import Part, RunConfig
from pliant.experiments.files import BusyError
from pliant.experiments.store import FINAL, RunFolder, Status, environment
from pliant.graph.layers import called_layers
from pliant.seeding import derive_seed, seed_everything
from pliant.streams.base import Stream
from pliant.training import DivergedError, Learner, summarise, train


def execute(config: RunConfig, root: Path, checkpoint_seconds: float = 30.0) -> Status | None:
    """Do a run unless it is done; go on where it stopped if it was begun.

    Args:
        config: The run.
        root: The experiment's folder.
        checkpoint_seconds: Time between two checkpoints, at least; one is only saved at the end of an epoch.

    Returns:
        How the run ended; None if another process is at work on it.
    """
    try:
        with RunFolder(root, config).open() as folder:
            if (status := folder.status) in FINAL:
                return status
            folder.note("start", environment=environment())
            try:
                result = _train(config, folder, checkpoint_seconds)
            except DivergedError as error:
                status = "diverged"
                folder.finish(status, {}, str(error))
            except Exception:
                status = "failed"
                folder.finish(status, {}, traceback.format_exc())
            else:
                status = "finished"
                folder.finish(status, result)
                folder.drop_checkpoints()
            folder.note("end", status=status)
            return status
    except BusyError:
        return None


def _train(config: RunConfig, folder: RunFolder, checkpoint_seconds: float) -> dict[str, float]:
    seed_everything(config.seed)
    stream = make_stream(config)
    learner = make_learner(config, stream)
    state = folder.load_checkpoint()
    records: list[dict[str, Any]] = []
    if state is not None:
        learner.load_state_dict(state["learner"])
        records = state["ends"]
        folder.note("resume", task=learner.task, epoch=learner.epoch)
    saved = time.monotonic()
    fresh = (lambda task: make_model(config, stream, task)) if config.fresh else None
    for record in train(learner, stream, config.seed, fresh=fresh):
        folder.append(record)
        if "task_online_accuracy" in record:
            records.append(record)
        if time.monotonic() - saved >= checkpoint_seconds:
            folder.save_checkpoint({"learner": learner.state_dict(), "ends": records}, learner.step)
            saved = time.monotonic()
    return summarise(records)


def make_stream(config: RunConfig) -> Stream:
    """Make what the run's network meets."""
    dataset = data.load(config.data.name, **config.data.options)
    if config.purpose == "selection":
        dataset = dataset.holdout(config.holdout, config.seed)
    dataset = dataset.to(config.device)
    return streams.create(config.stream.name, dataset, config.seed, **config.stream.options)


def make_model(config: RunConfig, stream: Stream, task: int = 0) -> nn.Module:
    """Make the run's untrained network; another one for every task that is asked for."""
    seed = config.seed if task == 0 else derive_seed("task", config.seed, task)
    model = models.create(config.model.name, stream.dataset.shape, stream.classes, seed=seed, **config.model.options)
    return model.to(config.device)


def make_learner(config: RunConfig, stream: Stream) -> Learner:
    """Make the network with its methods and its optimizer."""
    model = make_model(config, stream)
    example, _ = stream[0].train.batch(torch.arange(2, device=config.device))

    def make_method(part: Part) -> methods.Method:
        seed = derive_seed("method", config.seed)
        return methods.create(part.name, model, example=example, **{"seed": seed} | part.options)

    # Before the optimizer: some change the network itself.
    attached = [make_method(part) for part in config.methods]
    head = None
    if stream.renews_head:
        output = called_layers(model, example)[-1].name
        head = methods.HeadReset(model, head=[output], seed=derive_seed("head", config.seed))
    return Learner(model, config.training, attached, head)
