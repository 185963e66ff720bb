"""Get what the tests with the markers `needs_browser` and `needs_data` need: `make test-all` calls this first."""

import os
import shutil
import subprocess
import sys

from pliant.data.hub import SOURCES, download
from tests.requirements import in_cache, missing_browser

DATA = ("mnist", "cifar10")
PACKAGES = ("chromium", "chromium-driver")


def get_browser() -> None:
    """Install the browser if this is allowed here."""
    if missing_browser() and shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-qq"], check=True, stdout=subprocess.DEVNULL)
        install = ["apt-get", "install", "-y", "-qq", *PACKAGES]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL, env=environment)
    if program := missing_browser():
        sys.exit(f"{program} is missing. Install it: apt-get install {' '.join(PACKAGES)}")


def get_data() -> None:
    """Download the data sets that are not in the hub's local cache."""
    for name in DATA:
        if not in_cache(name):
            source = SOURCES[name]
            try:
                for file in (*source.train, *source.test):
                    download(source.repo, file)
            except ConnectionError as error:
                sys.exit(str(error))


if __name__ == "__main__":
    get_browser()
    get_data()
