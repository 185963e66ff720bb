"""What runs were made of that their configuration only names: data and code, which may change behind a name."""

import contextlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pliant.data.cache import digest_file
from pliant.data.dataset import Dataset
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import FINAL, Run, load_run

Sources = dict[str, str]
"""Digests of "data" and "model", where there is something to take one of."""


def find_sources(config: RunConfig, dataset: Dataset) -> Sources:
    """Say which data and which code a run is about to use.

    Args:
        config: The run.
        dataset: Its data set, loaded.

    Returns:
        Digests: of the data's content, and of the file with the function that makes a network.
    """
    found = {"data": dataset.fingerprint, "model": _digest_code(config.model.name)}
    return {kind: digest for kind, digest in found.items() if digest}


def find_outdated(root: Path, present: Iterable[tuple[RunConfig, Sources]]) -> list[str]:
    """Find runs that have ended and were made of something else than what their configuration names now.

    Args:
        root: The experiment's folder.
        present: Configurations with what they name now.

    Returns:
        A sentence for each thing that has changed.
    """
    now = {(kind, str(getattr(config, kind))): digest for config, found in present for kind, digest in found.items()}
    if not now:
        return []  # Nothing that may change behind its name: no need to read what may be thousands of runs.
    outdated: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted((root / "runs").glob("*")):
        with contextlib.suppress(ValueError):  # Damaged runs are done again.
            run = load_run(path)
            if run is None or run.status not in FINAL:
                continue  # What is under way notices by itself.
            for key, digest in read_sources(run).items():
                if now.get(key, digest) != digest:
                    outdated[key].append(run.id)
    return [
        f"{kind} {name} has changed since {len(runs)} of the runs here ended ({runs[0]}, …); they are not done again, "
        "and new ones would be mixed with them: choose another folder (--out), or remove theirs"
        for (kind, name), runs in outdated.items()
    ]


def read_sources(run: Run) -> dict[tuple[str, str], str]:
    """Return the digests of what a run was made of by kind and name, such as data and its path, if its log tells."""
    with contextlib.suppress(ValueError, KeyError, OSError):  # A damaged log tells nothing.
        then: Sources = next((event["sources"] for event in reversed(run.events) if "sources" in event), {})
        return {(kind, str(getattr(run.config, kind))): digest for kind, digest in then.items()}
    return {}


def _digest_code(reference: str) -> str:
    """Return the digest of the file that `module:name` or `file.py:name` leads to; empty if there is none."""
    module, colon, _ = reference.rpartition(":")
    if not colon:
        return ""
    spec = None if module.endswith(".py") else importlib.util.find_spec(module)
    file = Path(module if spec is None else spec.origin or "")
    return digest_file(file) if file.is_file() else ""
