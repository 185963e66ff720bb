"""Measure how long a run takes, and what its methods add to that, from a few steps in this process."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from pliant.experiments.run import make_learner
from pliant.experiments.run_config import RunConfig
from pliant.streams.stream import Stream, Task
from pliant.training import begin_task, evaluate, train_epoch

_BATCHES = 8
"""The batches that are timed at a time."""
_REPEATS = 5
_STARTS = 3


def time_run(config: RunConfig, stream: Stream) -> float:
    """Return about how many seconds a run with a single task takes, on one thread.

    Args:
        config: The run.
        stream: Its stream.
    """
    task, short = stream[0], _shorten(stream[0], config)
    trained, evaluated = [], []
    with _one_thread():
        learner = make_learner(config, stream)
        train_epoch(learner, short, config.seed)  # The first steps also allocate and import.
        for _ in range(_REPEATS):
            trained.append(_time(partial(train_epoch, learner, short, config.seed)))
            evaluated.append(_time(partial(evaluate, learner.model, short.train, config.training.batch_size)))
    evaluations = math.ceil(task.epochs / config.training.evaluate_every)
    tested = sum(len(examples) for examples in (task.test, learner.old_test) if examples is not None)
    train_seconds = task.epochs * len(task.train) * statistics.median(trained)
    return (train_seconds + evaluations * tested * statistics.median(evaluated)) / len(short.train)


def time_methods(config: RunConfig, stream: Stream) -> float:
    """Return the time of a run relative to the same run without its methods.

    Starts and steps with and without the methods alternate, so that other programs on the machine slow both alike.

    Args:
        config: The run, which starts from a checkpoint.
        stream: Its stream, of a single task.
    """
    task, short = stream[0], _shorten(stream[0], config)
    with _one_thread():
        acted = []
        for _ in range(_STARTS):
            plain, treated = (make_learner(each, stream) for each in (replace(config, methods=()), config))
            acted.append(_time(partial(begin_task, treated, task)) - _time(partial(begin_task, plain, task)))
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(_REPEATS + 1):
            for learner in (plain, treated):
                taken = _time(partial(train_epoch, learner, short, config.seed))
                if repeat:  # The first steps also allocate.
                    times[learner is treated].append(taken)
    without, with_methods = statistics.median(times[False]), statistics.median(times[True])
    steps = task.epochs * len(task.train) / len(short.train)
    return (with_methods * steps + max(statistics.median(acted), 0.0)) / (without * steps)


def _shorten(task: Task, config: RunConfig) -> Task:
    """Return the first batches of a task."""
    count = min(len(task.train), _BATCHES * config.training.batch_size)
    index = torch.arange(count, device=task.train.y.device)
    return Task(0, task.train.select(index), None, 1, frozenset())


def _time(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
