"""Open regular files only, write files atomically, and lock them."""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

import filelock


class BusyError(RuntimeError):
    """Another process holds the lock."""


class NotRegularError(ValueError):
    """A name leads to a folder, a device, a pipe or a part of the kernel instead of a file."""


_KERNEL = ("/proc/", "/sys/")
"""Folders whose entries look like files, but may block, never end or act when they are read."""


def is_regular(path: Path) -> bool:
    """Return whether a name leads to a regular file, by links or not; raise an OSError if there is nothing."""
    return stat.S_ISREG(os.stat(path).st_mode) and not os.path.realpath(path).startswith(_KERNEL)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading if it is a regular file, or a link to one.

    Raises:
        NotRegularError: If it is something else. A device or pipe is not even opened.
    """
    if not is_regular(path):
        raise NotRegularError(f"{str(path)!r} is not a regular file")
    # It may have been replaced by a pipe since, which would block.
    file = open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(f"{str(path)!r} is not a regular file")
    return file


def read_regular(path: Path) -> bytes:
    """Read a regular file; see `open_regular`."""
    with open_regular(path) as file:
        return file.read()


_EXPANSION, _FREE = 100, 100_000_000


def check_expansion(path: Path, size: int) -> None:
    """Raise a ValueError if the content of a compressed file is so large that it can only be meant to fill memory.

    Args:
        path: The file.
        size: The bytes of its content, which may be 100 times as many as the file's, or 100 MB.
    """
    if size > max(_EXPANSION * path.stat().st_size, _FREE):
        raise ValueError(f"{str(path)!r} swells to more than {size // 10**6} MB, over {_EXPANSION} times its size")


def set_aside(path: Path) -> Path:
    """Rename what is in the way of a file to `NAME.bad`, and return the new name."""
    names = (path.with_name(f"{path.name}.bad{number or ''}") for number in itertools.count())
    free = next(name for name in names if not os.path.lexists(name))
    path.rename(free)
    return free


def is_foreign(path: Path) -> bool:
    """Return whether something is there that is not a file: a folder, a link, a pipe.

    Following a link, a writer would write elsewhere.
    """
    return os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all, durably.

    Args:
        path: The file; its old content stays until the new content is on disk.
        content: The new content.
    """
    # The process id keeps writers in several processes apart.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # A process with this id may have died here; or somebody put a link here.
    try:
        with temporary.open("xb") as file:
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
