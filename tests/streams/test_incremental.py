"""Single task, warm start, chunks and class-incremental streams."""

import pytest
import torch

from pliant import streams
from pliant.data.dataset import Dataset
from tests.streams.stream_options import CLASSES, N, make, rows_of


def test_continual_streams_cite_their_papers() -> None:
    """FIRE keeps all data, and says that it did not evaluate anything else."""
    assert streams.stream_class("continual_full").paper == "Soft weight rescaling, §4.2; FIRE, §4.1"
    assert streams.stream_class("continual_limited").paper == "Soft weight rescaling, §4.2"


def test_single_is_one_task_with_all_data(dataset: Dataset) -> None:
    (task,) = make("single", dataset)
    assert (rows_of(task.train), task.epochs) == (set(range(N)), 3)


def test_warm_start_is_a_part_then_all_data(dataset: Dataset) -> None:
    first, second = make("warm_start", dataset)
    assert (len(first.train), first.epochs, second.epochs) == (30, 7, 5)
    assert rows_of(second.train) == set(range(N))
    assert second.changed == {"examples"}
    with pytest.raises(ValueError, match=r"fraction: 1\.5 is not allowed; it must be a number that is in \(0, 1\]"):
        streams.create("warm_start", dataset, fraction=1.5)


def test_warm_start_with_wrong_labels(dataset: Dataset) -> None:
    right, _ = streams.create("warm_start", dataset, seed=1)
    first, second = streams.create("warm_start", dataset, seed=1, wrong_labels=0.5)
    assert rows_of(first.train) == rows_of(right.train)
    assert int((first.train.y != right.train.y).sum()) == round(0.5 * len(right.train))
    assert int(first.train.y.max()) < CLASSES
    assert torch.equal(second.train.y, dataset.train.y)
    with pytest.raises(ValueError, match="wrong_labels"):
        streams.create("warm_start", dataset, wrong_labels=1.5)


def test_warm_start_with_fraction_1_repeats_the_data(dataset: Dataset) -> None:
    first, second = streams.create("warm_start", dataset, fraction=1.0)
    assert rows_of(first.train) == rows_of(second.train) == set(range(N))
    assert second.changed == {"examples"}


def test_chunks_partition_the_data_and_are_shared_by_both_continual_streams(dataset: Dataset) -> None:
    limited = [rows_of(task.train) for task in make("continual_limited", dataset)]
    full = [rows_of(task.train) for task in make("continual_full", dataset)]
    assert sum(map(len, limited)) == N
    assert set().union(*limited) == set(range(N))
    assert {len(chunk) for chunk in limited} == {17, 18}
    for index in range(7):
        assert full[index] == set().union(*limited[: index + 1])
    with pytest.raises(ValueError, match="chunks is 121; it must be 1 … 120"):
        list(streams.create("continual_full", dataset, chunks=121))


def test_classes_arrive_in_groups_and_stay_in_the_test_set(dataset: Dataset) -> None:
    stream = make("class_incremental", dataset)
    groups = [set(group.tolist()) for group in stream.groups()]
    assert sorted(map(len, groups)) == [2, 2, 3, 3]
    assert set().union(*groups) == set(range(CLASSES))
    for task in stream:
        met = set().union(*groups[: task.index + 1])
        assert set(task.train.y.tolist()) == set(task.test.y.tolist()) == met
        assert len(task.train) == N // CLASSES * len(met)
    alone = streams.create("class_incremental", dataset, phases=4, epochs=1, accumulate=False)
    assert [set(task.train.y.tolist()) for task in alone] == groups
    assert set(alone[3].test.y.tolist()) == set(range(CLASSES))
    with pytest.raises(ValueError, match="phases is 11"):
        streams.create("class_incremental", dataset, phases=11)
