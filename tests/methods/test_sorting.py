"""Sorting floats by their bits: exact, stable, and the same with and without numpy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pliant.methods._core import sorting
from pliant.methods._core.sorting import batches, rank_order

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_numpy_is_fast", lambda: False)


def with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take numpy also on a processor where it is slow."""
    monkeypatch.setattr(sorting, "_numpy_is_fast", lambda: True)


def orders_of(vectors: list[Tensor]) -> list[Tensor]:
    """Return the order of each vector, counted from its own first entry."""
    found: list[Tensor] = []
    for part in batches(vectors):
        order, start = rank_order(*vectors[part]), 0
        for vector in vectors[part]:
            found.append(order[start : start + len(vector)] - start)
            start += len(vector)
    return found


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=30)
@given(data=st.lists(st.lists(st.sampled_from([-3.0, -0.5, 0.0, 0.25, 3.0]), max_size=60), min_size=1, max_size=6))
def test_several_vectors_are_sorted_apart_and_stably(dtype: torch.dtype, data: list[list[float]]) -> None:
    """Few values, many of them equal: equal ones keep their order."""
    vectors = [torch.tensor(values, dtype=dtype) for values in data]
    with pytest.MonkeyPatch.context() as patch:
        with_numpy(patch)
        together = orders_of(vectors)
    for order, vector in zip(together, vectors, strict=True):
        assert torch.equal(order, vector.argsort(stable=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_order_is_the_same_with_and_without_numpy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(size, generator=generator).to(dtype) for size in (40_000, 3, 700, 1)]
    vectors[2][:4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0], dtype=dtype)
    with_numpy(monkeypatch)
    packed = orders_of(vectors)
    without_numpy(monkeypatch)
    for order, other in zip(packed, orders_of(vectors), strict=True):
        assert torch.equal(order, other)


def test_a_batch_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy(monkeypatch)
    monkeypatch.setattr(sorting, "_ENTRIES", 10)
    sizes = [12, 4, 6, 1, 2, 2, 2, 20]
    vectors = [torch.zeros(size) for size in sizes]
    found = [[len(vector) for vector in vectors[part]] for part in batches(vectors)]
    assert found == [[12], [4, 6], [1, 2, 2, 2], [20]]


def test_vectors_of_other_dtypes_are_sorted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numpy(monkeypatch)
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float64, torch.bfloat16]
    vectors = [torch.zeros(2, dtype=dtype) for dtype in dtypes]
    assert list(batches(vectors)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert list(batches([])) == []


@pytest.mark.parametrize("count", [1, 1024])
def test_the_largest_batch_is_sorted_right(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the index and the value do not touch, in many vectors and in one beyond the limit of a batch."""
    with_numpy(monkeypatch)
    extremes = torch.tensor([torch.finfo(torch.float32).max, -torch.inf, torch.inf, torch.finfo(torch.float32).min])
    each = sorting._ENTRIES * (2 if count == 1 else 1) // count
    vectors = [extremes.repeat(each // 4) for _ in range(count)]
    assert len(list(batches(vectors))) == 1
    expected = extremes.repeat(each // 4).argsort(stable=True)
    order = rank_order(*vectors).view(count, each)
    starts = torch.arange(count)[:, None] * each
    assert torch.equal(order, expected + starts)
