"""Pack an experiment into one small file.

The file holds gzipped JSON lines: the recipe, the chosen settings and the number of runs, then one line a run with its
configuration, its result, its metrics by column, and the first and last event of its last attempt: versions, commit,
dates and seconds. Each line carries a digest of all lines so far. Numbers keep six digits. Hosts are left out.

An archive may come from anybody. Nothing in it is run, its size is bounded, and it is checked before anything is
written. The digests find damage; they do not say who wrote the file.
"""

import contextlib
import gzip
import itertools
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pliant._files import open_regular, write_atomically
from pliant._json import has_seal, parse_json, seal
from pliant.experiments.journal import Journal, write_lines
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import (
    FINAL,
    Run,
    check_selection,
    load_recipe_values,
    load_runs,
    load_selection,
    make_run,
)

_LEFT_OUT = ("progress", "receipts")
_DIGITS = 6
_MOST_EXPANSION = 50
"""How many times larger than the file its content may be, and the unpacked runs. The content of packed experiments is
3 to 13 times larger, their runs 8 to 29 times."""
_LONGEST_LINE = 10_000_000
"""The most bytes of a line. A line is the recipe or a run; in packed experiments it has less than 1 MB."""
_FEW, _LEAST_BYTES = 1000, 10
"""The fewest bytes of content for each table and list, which take 64 bytes of memory; packed experiments have 72."""


def pack(root: Path, file: Path) -> int:
    """Write the ended runs of an experiment into one file.

    Args:
        root: The folder of the experiment.
        file: The file, usually named `….jsonl.gz`; replaced if it exists.

    Returns:
        The number of runs.
    """
    runs = [run for run in load_runs(root) if run.status in FINAL]
    if not (root / "recipe.json").exists():
        raise ValueError(f"{root} holds no recipe.json; only an experiment with its recipe can be packed")
    head = {"recipe": load_recipe_values(root), "selection": load_selection(root), "runs": len(runs)}
    content, _ = write_lines(itertools.chain([head], map(_describe, runs)))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, gzip.compress(content, mtime=0))
    return len(runs)


def unpack(file: Path, root: Path) -> int:
    """Unpack an experiment, for `pliant report` and `load_runs`: all of the runs or none.

    Args:
        file: A file written by `pack`.
        root: The folder to write; it must not hold runs.

    Returns:
        The number of runs.
    """
    if (root / "runs").exists():
        raise ValueError(f"root {str(root)!r} holds runs already; unpack into another folder")
    head, runs = _parse(file)
    made = root / f".runs.{os.getpid()}.tmp"
    made.mkdir(parents=True)
    try:
        for name, contents in runs.items():
            folder = made / name
            folder.mkdir()
            for each, content in contents.items():
                (folder / each).write_bytes(
                    content
                )  # The folder gets its name at the end; digests tell of a power cut.
        write_atomically(root / "recipe.json", seal(head["recipe"], indent=1))
        (root / "selection.json").unlink(missing_ok=True)
        if head["selection"]:
            write_atomically(root / "selection.json", seal(head["selection"], indent=1))
        made.rename(root / "runs")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return len(runs)


_PRIVATE = ("host", "pid", "platform")
"""What the archive does not tell of the machine."""


def _parse(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, bytes]]]:
    """Read a packed file: its first line, and the files of each run by the run's id."""
    try:
        most = _MOST_EXPANSION * file.stat().st_size
        lines = _read_lines(file, most)
        head = parse_json(lines[0])
        if has_seal(lines[0]) and head["runs"] != len(lines) - 1:
            raise ValueError(f"it holds {len(lines) - 1} of {head['runs']} runs")
        if head["selection"]:
            check_selection(head["selection"])
        if not isinstance(head["recipe"], dict) or not head["recipe"]:
            raise ValueError("its recipe is not a table")
        runs: dict[str, dict[str, bytes]] = {}
        for line in lines[1:]:
            name, files = _parse_run(parse_json(line), most)
            if name in runs:
                raise ValueError(f"it holds the run {name} twice")
            runs[name] = files
            most -= sum(map(len, files.values()))
        return head, runs
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{str(file)!r} is not what pliant pack writes, or it is damaged: {reason}") from error


def _read_lines(file: Path, most: int) -> list[bytes]:
    """Return the lines of a packed file. They are parsed one by one: a parsed line takes 20 times its size."""
    with open_regular(file) as packed, gzip.GzipFile(fileobj=packed) as unpacked:
        content = unpacked.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it holds more than {_MOST_EXPANSION} times its size")
    if content.count(b"[") + content.count(b"{") > _FEW + len(content) // _LEAST_BYTES:
        raise ValueError("it holds more tables and lists than experiments have")
    lines = content.splitlines()
    if any(map(has_seal, lines)):  # Else it was packed before lines carried digests: gzip's own checksum guards it.
        journal = Journal(content)
        if journal.problem:
            raise ValueError(journal.problem)
        lines = journal.lines
    if not lines or max(map(len, lines)) > _LONGEST_LINE:
        raise ValueError(f"a line is missing, or has more than {_LONGEST_LINE // 10**6} MB")
    return lines


def _parse_run(run: dict[str, Any], most: int) -> tuple[str, dict[str, bytes]]:
    """Check a run, and return its id and its files, which must not have more bytes than that."""
    config = RunConfig.from_dict(run["config"])
    if run["id"] != config.id:
        raise ValueError(f"{run['id']!r} is not the id of its configuration, {config.id}")
    metrics, end = write_lines(_to_rows(run["metrics"]), most)
    result = {key: run[key] for key in ("config", "error")} | {"metrics": end}
    result |= {key: run[key] for key in ("result", "status")}
    if make_run(Path(config.id), result).status not in FINAL:
        raise ValueError(f"the run {config.id} is {run['status']}; only ended runs are packed")
    return config.id, {
        "config.json": seal(json.loads(config.to_json())),
        "metrics.jsonl": metrics,
        "result.json": seal(result),
        "events.jsonl": write_lines(map(dict, run.get("events", [])), most)[0],
    }


def _describe(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "config": json.loads(run.config.to_json()),
        "status": run.status,
        "result": _rounded(run.result),
        "error": run.error,
        "metrics": _rounded(_to_columns(run.records)),
        "events": _rounded(_last_attempt(_read_events(run))),
    }


def _read_events(run: Run) -> list[dict[str, Any]]:
    with contextlib.suppress(ValueError):  # A damaged log costs only the log.
        return run.events
    return []


def _last_attempt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that start and end the last attempt of a run, without names of the machine."""
    last = {event["event"]: event for event in events if event.get("event") in ("start", "end")}
    environment = last.get("start", {}).get("environment")
    if isinstance(environment, dict):
        told = {key: value for key, value in environment.items() if key not in _PRIVATE}
        last["start"] = last["start"] | {"environment": told}
    return [last[name] for name in ("start", "end") if name in last]


def _to_columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn records into lists by key, with None for missing values; equal values are kept once."""
    names = dict.fromkeys(name for record in records for name in record if name not in _LEFT_OUT)
    columns = {name: [record.get(name) for record in records] for name in names}
    return {
        name: column[:1] if len(records) > 1 and all(value == column[0] for value in column) else column
        for name, column in columns.items()
    }


def _to_rows(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    if not all(isinstance(column, list) for column in columns.values()):
        raise TypeError("metrics must be lists by name")
    count = max(map(len, columns.values()), default=0)
    if any(len(column) not in (1, count) for column in columns.values()):
        raise ValueError("metrics must have equally many values, or one for all epochs")
    for row in range(count):
        values = {name: column[row if len(column) > 1 else 0] for name, column in columns.items()}
        yield {name: value for name, value in values.items() if value is not None} | {"receipts": []}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
