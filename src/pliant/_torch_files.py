"""Read what `torch.save` wrote, without running code of the file and without taking more memory than the file has.

`torch.load(weights_only=True)` runs no code, but it calls constructors with the file's arguments: `bytearray(10**9)`,
or the set of all elements of a view that repeats one number. It also reads compressed records, one record under several
names, and storages without content. So the file is first unpickled with stand-ins in place of tensors.
"""

import io
import pickle  # nosec B403
import tarfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from pliant._files import open_regular


class RefusedError(ValueError):
    """Reading the file would run code, or take more memory than the file has."""


def load_torch_file(source: Path | bytes) -> Any:
    """Return what a file of `torch.save` holds, on the CPU.

    Args:
        source: The file, or its content.

    Raises:
        RefusedError: If reading it would run code, or take more memory than the file has.
        Exception: Any error, if the file is damaged.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(source) as file:
        _rehearse(file)
        file.seek(0)
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols; what cannot be read raises an error
            return torch.load(file, map_location="cpu", weights_only=True)


def _rehearse(file: BinaryIO) -> None:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(4) == b"PK\x03\x04":
        file.seek(0)
        # The reader of torch.load: Python's may see other records in the same bytes.
        reader = torch._C.PyTorchFileReader(file)
        if sum(map(reader.get_record_size, reader.get_all_records())) > size:
            raise RefusedError("it is compressed, which torch.save does not do")
        _Rehearsal(io.BytesIO(reader.get_record("data.pkl")), size).load()
        return
    file.seek(0)
    if tarfile.is_tarfile(file):
        raise RefusedError("it is a tar file, which torch.save does not write")
    file.seek(0)
    # Before torch 1.6: a number, a version, the machine, the object, and the names of the storages that follow.
    rehearsal = _Rehearsal(file, size)
    *_, names = [rehearsal.load() for _ in range(5)]
    if set(names) != rehearsal.storages:
        raise RefusedError("it holds tensors without content")


class _StandIn:
    """Stands for a tensor, a storage or a parameter."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Table(OrderedDict[Any, Any]):
    """A table whose methods the file cannot replace."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.keys() - {"_metadata"}:
            raise RefusedError(f"it holds a table with attributes of its own: {', '.join(map(repr, state))}")


def _rebuild_from_type(make: Callable[..., Any], kind: Any, arguments: Any, state: Any) -> Any:
    return make(*arguments)


def _encode(text: str | bytes, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise RefusedError(f"it encodes a text as {encoding!r}")
    return text.encode(encoding) if isinstance(text, str) else text


_MAKERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _Table,
    "collections.Counter": _Table,
    "builtins.set": set,
    "builtins.complex": complex,
    "builtins.bytearray": _encode,
    "_codecs.encode": _encode,
    "torch.Size": tuple,
}
_TENSORS = {
    "torch.device",
    "torch.serialization._get_layout",
    "torch.nn.parameter.Parameter",
    *(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "sparse_tensor")),
    *(f"torch._utils._rebuild_{name}" for name in ("parameter", "parameter_with_state")),
}


class _Rehearsal(pickle._Unpickler):  # The one in C trusts the sizes in a file.
    """Unpickles with stand-ins, and bounds what is made.

    Args:
        file: The pickle.
        room: The most elements of all tables, sets and texts that are made of other things.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]  # It reserves memory, and torch.load does not know it.

    def __init__(self, file: BinaryIO, room: int) -> None:
        super().__init__(file, encoding="utf-8")
        self.room = room
        self.storages: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a function or type."""
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full in _MAKERS:
            return lambda *arguments: self._make(_MAKERS[full], arguments)
        if full in _TENSORS:
            return _StandIn
        if full == "torch._tensor._rebuild_from_type_v2":
            return _rebuild_from_type
        value = getattr(torch, name, None)
        if module.startswith("torch") and (
            name.endswith(("Storage", "Tensor")) or isinstance(value, torch.dtype | torch.qscheme)
        ):
            return full  # It is only named: torch.save never calls it.
        raise RefusedError(
            f"it holds a pickled {full.removeprefix('builtins.')}, and reading it would run code. Save "
            "model.state_dict() instead of the model"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for a storage."""
        key = pid[2]
        if not (isinstance(key, str) and key.isascii() and key.isdigit()):
            raise RefusedError(f"it names a storage {key!r}")  # "a" and "A" are one record.
        self.storages.add(key)
        return _StandIn()

    def _make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not all(isinstance(each, str | bytes | list | tuple | dict | float) for each in arguments):
            raise RefusedError("it makes a table or text of something else than tables and texts")
        self.room -= sum(len(each) for each in arguments if not isinstance(each, float))
        if self.room < 0:
            raise RefusedError("it makes larger tables than it holds")
        return make(*arguments)
