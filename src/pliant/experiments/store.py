"""Runs on disk: one folder a run, written by one process at a time, readable at any moment.

    ROOT/recipe.json            the experiment
    ROOT/selection.json         the chosen settings, with all scores
    ROOT/runs/RUN/config.json   the complete configuration of the run
                 /metrics.jsonl one line an epoch
                 /result.json   how it ended
                 /events.jsonl  starts, resumes and problems, with time and host
                 /checkpoint-STEPS-DIGEST.pt

Metrics and results do not depend on time or host: an interrupted and resumed run writes the same bytes as an
uninterrupted one.
"""

import contextlib
import datetime
import functools
import hashlib
import io
import json
import os
import pickle
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from pliant._files import exclusive, sync, write_atomically
from pliant._version import __version__
from pliant.experiments.run_config import RunConfig

Status = Literal["finished", "diverged", "failed", "unfinished"]
FINAL: frozenset[Status] = frozenset({"finished", "diverged"})
"""Ends that another attempt would not change."""
Sources = dict[str, str]
"""Digests of the user's own "data" and "model", which may change behind their names."""

_TAIL = 65536
"""Bytes to read first from the end of the metrics; most lines are shorter."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)-([0-9a-f]{32})\.pt")


@dataclass(frozen=True)
class Run:
    """A run on disk.

    Args:
        path: Its folder.
        config: Its configuration.
        status: How it ended, or "unfinished".
        result: Its results; empty unless it finished.
        error: The error with its traceback; empty without an error.
    """

    path: Path
    config: RunConfig
    status: Status
    result: dict[str, float]
    error: str

    @property
    def id(self) -> str:
        """The id of the run: the name of its folder."""
        return self.path.name

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The metrics so far, one record an epoch."""
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The log of the run."""
        return read_lines(self.path / "events.jsonl")

    @property
    def progress(self) -> float:
        """The part of the run that is done, in [0, 1]."""
        return 1.0 if self.status in FINAL else last_progress(self.path)


def load_runs(root: Path) -> list[Run]:
    """Read all runs of an experiment, finished or not, in order of their names.

    Args:
        root: The experiment's folder.

    Returns:
        The runs; their records and events are read when asked for.
    """
    folder = Path(root) / "runs"
    if not folder.is_dir():
        raise ValueError(f"{root} holds no experiment: there is no folder 'runs' in it")
    runs = (load_run(Path(entry.path)) for entry in sorted(os.scandir(folder), key=lambda entry: entry.name))
    return [run for run in runs if run is not None]


def load_recipe_values(root: Path) -> dict[str, Any]:
    """Read the recipe of an experiment."""
    with _naming(Path(root) / "recipe.json", "run the recipe again with this folder as --out to write it anew") as file:
        return dict(json.loads(file.read_bytes()))


def load_selection(root: Path) -> dict[str, Any]:
    """Read the chosen settings of each label; empty without grids."""
    path = Path(root) / "selection.json"
    if not path.exists():
        return {}
    with _naming(path, "remove it, and run the experiment again to choose"):
        return dict(json.loads(path.read_bytes()))


def load_run(path: Path) -> Run | None:
    """Read the run in a folder; None if the folder does not hold a run yet."""
    # One file describes an ended run, so that ten thousand runs load in seconds.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(path / "result.json") as file:
        end = json.loads(file.read_bytes())
        return Run(path, RunConfig.from_dict(end["config"]), end["status"], end["result"], end["error"])
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(path / "config.json") as file:
        config = RunConfig.from_dict(json.loads(file.read_bytes()))
        return Run(path, config, "unfinished", {}, "")
    return None


@contextlib.contextmanager
def _naming(file: Path, advice: str = "remove it, or its folder") -> Iterator[Path]:
    """Name a damaged file in the error, and what to do about it."""
    try:
        yield file
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error}); {advice}") from error


def read_sources(run: Run) -> dict[tuple[str, str], str]:
    """Return the digests that a run's log holds, by kind and name, e.g. ("data", "photos/")."""
    with contextlib.suppress(ValueError, KeyError, OSError):  # A damaged log holds none.
        then: Sources = next((event["sources"] for event in reversed(run.events) if "sources" in event), {})
        return {(kind, str(getattr(run.config, kind))): digest for kind, digest in then.items()}
    return {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines that may be missing, or end in the middle of a line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    with _naming(path):
        return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]


def last_progress(path: Path) -> float:
    """Return the progress of the run in a folder, in [0, 1], from the last line of its metrics."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            size, tail, lines = os.fstat(file.fileno()).st_size, _TAIL, [b""]
            while len(lines) < 3 and tail < 2 * max(size, _TAIL):  # until the last line is complete, or all is read
                file.seek(max(0, size - tail))
                lines, tail = file.read().split(b"\n"), 2 * tail
    except FileNotFoundError:
        return 0.0
    try:
        return float(json.loads(lines[-2])["progress"]) if len(lines) > 1 else 0.0
    except (ValueError, KeyError, TypeError):  # Resuming the run removes the damaged end.
        return 0.0


class RunFolder:
    """The writer's side of one run's folder.

    Args:
        root: The experiment's folder.
        config: The run.
    """

    def __init__(self, root: Path, config: RunConfig) -> None:
        self.path = Path(root) / "runs" / config.id
        self.config = config
        self.troubles: list[str] = []

    @contextlib.contextmanager
    def open(self, patience: float = 0.0) -> Iterator["RunFolder"]:
        """Make the folder if needed, and lock it against other writers.

        Args:
            patience: Seconds to wait for another writer.

        Raises:
            BusyError: If another process writes there.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / "lock", patience):
            for leftover in self.path.glob(".*.tmp"):
                leftover.unlink()
            _drop_torn_line(self.path / "events.jsonl")
            self._write_config()
            yield self

    @property
    def status(self) -> Status:
        """How the run ended; "unfinished" too if its files are damaged, as the next attempt writes them again."""
        try:
            run = load_run(self.path)
        except ValueError:
            return "unfinished"
        return run.status if run else "unfinished"

    def start(self, environment: dict[str, Any]) -> None:
        """Begin an attempt; remove the result of an earlier one."""
        (self.path / "result.json").unlink(missing_ok=True)
        self.note("start", environment=environment)

    def records(self) -> list[dict[str, Any]]:
        """The metrics written so far."""
        return read_lines(self.path / "metrics.jsonl")

    def note(self, what: str, **details: Any) -> None:
        """Add an event to the log."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._append("events.jsonl", {"time": now, "event": what, **details})

    def append(self, record: dict[str, Any]) -> None:
        """Add an epoch's record to the metrics."""
        self._append("metrics.jsonl", record)

    def finish(self, status: Status, result: dict[str, float], error: str = "") -> None:
        """Write the result."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            sync(metrics)
        end = {"config": json.loads(self.config.to_json()), "status": status, "result": result, "error": error}
        write_atomically(self.path / "result.json", json.dumps(end, sort_keys=True, allow_nan=False).encode())

    def save_checkpoint(self, state: dict[str, Any], number: int, sources: dict[str, str]) -> None:
        """Save a checkpoint, and keep the one before it in case this one is damaged.

        Args:
            state: Tensors and plain types.
            number: Grows from checkpoint to checkpoint.
            sources: Digests of data and code.
        """
        metrics = self.path / "metrics.jsonl"
        sync(metrics)  # The metrics must be on disk before the checkpoint.
        buffer = io.BytesIO()
        torch.save({"state": state, "metrics_bytes": metrics.stat().st_size, "sources": sources}, buffer)
        content = buffer.getvalue()
        digest = hashlib.sha256(content).hexdigest()[:32]
        write_atomically(self.path / f"checkpoint-{number:012d}-{digest}.pt", content)
        for old in self._checkpoints()[2:]:
            old.unlink()

    def load_checkpoint(self, load: Callable[[dict[str, Any]], None], sources: dict[str, str]) -> bool:
        """Load the newest valid checkpoint, and truncate the metrics to where it was saved.

        Args:
            load: Loads a state. It raises a KeyError, TypeError or ValueError if the state does not fit.
            sources: Digests of data and code now; a checkpoint with others is rejected.

        Returns:
            Whether a checkpoint was loaded; if not, the metrics are removed.
        """
        metrics = self.path / "metrics.jsonl"
        written = metrics.stat().st_size if metrics.exists() else 0
        for path in self._checkpoints():
            try:
                checkpoint = _read_checkpoint(path)
                size = checkpoint["metrics_bytes"]
                if written < size:
                    raise ValueError(f"{metrics.name} is shorter than when the checkpoint was saved")
                then = checkpoint["sources"]
                if changed := [kind for kind, digest in sources.items() if then.get(kind, digest) != digest]:
                    raise ValueError(f"the {' and the '.join(changed)} changed since it was saved")
                load(checkpoint["state"])
            except (KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
                # Damaged, or it does not fit. Other errors may be temporary: full memory, a disk that does not answer.
                self._distrust(path, error)
                continue
            os.truncate(metrics, size)
            return True
        metrics.unlink(missing_ok=True)
        return False

    def drop_checkpoints(self) -> None:
        """Remove all checkpoints, rejected ones too."""
        for path in (*self._checkpoints(), *self.path.glob("checkpoint-*.bad")):
            path.unlink()

    def _distrust(self, path: Path, error: Exception) -> None:
        """Set a checkpoint aside and log it."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.note("bad checkpoint", file=path.name, reason=reason)
        self.troubles.append(f"{path} is rejected ({reason}) and set aside")
        path.replace(path.with_suffix(".bad"))

    def _checkpoints(self) -> list[Path]:
        """The checkpoints, newest first."""
        found = (path for path in self.path.glob("checkpoint-*.pt") if _CHECKPOINT.fullmatch(path.name))
        return sorted(found, reverse=True)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.path / name).open("ab") as file:
            file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _write_config(self) -> None:
        path, content = self.path / "config.json", self.config.to_json().encode()
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)


def _drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line that a crash left."""
    with contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    if hashlib.sha256(content).hexdigest()[:32] != match.group(2):
        raise ValueError("the content is not what was saved")
    checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return dict(checkpoint)


@functools.cache
def environment() -> dict[str, Any]:
    """Describe the environment of this process."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "pliant": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "git": _git_state(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _git_state() -> str | None:
    """The commit of the current folder, marked if files differ from it; None outside a repository."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
