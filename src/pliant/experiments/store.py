"""Runs on disk: one folder a run, written by one process at a time, readable at any moment.

    ROOT/recipe.json            the experiment
    ROOT/selection.json         the chosen settings, with all scores
    ROOT/runs/RUN/config.json   the complete configuration of the run
                 /metrics.jsonl one line an epoch
                 /result.json   how it ended
                 /events.jsonl  starts, resumes and problems, with time and host
                 /checkpoint-STEPS-DIGEST.pt

Each file holds a digest of its content, and each line of metrics and events one of all lines so far. Damage is found
when a file is read. A writer repairs it: it goes back to the last good checkpoint, or does the run again.

Metrics and results do not depend on time or host: an interrupted and resumed run writes the same bytes as an
uninterrupted one.
"""

import contextlib
import datetime
import functools
import hashlib
import io
import json
import math
import os
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from pliant._files import exclusive, is_foreign, open_regular, read_regular, set_aside, sync, write_atomically
from pliant._json import parse_json, read_seal, seal, unseal
from pliant._torch_files import load_torch_file
from pliant._version import __version__
from pliant.experiments.journal import Journal
from pliant.experiments.run_config import RunConfig

Status = Literal["finished", "diverged", "failed", "unfinished"]
ENDS: tuple[Status, ...] = ("finished", "diverged", "failed")
"""How a run with a result.json ended."""
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
        metrics: The digest of the last line of its metrics when it ended; None if it has not.
    """

    path: Path
    config: RunConfig
    status: Status
    result: dict[str, float]
    error: str
    metrics: str | None = None

    @property
    def id(self) -> str:
        """The id of the run: the name of its folder."""
        return self.path.name

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The metrics so far, one record an epoch."""
        return read_records(self)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The log of the run."""
        with _naming(self.path / "events.jsonl") as file:
            return Journal.read(file).records()

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
    with _naming(Path(root) / "recipe.json", "run the recipe again with this folder as --out") as file:
        return unseal(read_regular(file))


def load_selection(root: Path) -> dict[str, Any]:
    """Read the chosen settings of each label; empty without grids."""
    path = Path(root) / "selection.json"
    if not path.exists():
        return {}
    with _naming(path, "remove it, and run the experiment again to choose"):
        return check_selection(unseal(read_regular(path)))


def check_selection(selection: dict[str, Any]) -> dict[str, Any]:
    """Return chosen settings; raise a ValueError, KeyError or TypeError if they are not what `choose` writes."""
    if selection["on"] not in ("validation", "test"):
        raise ValueError(f"on is {selection['on']!r}; it must be validation or test")
    for label, choice in selection["labels"].items():
        for name, value in choice["scores"].items():
            if value is not None:
                _check_number(f"the score of {name}", value)
        for name in ("seeds", "examples"):
            if choice[name] is not None and (not isinstance(choice[name], int) or choice[name] < 1):
                raise ValueError(f"{name} of {label} is {choice[name]!r}; it must be 1 or more")
        if choice["seeds"] is None or not isinstance(choice["chosen"], str):
            raise ValueError(f"the choice of {label} is incomplete")
    return selection


def load_run(path: Path) -> Run | None:
    """Read the run in a folder; None if the folder does not hold a run yet."""
    # One file describes an ended run, so that ten thousand runs load in seconds.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(path / "result.json") as file:
        return make_run(path, unseal(read_regular(file)))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), _naming(path / "config.json") as file:
        return Run(path, RunConfig.from_dict(unseal(read_regular(file))), "unfinished", {}, "")
    return None


def make_run(path: Path, end: dict[str, Any]) -> Run:
    """Make an ended run from the content of its `result.json`.

    Raises:
        ValueError: If a value is out of its range, also as a KeyError or TypeError.
    """
    status, result, error = end["status"], end["result"], end["error"]
    if status not in ENDS:
        raise ValueError(f"status is {status!r}; it must be one of {', '.join(ENDS)}")
    if bool(result) != (status == "finished"):
        raise ValueError(f"the run is {status} and has {len(result)} results; a run has results if it finished")
    for name, value in result.items():
        _check_number(name, value)
    if not isinstance(error, str) or not isinstance(end["metrics"], str):
        raise TypeError("error and metrics must be texts")
    return Run(path, RunConfig.from_dict(end["config"]), status, result, error, end["metrics"])


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")


@contextlib.contextmanager
def _naming(file: Path, advice: str = "remove it, or its folder") -> Iterator[Path]:
    """Name a damaged file in the error, and what to do about it."""
    try:
        yield file
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}: {error}); {advice}") from error


def read_sources(run: Run) -> dict[tuple[str, str], str]:
    """Return the digests that a run's log holds, by kind and name, e.g. ("data", "photos/")."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):  # A damaged log holds none.
        then: Sources = next((event["sources"] for event in reversed(run.events) if "sources" in event), {})
        return {(kind, str(getattr(run.config, kind))): digest for kind, digest in then.items()}
    return {}


def read_records(run: Run) -> list[dict[str, Any]]:
    """Read the metrics of a run, one record an epoch. They may end in the middle of a line while it is under way."""
    with _naming(run.path / "metrics.jsonl", "remove the run's folder, and run the experiment again") as file:
        journal = Journal.read(file)
        if run.metrics is not None and not journal.problem and journal.end != run.metrics:
            raise ValueError("it does not hold the lines that it held when the run ended")
        return journal.records()


def last_progress(path: Path) -> float:
    """Return the progress of the run in a folder, in [0, 1], from the last line of its metrics."""
    # Damage is not looked for here: this only moves a progress bar.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open_regular(path / "metrics.jsonl") as file:
            size, tail, lines = os.fstat(file.fileno()).st_size, _TAIL, [b""]
            while len(lines) < 3 and tail < 2 * max(size, _TAIL):  # until the last line is complete, or all is read
                file.seek(max(0, size - tail))
                lines, tail = file.read().split(b"\n"), 2 * tail
        return min(max(float(parse_json(lines[-2])["progress"]), 0.0), 1.0) if len(lines) > 1 else 0.0
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
        self._ends: dict[str, str] = {}
        """The digest of the last line of each journal that this writer appends to."""

    @contextlib.contextmanager
    def open(self, patience: float = 0.0) -> Iterator["RunFolder"]:
        """Make the folder if needed, lock it against other writers, and clear what is in the way of its files.

        Args:
            patience: Seconds to wait for another writer.

        Raises:
            BusyError: If another process writes there.
        """
        if self.path.is_symlink():  # What it leads to is not ours to write, and stays.
            self.path.unlink()
            self._tell(f"{self.path} was a link to another folder; it is removed, and the run gets its own folder")
        elif self.path.exists() and not self.path.is_dir():
            self._tell(f"{self.path} is not a folder; it is set aside as {set_aside(self.path).name}")
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear("lock")
        with exclusive(self.path / "lock", patience):
            for leftover in self.path.glob(".*.tmp"):
                self._clear(leftover.name)
                leftover.unlink(missing_ok=True)
            for name in _FILES:
                self._clear(name)
            self._repair_log()
            self._write_config()
            yield self

    @property
    def status(self) -> Status:
        """How the run ended; "unfinished" too if its files are damaged, as the next attempt writes them again."""
        if not self._has_config():
            return "unfinished"
        try:
            run = load_run(self.path)
            if run is not None and run.status in FINAL:
                journal = Journal.read(self.path / "metrics.jsonl")
                if journal.problem or journal.end != run.metrics:
                    raise ValueError(
                        f"{self.path / 'metrics.jsonl'} is damaged ({journal.problem or 'lines are missing'})"
                    )
        except ValueError as error:
            self._tell(f"{error}: the run is done again")
            return "unfinished"
        return run.status if run else "unfinished"

    def start(self, environment: dict[str, Any]) -> None:
        """Begin an attempt; remove the result of an earlier one."""
        (self.path / "result.json").unlink(missing_ok=True)
        self.note("start", environment=environment)

    def records(self) -> list[dict[str, Any]]:
        """The metrics written so far."""
        with _naming(self.path / "metrics.jsonl") as file:
            return Journal.read(file).records()

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
        end["metrics"] = self._end_of("metrics.jsonl")
        write_atomically(self.path / "result.json", seal(dict(sorted(end.items()))))

    def save_checkpoint(self, state: dict[str, Any], number: int, sources: dict[str, str]) -> None:
        """Save a checkpoint, and keep the one before it in case this one is damaged.

        Args:
            state: Tensors and plain types.
            number: Grows from checkpoint to checkpoint.
            sources: Digests of data and code.
        """
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            sync(metrics)  # The metrics must be on disk before the checkpoint.
        buffer = io.BytesIO()
        torch.save({"state": state, "metrics": self._end_of("metrics.jsonl"), "sources": sources}, buffer)
        content = buffer.getvalue()
        digest = hashlib.sha256(content).hexdigest()[:32]
        write_atomically(self.path / f"checkpoint-{number:012d}-{digest}.pt", content)
        _remove(self._checkpoints()[2:])

    def load_checkpoint(self, load: Callable[[dict[str, Any]], None], sources: dict[str, str]) -> bool:
        """Load the newest valid checkpoint, and truncate the metrics to where it was saved.

        Args:
            load: Loads a state. It raises an error if the state does not fit.
            sources: Digests of data and code now; a checkpoint with others is rejected.

        Returns:
            Whether a checkpoint was loaded; if not, the metrics are removed.
        """
        metrics = self.path / "metrics.jsonl"
        journal = Journal.read(metrics)
        if journal.problem:
            self._tell(f"{metrics} is damaged ({journal.problem})")
        for path in self._checkpoints():
            try:
                checkpoint = _read_checkpoint(path)
                size = journal.size(checkpoint["metrics"])
                if size is None:
                    raise ValueError(f"{metrics.name} does not hold what it held when the checkpoint was saved")
                then = checkpoint["sources"]
                if changed := [kind for kind, digest in sources.items() if then.get(kind, digest) != digest]:
                    raise ValueError(f"the {' and the '.join(changed)} changed since it was saved")
                load(checkpoint["state"])
            except Exception as error:
                self._distrust(path, error)
                continue
            if size:
                os.truncate(metrics, size)
            else:
                metrics.unlink(missing_ok=True)
            self._ends[metrics.name] = checkpoint["metrics"]
            return True
        metrics.unlink(missing_ok=True)
        self._ends[metrics.name] = ""
        return False

    def drop_checkpoints(self) -> None:
        """Remove all checkpoints, rejected ones too."""
        _remove([*self._checkpoints(), *self.path.glob("checkpoint-*.bad*")])

    def _distrust(self, path: Path, error: Exception) -> None:
        """Set a checkpoint aside that cannot be loaded.

        A lack of memory or a disk that does not answer may pass: then the error is raised, unless an earlier attempt
        met the same one.
        """
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, OSError | MemoryError) or "memory" in reason:
            known = Journal.read(self.path / "events.jsonl").records()
            if not any((event.get("file"), event.get("reason")) == (path.name, reason) for event in known):
                self.note("checkpoint not read", file=path.name, reason=reason)
                raise error
        self.note("bad checkpoint", file=path.name, reason=reason)
        self._tell(f"{path} is rejected ({reason}) and set aside")
        set_aside(path)

    def _checkpoints(self) -> list[Path]:
        """The checkpoints, newest first."""
        found = (path for path in self.path.glob("checkpoint-*.pt") if _CHECKPOINT.fullmatch(path.name))
        return sorted(found, reverse=True)

    def _clear(self, name: str) -> None:
        """Set aside a folder, link or pipe in the place of a file."""
        if is_foreign(self.path / name):
            self._tell(f"{self.path / name} is not a file; it is set aside as {set_aside(self.path / name).name}")

    def _repair_log(self) -> None:
        """Keep the intact lines of the log: a crash may have cut off the last one."""
        path = self.path / "events.jsonl"
        journal = Journal.read(path)
        kept = journal.size(journal.end)
        self._ends[path.name] = journal.end
        if kept is not None and path.exists() and path.stat().st_size > kept:
            os.truncate(path, kept)
        if journal.problem:
            self._tell(f"{path} is damaged ({journal.problem}); its intact lines are kept")
            self.note("damaged log", problem=journal.problem)

    def _tell(self, trouble: str) -> None:
        if trouble not in self.troubles:
            self.troubles.append(trouble)

    def _end_of(self, name: str) -> str:
        """Return the digest of a journal's last line."""
        if name not in self._ends:
            self._ends[name] = Journal.read(self.path / name).end
        return self._ends[name]

    def _append(self, name: str, record: dict[str, Any]) -> None:
        line = seal(record, self._end_of(name))
        with (self.path / name).open("ab") as file:
            file.write(line + b"\n")
        self._ends[name] = read_seal(line, self._ends[name])

    def _has_config(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return read_regular(self.path / "config.json") == seal(json.loads(self.config.to_json()))
        return False

    def _write_config(self) -> None:
        if not self._has_config():
            if (self.path / "config.json").exists():
                self._tell(f"{self.path / 'config.json'} is damaged; it is written again")
            write_atomically(self.path / "config.json", seal(json.loads(self.config.to_json())))


def _remove(paths: Iterable[Path]) -> None:
    """Remove files; what cannot be removed stays, as it harms no run."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


_FILES = ("config.json", "metrics.jsonl", "result.json", "events.jsonl")


def _read_checkpoint(path: Path) -> dict[str, Any]:
    if is_foreign(path):
        raise ValueError("it is not a file")
    content = read_regular(path)
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    if hashlib.sha256(content).hexdigest()[:32] != match.group(2):
        raise ValueError("the content is not what was saved")
    checkpoint = load_torch_file(content)
    types = {"state": dict, "metrics": str, "sources": dict}
    if not isinstance(checkpoint, dict) or any(not isinstance(checkpoint.get(key), types[key]) for key in types):
        raise ValueError("it is not the checkpoint of a run")
    return checkpoint


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

    def ask(*arguments: str) -> str:
        # The settings of a repository may name commands: as a file monitor, for filters, to fetch what is missing.
        # Comparing times and sizes alone needs none of them; a file that was only touched then counts as changed.
        command = ["git", "-c", "core.fsmonitor=false", *arguments]
        variables = os.environ | {"GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout.strip()

    try:
        commit = ask("describe", "--always", "--abbrev=40", "--exclude=*")
        return commit + ("-dirty" if ask("diff-index", "--raw", "HEAD") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
