"""Random generators that go on as if nothing had been drawn from them."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


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
