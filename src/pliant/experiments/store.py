"""Runs on disk: a folder each, written by one process at a time, readable by anyone at any moment.

    ROOT/recipe.json            what was asked for
    ROOT/selection.json         which settings were chosen, and by what scores
    ROOT/runs/RUN/config.json   the run, completely
                 /metrics.jsonl a line after every epoch
                 /result.json   how it ended; there once it has
                 /events.jsonl  what happened to it: starts, resumes, trouble, with time and place
                 /checkpoint-STEPS-DIGEST.pt

Metrics and results hold nothing that depends on time or place: an interrupted run and one that was not have
equal bytes there.
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
"""More bytes than most lines of metrics have."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)-([0-9a-f]{32})\.pt")


@dataclass(frozen=True)
class Run:
    """A run as it is on disk.

    Args:
        path: Its folder.
        config: Its configuration.
        status: How it ended, or "unfinished".
        result: Its numbers; empty unless it finished.
        error: What went wrong, with the traceback; empty if nothing did.
    """

    path: Path
    config: RunConfig
    status: Status
    result: dict[str, float]
    error: str

    @property
    def id(self) -> str:
        """The run's name."""
        return self.path.name

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The metrics, a record an epoch, as far as the run has come."""
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """What happened to the run."""
        return read_lines(self.path / "events.jsonl")

    @property
    def progress(self) -> float:
        """How much of the run is done, in [0, 1]."""
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
    """Read what the experiment was asked to do."""
    with _naming(Path(root) / "recipe.json", "run the recipe again with this folder as --out to write it anew") as file:
        return dict(json.loads(file.read_bytes()))


def load_selection(root: Path) -> dict[str, Any]:
    """Read which settings were chosen for each label; empty if there was nothing to choose."""
    path = Path(root) / "selection.json"
    if not path.exists():
        return {}
    with _naming(path, "remove it, and run the experiment again to choose"):
        return dict(json.loads(path.read_bytes()))


def load_run(path: Path) -> Run | None:
    """Read the run in a folder; None if there is none, or it is just being made."""
    # One file tells all about a run that ended, so that ten thousand of them load in seconds.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(path / "result.json") as file:
        end = json.loads(file.read_bytes())
        return Run(path, RunConfig.from_dict(end["config"]), end["status"], end["result"], end["error"])
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(path / "config.json") as file:
        config = RunConfig.from_dict(json.loads(file.read_bytes()))
        return Run(path, config, "unfinished", {}, "")
    return None


@contextlib.contextmanager
def _naming(file: Path, advice: str = "remove it, or its folder") -> Iterator[Path]:
    """Say which file it is that cannot be understood, and what to do about it."""
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
    """Return how far the run in a folder is, in [0, 1], from the end of its metrics alone."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            size, tail, lines = os.fstat(file.fileno()).st_size, _TAIL, [b""]
            while len(lines) < 3 and tail < 2 * max(size, _TAIL):  # Until the last line is whole, or all is read.
                file.seek(max(0, size - tail))
                lines, tail = file.read().split(b"\n"), 2 * tail
    except FileNotFoundError:
        return 0.0
    try:
        return float(json.loads(lines[-2])["progress"]) if len(lines) > 1 else 0.0
    except (ValueError, KeyError, TypeError):  # whoever goes on with the run cuts off what is damaged
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
        """Make the folder if need be, and keep every other writer out of it.

        Args:
            patience: How many seconds to wait for another writer to leave.

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
        """How the run ended, or "unfinished": also if its files are damaged, as the next attempt writes them anew."""
        try:
            run = load_run(self.path)
        except ValueError:
            return "unfinished"
        return run.status if run else "unfinished"

    def start(self, environment: dict[str, Any]) -> None:
        """Begin an attempt: how an earlier one ended no longer counts."""
        (self.path / "result.json").unlink(missing_ok=True)
        self.note("start", environment=environment)

    def records(self) -> list[dict[str, Any]]:
        """The metrics written so far."""
        return read_lines(self.path / "metrics.jsonl")

    def note(self, what: str, **details: Any) -> None:
        """Add to the log of what happened to the run."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._append("events.jsonl", {"time": now, "event": what, **details})

    def append(self, record: dict[str, Any]) -> None:
        """Add an epoch's record to the metrics."""
        self._append("metrics.jsonl", record)

    def finish(self, status: Status, result: dict[str, float], error: str = "") -> None:
        """Write down how the run ended."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            sync(metrics)
        end = {"config": json.loads(self.config.to_json()), "status": status, "result": result, "error": error}
        write_atomically(self.path / "result.json", json.dumps(end, sort_keys=True, allow_nan=False).encode())

    def save_checkpoint(self, state: dict[str, Any], number: int, sources: dict[str, str]) -> None:
        """Save a state, and keep the one before it in case this one goes bad.

        Args:
            state: Tensors and plain types.
            number: Grows from checkpoint to checkpoint.
            sources: Digests of what the state was made of.
        """
        metrics = self.path / "metrics.jsonl"
        sync(metrics)  # A checkpoint must not outlive the metrics that it counts on.
        buffer = io.BytesIO()
        torch.save({"state": state, "metrics_bytes": metrics.stat().st_size, "sources": sources}, buffer)
        content = buffer.getvalue()
        digest = hashlib.sha256(content).hexdigest()[:32]
        write_atomically(self.path / f"checkpoint-{number:012d}-{digest}.pt", content)
        for old in self._checkpoints()[2:]:
            old.unlink()

    def load_checkpoint(self, load: Callable[[dict[str, Any]], None], sources: dict[str, str]) -> bool:
        """Load the newest state that is sound and can be loaded, and cut the metrics back to where it was saved.

        Args:
            load: What takes a state. It raises a KeyError, TypeError or ValueError if the state does not fit, as one
                that another version saved may not.
            sources: Digests of what the run is made of now; a state that was made of something else is not taken.

        Returns:
            Whether there is one; if not, no metrics are left.
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
                # It is damaged or does not fit. All else may pass: full memory, a disk that does not answer.
                self._distrust(path, error)
                continue
            os.truncate(metrics, size)
            return True
        metrics.unlink(missing_ok=True)
        return False

    def drop_checkpoints(self) -> None:
        """Remove all checkpoints, those that were put aside too."""
        for path in (*self._checkpoints(), *self.path.glob("checkpoint-*.bad")):
            path.unlink()

    def _distrust(self, path: Path, error: Exception) -> None:
        """Put a checkpoint aside and say so."""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self.note("bad checkpoint", file=path.name, reason=reason)
        self.troubles.append(f"{path} is no good ({reason}) and is put aside")
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
    """Cut off what a crash left of a last line, so that the next one starts on its own."""
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
    """Describe where this process does its runs."""
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
