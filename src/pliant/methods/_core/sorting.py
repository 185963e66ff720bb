"""Indices that sort floats: by their bits as integers, which is exact and several times faster on a CPU.

torch sorts long vectors of integers digit by digit. numpy sorts integers by vector instructions, which takes half of
that time, but returns no indices. Here the low bits of each integer hold its index. Several vectors are packed at once
and sorted one by one.
"""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pliant.methods._core import host

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEY_BITS = 32
_ENTRIES = 2**20
"""The most entries of vectors that are packed at once; their indices are kept from call to call."""
_LONGEST = 2**30
"""The length from which an index does not fit beside a value."""


def sort_keys(values: Tensor) -> Tensor:
    """Return integers in the order of these floats.

    Example:
        >>> sort_keys(torch.tensor([0.5, -2.0, 0.0, -0.5])).argsort()
        tensor([1, 3, 2, 0])
    """
    integer = _INTEGERS[values.dtype.itemsize]
    bits = values.view(integer)
    # Floats store sign and magnitude, so the bits of negative ones sort in reverse: flip all of them but the sign.
    flips = bits >> (8 * values.dtype.itemsize - 1)
    return flips.bitwise_and_(torch.iinfo(integer).max).bitwise_xor_(bits)


def rank_order(*vectors: Tensor) -> Tensor:
    """Return the indices that sort a vector of floats; equal values stay in order.

    Args:
        vectors: The vector. Several, as `batches` yields them, are sorted one by one, and the indices count through.

    Example:
        >>> rank_order(torch.tensor([0.5, -2.0, 1.0, -0.5]))
        tensor([1, 3, 0, 2])
    """
    if not all(map(_is_packed, vectors)):
        (vector,) = vectors
        return sort_keys(vector).argsort(stable=True)
    keys = sort_keys(torch.cat(vectors))
    index_bits = len(keys).bit_length()
    indices = _indices(len(keys)) if len(keys) <= _ENTRIES else torch.arange(len(keys), device="cpu")
    packed = keys.long().bitwise_left_shift_(index_bits).bitwise_or_(indices)
    array, start = packed.numpy(), 0
    for vector in vectors:
        array[start : start + len(vector)].sort()
        start += len(vector)
    return packed.bitwise_and_((1 << index_bits) - 1)


@functools.lru_cache(maxsize=2)
def _indices(count: int) -> Tensor:
    return torch.arange(count, device="cpu")


def batches(vectors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield the parts of a list of vectors that `rank_order` takes at once.

    Example:
        >>> list(batches([torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]))
        [slice(0, 1, None), slice(1, 2, None)]
    """
    start = entries = 0
    for end, vector in enumerate(vectors):
        entries += len(vector)
        alone = not (_is_packed(vector) and _is_packed(vectors[start]) and vector.dtype == vectors[start].dtype)
        if start < end and (alone or entries > _ENTRIES):
            yield slice(start, end)
            start, entries = end, len(vector)
    if vectors:
        yield slice(start, len(vectors))


def _is_packed(vector: Tensor) -> bool:
    fits = 8 * vector.dtype.itemsize <= _KEY_BITS and len(vector) < _LONGEST
    return fits and host.is_on_host(vector) and _numpy_is_fast()


@functools.cache
def _numpy_is_fast() -> bool:
    """Return whether numpy sorts by vector instructions; otherwise torch's sort of long vectors is faster."""
    try:
        import numpy
    except ImportError:
        return False
    return int(numpy.__version__.partition(".")[0]) >= 2 and torch.backends.cpu.get_cpu_capability().startswith("AVX")
