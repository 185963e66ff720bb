"""Tests that need a browser, a data set or a user namespace are not run without it; the last line of output says so.

A test that was not run must not look like a passed one. So it is deselected, not skipped, and counted by what it lacks.
With `--require-all`, which `make test-all` gives, a missing requirement is an error.
"""

import functools
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from pliant.data.hub import SOURCES

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "tiny_imagenet": "Tiny ImageNet"}

NotRun = dict[str, dict[str, int]]
"""How many tests were not run: by marker, then by what is missing."""


def missing_browser() -> str | None:
    """Return the program that the tests of the page lack, if any."""
    if shutil.which("chromedriver") is None:
        return "chromedriver"
    return None if any(map(shutil.which, BROWSERS)) else "chromium"


def in_cache(name: str) -> bool:
    """Return whether the hub's local cache holds a data set. This asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    source = SOURCES[name]
    files = (*source.train, *source.test)
    return all(isinstance(try_to_load_from_cache(source.repo, file, repo_type="dataset"), str) for file in files)


@functools.cache
def can_mount() -> bool:
    """Return whether a process of this user may mount a disk of its own."""
    command = ["unshare", "--mount", "--map-root-user", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def find_missing(item: pytest.Item) -> tuple[str, str] | None:
    """Return the marker whose requirement is missing, and what is missing."""
    if item.get_closest_marker("needs_browser") and (program := missing_browser()):
        return "needs_browser", program
    for mark in item.iter_markers("needs_data"):
        for name in mark.args:
            if not in_cache(name):
                return "needs_data", name
    if item.get_closest_marker("needs_namespace") and not can_mount():
        return "needs_namespace", "user namespace"
    return None


def join(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def describe(not_run: NotRun) -> str:
    """Say how many tests were not run, and why."""
    parts = []
    if programs := not_run.get("needs_browser"):
        parts.append(f"{sum(programs.values())} tests of the page (no {join(programs)})")
    if names := not_run.get("needs_data"):
        titles = join(TITLES.get(name, name) for name in TITLES | names if name in names)
        parts.append(f"{sum(names.values())} {'' if parts else 'tests '}on {titles} (not in the cache)")
    if names := not_run.get("needs_namespace"):
        parts.append(f"{sum(names.values())} {'' if parts else 'tests '}on a full disk (no {join(names)})")
    return f"not run here: {', '.join(parts)}: make test-all"


NOT_RUN = pytest.StashKey[NotRun]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-all", action="store_true", help="fail if a browser, a data set or a right is missing")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_RUN] = {}


@pytest.hookimpl(trylast=True)  # After -m and -k: what nobody asked for is not counted.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("require_all"):
        return
    lacking = {item: missing for item in items if (missing := find_missing(item))}
    not_run: NotRun = {}
    for (marker, what), count in Counter(lacking.values()).items():
        not_run.setdefault(marker, {})[what] = count
    items[:] = [item for item in items if item not in lacking]
    config.hook.pytest_deselected(items=list(lacking))
    config.stash[NOT_RUN] = not_run
    if hasattr(config, "workeroutput"):
        config.workeroutput["not_run"] = not_run


def pytest_runtest_setup(item: pytest.Item) -> None:
    if missing := find_missing(item):
        pytest.fail(f"--require-all: {missing[1]} is missing; `make test-all` gets what it can", pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist has counted. All workers collect the same tests."""
    node.config.stash[NOT_RUN] = getattr(node, "workeroutput", {}).get("not_run") or node.config.stash[NOT_RUN]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # Around the terminal's own: this line comes after the number of passed.
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    result = yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and session.config.stash[NOT_RUN]:
        terminal.write_line(describe(session.config.stash[NOT_RUN]), yellow=True)
    return result
