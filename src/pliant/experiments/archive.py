"""Pack an experiment into one small file.

The file holds gzipped JSON lines: the recipe and the chosen settings, then one line a run with its configuration, its
result and its metrics by column. Numbers keep six digits. Times and hosts are left out, so the same runs always give
the same bytes.
"""

import gzip
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from pliant._files import write_atomically
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import FINAL, Run, load_recipe_values, load_runs, load_selection

_LEFT_OUT = ("progress", "receipts")
_DIGITS = 6


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
    head = {"recipe": load_recipe_values(root), "selection": load_selection(root)}
    lines = [json.dumps(line) for line in (head, *map(_describe, runs))]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, gzip.compress("\n".join(lines).encode(), mtime=0))
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
        for run in runs:
            folder = made / run["id"]
            folder.mkdir()
            for name in _FILES:
                write_atomically(folder / name, run[name])
        write_atomically(root / "recipe.json", json.dumps(head["recipe"]).encode())
        (root / "selection.json").unlink(missing_ok=True)
        if head["selection"]:
            write_atomically(root / "selection.json", json.dumps(head["selection"]).encode())
        made.rename(root / "runs")
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return len(runs)


_FILES = ("config.json", "metrics.jsonl", "result.json")


def _parse(file: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a packed file: its first line, and the id and files of each run."""
    content = file.read_bytes()
    try:
        head, *lines = [json.loads(line) for line in gzip.decompress(content).splitlines()]
        return {key: head[key] for key in ("recipe", "selection")}, [_parse_run(line) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{str(file)!r} is not what pliant pack writes, or it is damaged: {reason}") from error


def _parse_run(run: dict[str, Any]) -> dict[str, Any]:
    if not re.fullmatch(r"[a-z0-9-]+", run["id"]):
        raise ValueError(f"{run['id']!r} is not the id of a run")
    RunConfig.from_dict(run["config"])
    end = {key: run[key] for key in ("config", "status", "result", "error")}
    records = "".join(json.dumps(record) + "\n" for record in _to_rows(run["metrics"]))
    contents = json.dumps(run["config"]), records, json.dumps(end)
    return {"id": run["id"]} | dict(zip(_FILES, (content.encode() for content in contents), strict=True))


def _describe(run: Run) -> dict[str, Any]:
    return {
        "id": run.id,
        "config": json.loads(run.config.to_json()),
        "status": run.status,
        "result": _rounded(run.result),
        "error": run.error,
        "metrics": _rounded(_to_columns(run.records)),
    }


def _to_columns(records: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn records into lists by key, with None for missing values; equal values are kept once."""
    names = dict.fromkeys(name for record in records for name in record if name not in _LEFT_OUT)
    columns = {name: [record.get(name) for record in records] for name in names}
    return {
        name: column[:1] if len(records) > 1 and all(value == column[0] for value in column) else column
        for name, column in columns.items()
    }


def _to_rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    count = max((len(column) for column in columns.values()), default=0)
    full = {name: column * count if len(column) == 1 else column for name, column in columns.items()}
    return [
        {name: column[row] for name, column in full.items() if column[row] is not None} | {"receipts": []}
        for row in range(count)
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
