"""A comparison with all there is, and a real browser to look at its page."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

import pliant
from pliant._files import write_atomically
from pliant._json import seal
from pliant.experiments.report.document import Report
from pliant.experiments.run_config import Part
from tests.experiments.report.stores import config, write_recipe, write_run
from tests.requirements import BROWSERS


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with all there is: a choice of settings, measures, failures, a published number."""
    root = tmp_path_factory.mktemp("all")
    write_recipe(
        root,
        methods=["vanilla", "fresh", {"name": "l2", "label": "L2", "grid": {"lam": [0.1, 0.01]}}],
        published={"L2": [0.81, 0.02]},
    )
    tasks = 6
    for seed in range(3):
        for label, low, growth in (("vanilla", 0.5, 2.0), ("fresh", 0.7, 0.0), ("L2", 0.8, 0.2)):
            jitter = (0, 0.004, -0.004)[seed] if label != "L2" else 0  # Equal differences would not be tested.
            ends = [low + 0.01 * seed + jitter - (0.05 * task if label == "vanilla" else 0) for task in range(tasks)]
            measures = {"weight_growth": [1 + growth * task for task in range(tasks)]}
            measures |= {"weight_growth/0": measures["weight_growth"], "feature_rank": [0.5] * tasks}
            write_run(root, config(label, seed), ends, measures=measures, entries=[0.1] * (tasks - 1))
        for lam in (0.1, 0.01):
            trial = config("L2", 10**6 + seed, methods=(Part("l2", {"lam": lam}),), purpose="selection")
            write_run(root, trial, [lam + 0.1 * seed])
    write_run(root, config("L2", 9), [0.2], status="failed", error="Traceback …\nValueError: <b>boom</b>")
    selection = {
        "on": "validation",
        "labels": {"L2": {"chosen": "l2(lam=0.1)", "scores": {}, "seeds": 3, "examples": None}},
    }
    write_atomically(root / "selection.json", seal(selection))
    return root


@pytest.fixture(scope="session")
def report(root: Path) -> Report:
    return pliant.report(root)


_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Chromium without a window, for tests with the marker `needs_browser`."""
    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    chrome.set_script_timeout(300)  # axe takes long on a busy machine
    yield chrome
    chrome.quit()
