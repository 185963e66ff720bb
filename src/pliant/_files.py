"""Write files atomically, and lock them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import filelock


class BusyError(RuntimeError):
    """Another process holds the lock."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, durably.

    Args:
        path: The file; its old content stays until the new content is on disk.
        content: The new content.
    """
    # The process id keeps writers in several processes apart.
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
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file; the operating system releases it when the process dies.

    Args:
        path: The lock file.
        patience: Seconds to wait for the lock.

    Raises:
        BusyError: If another process holds it.
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
