"""Every stream: sizes, no leak of what is to come, what changes, and that seeds decide."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from pliant import streams
from pliant.data.dataset import Dataset, Examples, from_tensors
from pliant.streams.stream import Stream, Task

N, TESTS, CLASSES = 120, 40, 10


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Images that carry their own row number, so that it is seen which ones a task holds."""
    rows = torch.arange(N + TESTS)
    x = torch.zeros(N + TESTS, 1, 3, 4, dtype=torch.uint8)
    x[:, 0, 0, 0], x[:, 0, 2, 3] = (rows % 16 * 10).to(torch.uint8), (rows // 16 * 10).to(torch.uint8)
    y = torch.arange(N + TESTS) % CLASSES
    return from_tensors("rows", (x[:N], y[:N]), (x[N:], y[N:]))


OPTIONS: dict[str, dict[str, Any]] = {
    "single": {"epochs": 3},
    "warm_start": {"fraction": 0.25, "first_epochs": 7, "epochs": 5},
    "continual_full": {"chunks": 7, "epochs": 2},
    "continual_limited": {"chunks": 7, "epochs": 2},
    "class_incremental": {"phases": 4, "epochs": 2},
    "random_labels": {"tasks": 5, "epochs": 2},
    "pixel_permutation": {"tasks": 5, "epochs": 2},
    "label_flip": {"tasks": 5, "epochs": 2},
    "binary_pairs": {"tasks": 8, "epochs": 2},
}


def make(name: str, dataset: Dataset, seed: int = 0) -> Stream:
    return streams.create(name, dataset, seed, **OPTIONS[name])


def content(examples: Examples | None) -> tuple[torch.Tensor, ...]:
    return () if examples is None else examples.batch(torch.arange(len(examples)))


def rows_of(examples: Examples) -> set[int]:
    x = examples.x if examples.rows is None else examples.x[examples.rows]
    return set((x[:, 0, 0, 0].long() // 10 + x[:, 0, 2, 3].long() // 10 * 16).tolist())


def same(one: Task, other: Task) -> bool:
    pairs = zip(content(one.train) + content(one.test), content(other.train) + content(other.test), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_every_stream_is_tested_here() -> None:
    assert set(OPTIONS) == set(streams.names())


def test_limited_access_is_of_one_paper_alone() -> None:
    """FIRE keeps all data, and says that it did not evaluate anything else."""
    assert streams.stream_class("continual_full").paper == "Soft weight rescaling, §4.2; FIRE, §4.1"
    assert streams.stream_class("continual_limited").paper == "Soft weight rescaling, §4.2"


@pytest.fixture(params=sorted(OPTIONS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestAll:
    def test_any_task_can_be_entered_directly(self, name: str, dataset: Dataset) -> None:
        stream = make(name, dataset)
        one_after_the_other = list(stream)
        assert [task.index for task in one_after_the_other] == list(range(len(stream)))
        for index in reversed(range(len(stream))):
            assert same(make(name, dataset)[index], one_after_the_other[index])

    def test_the_seed_decides(self, name: str, dataset: Dataset) -> None:
        if name == "single":
            assert same(make(name, dataset, 1)[0], make(name, dataset, 2)[0])
            return
        assert any(not same(a, b) for a, b in zip(make(name, dataset, 1), make(name, dataset, 2), strict=True))

    def test_every_task_differs_from_the_one_before(self, name: str, dataset: Dataset) -> None:
        tasks = list(make(name, dataset))
        for before, after in pairwise(tasks):
            unequal = len(before.train) != len(after.train) or not same(before, after)
            assert unequal
            assert after.changed
        assert tasks[0].changed == frozenset()

    # Behind a permutation of the pixels, rows cannot be read off; that stream's own test compares the images.
    @pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"pixel_permutation"}))
    def test_training_never_holds_a_test_example(self, name: str, dataset: Dataset) -> None:
        for task in make(name, dataset):
            assert max(rows_of(task.train)) < N
            if task.test is not None:
                assert min(rows_of(task.test)) >= N

    def test_workload_counts_what_tasks_hold(self, name: str, dataset: Dataset) -> None:
        stream = make(name, dataset)
        assert stream.workload() == [len(task.train) * task.epochs for task in stream]

    def test_wrong_indices_and_counts_are_named(self, name: str, dataset: Dataset) -> None:
        stream = make(name, dataset)
        with pytest.raises(IndexError, match=f"the stream has tasks 0 … {len(stream) - 1}"):
            stream[len(stream)]
        with pytest.raises(ValueError, match="epochs: 0 is not allowed; it must be an integer ≥ 1"):
            streams.create(name, dataset, epochs=0)


def test_single_is_everything_once(dataset: Dataset) -> None:
    (task,) = make("single", dataset)
    assert (rows_of(task.train), task.epochs) == (set(range(N)), 3)


def test_warm_start_is_a_part_then_everything(dataset: Dataset) -> None:
    first, second = make("warm_start", dataset)
    assert (len(first.train), first.epochs, second.epochs) == (30, 7, 5)
    assert rows_of(second.train) == set(range(N))
    assert second.changed == {"examples"}
    with pytest.raises(ValueError, match=r"fraction: 1\.5 is not allowed; it must be a number that is in \(0, 1\]"):
        streams.create("warm_start", dataset, fraction=1.5)


def test_warm_start_with_everything_is_the_same_data_again(dataset: Dataset) -> None:
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
    with pytest.raises(ValueError, match="chunks is 121; with 120 to share out it must be 1 … 120"):
        list(streams.create("continual_full", dataset, chunks=121))


def test_classes_arrive_in_groups_and_are_tested_once_met(dataset: Dataset) -> None:
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


def test_random_labels_say_nothing_about_the_images(dataset: Dataset) -> None:
    tasks = list(make("random_labels", dataset))
    for task in tasks:
        assert task.test is None
        assert (rows_of(task.train), task.changed <= {"labels"}) == (set(range(N)), True)
        agreement = (task.train.y == dataset.train.y).double().mean()
        assert agreement < 0.25  # A tenth by chance; 120 draws stay below a quarter but once in 10⁶.
        assert set(task.train.y.tolist()) == set(range(CLASSES))
        # No class is renamed as a whole, as label_flip does.
        assert all(len(task.train.y[dataset.train.y == old].unique()) > 1 for old in range(CLASSES))
    assert len({tuple(task.train.y.tolist()) for task in tasks}) == len(tasks)


def test_pixel_permutations_are_bijective_and_the_same_for_training_and_test(dataset: Dataset) -> None:
    stream = make("pixel_permutation", dataset)
    for task in stream:
        order = stream.permutation(task.index)
        assert torch.equal(order.sort().values, torch.arange(12))
        for moved, original in ((task.train, dataset.train), (task.test, dataset.test)):
            assert torch.equal(moved.x.flatten(2), original.x.flatten(2)[..., order])
            assert torch.equal(moved.y, original.y)
    orders = {tuple(stream.permutation(index).tolist()) for index in range(5)}
    assert len(orders) == 5


def test_label_flips_rename_classes_as_a_whole(dataset: Dataset) -> None:
    stream = make("label_flip", dataset)
    for task in stream:
        names = stream.permutation(task.index)
        assert torch.equal(names.sort().values, torch.arange(CLASSES))
        assert torch.equal(task.train.y, names[dataset.train.y])
        assert torch.equal(task.test.y, names[dataset.test.y])


def test_pairs_use_every_class_once_before_any_comes_again(dataset: Dataset) -> None:
    stream = make("binary_pairs", dataset)
    assert stream.classes == 2
    pairs = [stream.pair(index) for index in range(8)]
    assert {label for pair in pairs[:5] for label in pair} == set(range(CLASSES))
    assert len({label for pair in pairs[5:] for label in pair}) == 6
    for task, (zero, one) in zip(stream, pairs, strict=True):
        assert len(task.train) == 2 * N // CLASSES
        rows = task.train.rows
        assert torch.equal(dataset.train.y[rows] == one, task.train.y == 1)
        assert torch.equal(dataset.train.y[rows] == zero, task.train.y == 0)
        assert task.changed == (frozenset({"classes", "head"}) if task.index else frozenset())


def test_unknown_streams_get_a_suggestion(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="did you mean 'warm_start'"):
        streams.create("warmstart", dataset)


def test_bad_options_are_named(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="stream 'warm_start': there is no 'fractoin'; did you mean 'fraction'"):
        streams.create("warm_start", dataset, fractoin=0.5)
    with pytest.raises(ValueError, match=r"fraction: '0\.5' is not allowed; it must be a number"):
        streams.create("warm_start", dataset, fraction="0.5")
    with pytest.raises(ValueError, match="accumulate: 'no' is not allowed; it must be one of True, False"):
        streams.create("class_incremental", dataset, phases=2, accumulate="no")


def test_tasks_without_examples_are_named_or_go_untested() -> None:
    x, y = torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1, 1, 2, 2])
    untested = from_tensors("untested", (x, y), (x[:2], y[:2]))
    arriving = streams.create("class_incremental", untested, 0, phases=3, epochs=1)
    met = torch.cat(arriving.groups()).tolist()
    assert [task.test is not None for task in arriving] == [0 in met[: count + 1] for count in range(3)]
    pairs = streams.create("binary_pairs", untested, 0, tasks=8, epochs=1)
    assert [task.test is not None for task in pairs] == [0 in pairs.pair(index) for index in range(8)]
    lacking = from_tensors("lacking", (x[:4], y[:4]), (x, y))
    with pytest.raises(ValueError, match=r"task \d has no training examples"):
        streams.create("class_incremental", lacking, 0, phases=3, epochs=1, accumulate=False).workload()
