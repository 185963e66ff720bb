"""Writing files so that no crash leaves half of one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock


class BusyError(RuntimeError):
    """Somebody else holds the lock."""


def write_atomically(path: Path, content: bytes) -> None:
    """Put a file in place as a whole or not at all, and for good: power may fail right after.

    Args:
        path: Where it goes; what was there stays until the new content is safe.
        content: What it holds.
    """
    # The process id keeps several writers on one file system out of each other's way.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what a file or folder holds durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file; the operating system frees it when the process dies, however it dies.

    Args:
        path: The lock file.
        patience: How many seconds to wait for it.

    Raises:
        BusyError: If somebody else holds it.
    """
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=patience)
    except filelock.Timeout as error:
        raise BusyError(f"{path} is locked by another process") from error
    try:
        yield
    finally:
        lock.release()
