"""What several attacks share: the command line in a child process, and damage to files."""

import os
import random
import subprocess
import sys
from pathlib import Path

ESCAPE = "\x1b[2J\x9b31m\x07"
"""Clears a terminal, colors it and rings its bell."""


def pliant(*arguments: str, cwd: Path, timeout: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end, with its output as text."""
    return subprocess.run(
        [sys.executable, "-m", "pliant", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def assert_refused(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    """One clear line, exit code 2."""
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def flip_bit(path: Path, place: int | None = None, seed: int = 0) -> None:
    """Flip one bit of a file, at a byte or anywhere."""
    content = bytearray(path.read_bytes())
    draw = random.Random(seed)
    content[draw.randrange(len(content)) if place is None else place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def change_digit(path: Path, after: bytes) -> None:
    """Change the first digit behind a text: damage that every parser takes."""
    content = bytearray(path.read_bytes())
    place = content.index(after) + len(after)
    while not chr(content[place]).isdigit():
        place += 1
    content[place] = ord("7") if content[place] != ord("7") else ord("3")
    path.write_bytes(content)
