"""Execute many runs: start them, retry them, report progress."""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Protocol

from pliant._files import BusyError
from pliant._validation import check_number
from pliant.experiments.engines import Engine, Job, WorkerDiedError
from pliant.experiments.run import Outcome
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import FINAL, RunFolder, Status

_TICK = 0.5


class Watcher(Protocol):
    """Follows the progress of runs."""

    def begin(self, waiting: Sequence[RunConfig], done: Sequence[RunConfig]) -> None:
        """Runs are about to start; some are done already."""

    def tick(self, active: Iterable[RunConfig]) -> None:
        """Time has passed while these runs are active."""

    def ended(self, config: RunConfig, outcome: Outcome) -> None:
        """A run ended."""


def run_all(
    configs: Sequence[RunConfig],
    root: Path,
    engine: Engine,
    watcher: Watcher,
    *,
    checkpoint_seconds: float = 30.0,
    retries: int = 2,
) -> dict[str, Status]:
    """Do all runs that are not done yet. A run that fails does not stop the others.

    Args:
        configs: The runs.
        root: The folder of the experiment.
        engine: Executes the runs.
        watcher: Follows their progress.
        checkpoint_seconds: The least time between two checkpoints of a run.
        retries: The number of retries of a run whose process died.

    Returns:
        How each run ended, by its id. Runs that another command on the same folder executes are awaited.
    """
    if checkpoint_seconds != math.inf:  # math.inf: no checkpoints
        check_number("checkpoint_seconds", checkpoint_seconds)
    root = root.resolve()
    statuses = {config.id: RunFolder(root, config).status for config in configs}
    waiting = deque(config for config in configs if statuses[config.id] not in FINAL)
    watcher.begin(list(waiting), [config for config in configs if statuses[config.id] in FINAL])
    active: dict[Future[Outcome], RunConfig] = {}
    elsewhere: deque[RunConfig] = deque()
    deaths: Counter[str] = Counter()

    while waiting or active or elsewhere:
        if not waiting and not active:
            time.sleep(_TICK)
            waiting, elsewhere = elsewhere, deque()
        while waiting and len(active) < engine.capacity():
            config = waiting.popleft()
            active[engine.submit(Job(config, root, checkpoint_seconds))] = config
        done, _ = wait(active, _TICK, FIRST_COMPLETED)
        for future in done:
            config = active.pop(future)
            try:
                outcome = future.result()
            except WorkerDiedError as error:
                deaths[config.id] += 1
                if deaths[config.id] <= retries:
                    waiting.append(config)
                    continue
                outcome = _give_up(root, config, f"died {retries + 1} times: {error}")
            if outcome.status is None:
                elsewhere.append(config)
                continue
            statuses[config.id] = outcome.status
            watcher.ended(config, outcome)
        watcher.tick(active.values())
    return statuses


def _give_up(root: Path, config: RunConfig, reason: str) -> Outcome:
    folder = RunFolder(root, config)
    try:
        # A killed process may hold its lock for another moment.
        with contextlib.suppress(OSError), folder.open(patience=5.0):
            if (status := folder.status) in FINAL:  # Another command finished it, or the process died after the end.
                return Outcome(status)
            folder.finish("failed", {}, reason)
    except BusyError:
        return Outcome(None)
    return Outcome("failed", reason)
