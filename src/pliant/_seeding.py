"""Seeds that are derived from their purpose.

Every random draw of a stream or a run has its own generator, seeded by its purpose (`"order", seed, task, epoch`). So
task 37 or epoch 12 can be reached without replaying earlier ones, and a resumed run sees the same data in the same
order.
"""

import hashlib
import operator
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def derive_seed(*purpose: str | int) -> int:
    """Turn a purpose into a seed, the same on every machine and Python version.

    Args:
        purpose: Words and numbers that say what the random numbers are for, from general to specific.

    Returns:
        A number in [0, 2⁶³).

    Raises:
        TypeError: If a part is neither a string nor an integer.

    Example:
        >>> derive_seed("order", 0, 1) == derive_seed("order", 0, 1) != derive_seed("order", 1, 0)
        True
    """
    plain = tuple(part if isinstance(part, str) else int(operator.index(part)) for part in purpose)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*purpose: str | int) -> torch.Generator:
    """Return a CPU generator seeded by `derive_seed(*purpose)`."""
    return torch.Generator().manual_seed(derive_seed(*purpose))


def permutation(n: int, *purpose: str | int) -> torch.Tensor:
    """Draw a permutation of 0 … n−1 for a purpose."""
    return torch.randperm(n, generator=generator(*purpose))


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    torch.manual_seed(derive_seed("torch", seed))
    _seed_others(_numpy(), seed)


def _seed_others(numpy: Any | None, *purpose: str | int) -> None:
    random.seed(derive_seed("random", *purpose))
    if numpy is not None:
        numpy.random.seed(derive_seed("numpy", *purpose) % 2**32)


@contextmanager
def drawing_for(*purpose: str | int) -> Iterator[None]:
    """Seed all global generators by a purpose, and restore them afterwards.

    Example:
        >>> with drawing_for("model", 0):
        ...     first = torch.rand(3), random.random()
        >>> with drawing_for("model", 0):
        ...     first[0].equal(torch.rand(3)), first[1] == random.random()
        (True, True)
    """
    with undrawn(range(torch.cuda.device_count())):
        torch.manual_seed(derive_seed(*purpose))
        _seed_others(_numpy() if "numpy.random" in sys.modules else None, *purpose)
        yield


def random_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors and plain types."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = _numpy()
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state that `random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    if "numpy" in state:
        numpy = _numpy()
        assert numpy is not None
        numpy.random.set_state(tuple(state["numpy"]))


@contextmanager
def undrawn(devices: Iterable[int] = (), generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Restore the global random generators of torch, Python and NumPy afterwards.

    Args:
        devices: GPUs whose generators are restored too.
        generators: Further generators to restore, such as a data loader's.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with undrawn():
        ...     first = torch.rand(3)
        >>> torch.rand(3).equal(first)
        True
    """
    own = [(generator, generator.get_state()) for generator in generators]
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")  # without an import, nothing can draw from it
    drawn = numpy.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.set_state(drawn)
            for generator, state in own:
                generator.set_state(state)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of its own that a data loader draws from when it is iterated.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> own = torch.Generator()
        >>> generators_of(DataLoader([1, 2], shuffle=True, generator=own)) == [own]
        True
    """
    owners = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = {id(own): own for owner in owners if isinstance(own := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())


def _numpy() -> Any | None:
    """Return NumPy if it is installed; torch does not need it."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
