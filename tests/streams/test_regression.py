"""Streams with real targets: a teacher for each task, and a slowly changing function."""

import math

import pytest
import torch

from pliant import data, streams
from pliant.data.dataset import Dataset
from tests.streams.stream_options import N, make, rows_of


def test_a_teacher_gives_targets_of_unit_variance(dataset: Dataset) -> None:
    stream = make("teacher_regression", dataset)
    assert stream.outputs == 1
    for task in stream:
        assert task.test is not None
        assert (task.train.y.shape, task.train.y.dtype) == ((N, 1), torch.float32)
        assert rows_of(task.train) == set(range(N))
        assert float(task.train.y.mean()) == pytest.approx(0, abs=1e-5)
        assert float(task.train.y.std()) == pytest.approx(1, abs=1e-5)
        assert len(task.test.y) == len(dataset.test)


def test_a_teacher_is_a_function_of_the_input(dataset: Dataset) -> None:
    doubled = Dataset("twice", dataset.train, dataset.train, dataset.classes)
    task = make("teacher_regression", doubled)[2]
    assert task.test is not None
    assert torch.equal(task.train.y, task.test.y)


def test_one_slow_feature_flips_with_each_task() -> None:
    stream = streams.create("slow_regression", data.load("bits"), tasks=30, slow=15)
    bits = torch.stack([stream.bits(index) for index in range(30)])
    assert set(bits.unique().tolist()) == {0.0, 1.0}
    assert torch.equal((bits[1:] != bits[:-1]).sum(1), torch.ones(29, dtype=torch.int64))
    for index in (0, 7, 29):
        x, _ = stream[index].train.batch(torch.arange(1000))
        assert torch.equal(x[:, :15], bits[index].expand(1000, 15))
        assert 0.4 < float(x[:, 15:].mean()) < 0.6


def test_the_slow_function_is_a_network_of_threshold_units() -> None:
    stream = streams.create("slow_regression", data.load("bits", examples=40), seed=3, width=7, beta=0.6)
    x, y = stream[0].train.batch(torch.arange(40))
    other, z = stream[4].train.batch(torch.arange(40))
    same_input = {tuple(row.tolist()): float(value) for row, value in zip(x, y, strict=True)}
    assert all(same_input.get(tuple(row.tolist()), float(v)) == float(v) for row, v in zip(other, z, strict=True))
    sums = y * math.sqrt(7)  # Each is a sum of seven numbers from {-1, 0, 1}.
    assert torch.allclose(sums, sums.round(), atol=1e-5)
    assert float(sums.abs().max()) <= 7


def test_slow_regression_needs_vectors(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="needs vectors of features, not inputs of shape"):
        streams.create("slow_regression", dataset)
    with pytest.raises(ValueError, match="slow is 9; it must be at most 8, the number of features"):
        streams.create("slow_regression", dataset.project(8), slow=9)


def test_transfer_splits_the_classes(dataset: Dataset) -> None:
    source, target = streams.create("transfer", dataset, fraction=0.3, first_epochs=2, epochs=1)
    first, second = set(source.train.y.tolist()), set(target.train.y.tolist())
    assert (len(first), len(second), first & second) == (3, 7, set())
    assert source.test is not None
    assert set(source.test.y.tolist()) == first
    assert len(source.train) + len(target.train) == N
