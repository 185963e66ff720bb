"""Seeds that depend on their purpose alone.

Everything random in a stream or a run draws from its own generator, seeded by what it is for
(`"order", seed, task, epoch`). Nothing has to be replayed to reach task 37 or epoch 12, so a stream can be
entered anywhere and a resumed run meets the same data in the same order.
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
    """Turn a purpose into a seed: equal purposes give equal seeds on every machine and Python.

    Args:
        purpose: What the random numbers are for, from the general to the special.

    Returns:
        A number in [0, 2⁶³).

    Raises:
        TypeError: If a part is neither text nor a whole number.

    Example:
        >>> derive_seed("order", 0, 1) == derive_seed("order", 0, 1) != derive_seed("order", 1, 0)
        True
    """
    plain = tuple(part if isinstance(part, str) else int(operator.index(part)) for part in purpose)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*purpose: str | int) -> torch.Generator:
    """Make a CPU generator seeded by `derive_seed(*purpose)`."""
    return torch.Generator().manual_seed(derive_seed(*purpose))


def permutation(n: int, *purpose: str | int) -> torch.Tensor:
    """Draw a permutation of 0 … n-1 for a purpose."""
    return torch.randperm(n, generator=generator(*purpose))


def seed_everything(seed: int) -> None:
    """Seed the global generators that models and methods may draw from: torch's, Python's and NumPy's."""
    torch.manual_seed(derive_seed("torch", seed))
    _seed_others(_numpy(), seed)


def _seed_others(numpy: Any | None, *purpose: str | int) -> None:
    random.seed(derive_seed("random", *purpose))
    if numpy is not None:
        numpy.random.seed(derive_seed("numpy", *purpose) % 2**32)


@contextmanager
def drawing_for(*purpose: str | int) -> Iterator[None]:
    """Seed all global generators by a purpose, and leave them as they were.

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
    """Return the state of the global generators, in tensors and plain types."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = _numpy()
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned."""
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
    """Leave the random generators of torch, Python and NumPy as they were.

    Args:
        devices: The GPUs whose generators are to be left alone too.
        generators: Generators of their own, such as that of a loader.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with undrawn():
        ...     first = torch.rand(3)
        >>> torch.rand(3).equal(first)
        True
    """
    own = [(generator, generator.get_state()) for generator in generators]
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")  # what nobody imported, nobody draws from
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


def _numpy() -> Any | None:
    """NumPy, which torch can do without."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy
