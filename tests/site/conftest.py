"""The site, built once: without running the examples, which `tests/test_examples.py` and `make docs` do."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.experiments.report.conftest import browser

__all__ = ["browser"]
ROOT = Path(__file__).parents[2]
MADE = shutil.ignore_patterns("_build", "api", "gallery", "__pycache__")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a copy, so that the real build's figures are not overwritten; a warning is an error."""
    root = tmp_path_factory.mktemp("site")
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, root / folder, ignore=MADE)
    shutil.copy(ROOT / "CHANGELOG.md", root)
    built = root / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-D", "plot_gallery=0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(root / "docs"), str(built)], capture_output=True, text=True, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr
    return built


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="session")
def served(site: Path) -> Iterator[str]:
    """Serve the site on the loopback interface, and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
