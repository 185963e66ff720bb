"""Files of JSON lines in which each line carries a digest of itself and of all lines before it.

A damaged line is found when it is read, and so are lines that were lost, added or moved. A last line that a crash cut
off is not damage: it was never complete.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pliant._files import read_regular
from pliant._json import parse_lines, read_seal, seal


class Journal:
    """The intact lines of a file, up to the first damaged one.

    Args:
        content: The content of the file.
    """

    def __init__(self, content: bytes) -> None:
        self.lines: list[bytes] = []
        self.digests: list[str] = []
        self.problem = ""
        for number, line in enumerate(content.split(b"\n")[:-1], 1):
            try:
                self.digests.append(read_seal(line, self.end))
            except ValueError as error:
                self.problem = f"line {number}: {error}"
                break
            self.lines.append(line + b"\n")

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """Read a file that may be missing."""
        try:
            return cls(read_regular(path))
        except FileNotFoundError:
            return cls(b"")

    @property
    def end(self) -> str:
        """The digest of the last intact line; empty without lines."""
        return self.digests[-1] if self.digests else ""

    def size(self, digest: str) -> int | None:
        """Return the number of bytes up to the line with a digest; None if there is no such line."""
        if not digest:
            return 0
        if digest not in self.digests:
            return None
        return sum(map(len, self.lines[: self.digests.index(digest) + 1]))

    def records(self) -> list[dict[str, Any]]:
        """Return the records; raise a ValueError if a line is damaged."""
        if self.problem:
            raise ValueError(self.problem)
        found = parse_lines(self.lines)
        for record in found:
            del record["digest"]
        return found


def write_lines(records: Iterable[dict[str, Any]], most: float = math.inf) -> tuple[bytes, str]:
    """Return the content of a file that holds these records, and the digest of its last line.

    Raises:
        ValueError: If it has more than `most` bytes.

    Example:
        >>> content, end = write_lines([{"epoch": 1}, {"epoch": 2}])
        >>> Journal(content).records(), Journal(content).end == end
        ([{'epoch': 1}, {'epoch': 2}], True)
    """
    lines, end, size = [], "", 0
    for record in records:
        lines.append(seal(record, end) + b"\n")
        end = read_seal(lines[-1], end)
        size += len(lines[-1])
        if size > most:
            raise ValueError(f"its lines have more than {most} bytes")
    return b"".join(lines), end
