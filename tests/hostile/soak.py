"""Random kills, corruptions and restarts over a sweep of 40 small runs: `make soak` (MINUTES=30).

A sweep is done once without disturbance. Then the same sweep is done again and again, each time in a new folder: its
command and its workers are killed at random moments, its files are damaged at random, and the command is started again
until it ends well. Then every file of the folder that does not depend on time must be byte-equal to the undisturbed
one. The summary is kept in `benchmarks/results/soak.txt`.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.experiments.helpers import descendants
from tests.hostile.attacks import flip_bit

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "soak.txt"
RECIPE = """
seeds = 10
data = { name = "digits", first = 160 }
model = { name = "mlp", widths = [16] }
stream = { name = "label_flip", tasks = 4, epochs = 2 }
training = { batch_size = 16 }
methods = ["vanilla", "fresh", "l2_init:lam=0.01", "shrink_perturb:lam=0.5"]
"""
RUNS = 40
_MOST_PASSES = 6
"""How often a command may be started without disturbance until it ends well."""


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start the command on a folder."""
    command = [sys.executable, "-m", "pliant", "run", str(folder.parent / "soak.toml"), "--out", str(folder)]
    return subprocess.Popen(
        [*command, "--workers", "2", "--checkpoint-seconds", "0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def outputs(folder: Path) -> dict[str, bytes]:
    """What must be byte-equal: all files but logs, locks, reports and what was set aside."""
    names = ("recipe.json", "config.json", "metrics.jsonl", "result.json")
    found = (path for name in names for path in folder.rglob(name) if path.is_file() and ".bad" not in str(path))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def cut(path: Path, draw: random.Random) -> None:
    """Cut off the end of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def replace_by_folder(path: Path, draw: random.Random) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "bit flipped": lambda path, draw: flip_bit(path, seed=draw.randrange(2**32)),
    "file cut off": cut,
    "file removed": lambda path, draw: path.unlink(),
    "folder in place of a file": replace_by_folder,
    "link to nothing": lambda path, draw: (path.unlink(), path.symlink_to("/nowhere/at/all"))[1],
}


def damage(folder: Path, draw: random.Random, done: Counter[str]) -> None:
    """Damage a random file of the folder; it may vanish meanwhile."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock" and path.stat().st_size]
    if files:
        kind = draw.choice(list(DAMAGES))
        with contextlib.suppress(OSError):
            DAMAGES[kind](draw.choice(files), draw)
            done[kind] += 1


def kill(process: subprocess.Popen[bytes], draw: random.Random, done: Counter[str]) -> None:
    """Kill the command or one of its workers, or ask the command to stop."""
    kind = draw.choice(["command killed", "worker killed", "SIGTERM", "Ctrl-C"])
    workers = sorted(descendants(process.pid))
    with contextlib.suppress(ProcessLookupError):
        if kind == "worker killed" and workers:
            os.kill(draw.choice(workers), signal.SIGKILL)
        elif kind == "SIGTERM":
            process.terminate()
        elif kind == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        else:
            kind = "command killed"
            process.kill()
        done[kind] += 1
    if kind != "worker killed":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)


def disturb(folder: Path, draw: random.Random, until: float, done: Counter[str]) -> None:
    """Do one sweep with disturbances, then let it end well."""
    for _ in range(draw.randint(3, 8)):
        if time.monotonic() > until:
            break
        process = start(folder)
        done["starts"] += 1
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(2, 20))
            if process.poll() is not None:
                break
            damage(folder, draw, done) if draw.random() < 0.3 else kill(process, draw, done)
        damage(folder, draw, done)
    for _ in range(_MOST_PASSES):
        done["starts"] += 1
        if start(folder).wait() == 0:
            return
    raise AssertionError(f"{folder}: {_MOST_PASSES} undisturbed commands did not end well")


def main() -> None:
    """Soak for some minutes; exit with code 1 if anything is lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="pliant-soak-"))
    (root / "soak.toml").write_text(RECIPE)
    draw, done = random.Random(asked.seed), Counter[str]()
    begun = time.monotonic()
    assert start(root / "undisturbed").wait() == 0
    expected = outputs(root / "undisturbed")
    assert len(expected) == 3 * RUNS + 1
    until, sweeps = begun + 60 * asked.minutes, 0
    while time.monotonic() < until:
        folder = root / f"sweep-{sweeps}"
        disturb(folder, draw, until, done)
        found = outputs(folder)
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        assert not differing, f"{folder}: {differing} differ from the undisturbed sweep"
        shutil.rmtree(folder)
        sweeps += 1
        print(f"sweep {sweeps}: {RUNS} runs byte-equal, {dict(done)}", flush=True)
    minutes = (time.monotonic() - begun) / 60
    lines = [
        f"Soak test: {minutes:.0f} minutes, seed {asked.seed} (python -m tests.hostile.soak {asked.minutes:g})",
        f"{sweeps} sweeps of {RUNS} runs, disturbed and started again: nothing lost, all {len(expected)} files of each",
        "sweep byte-equal to the undisturbed one.",
        *(f"{count:6d}  {what}" for what, count in sorted(done.items())),
    ]
    KEPT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
