"""Random labels, permuted pixels, permuted labels and pairs of classes."""

import torch

from pliant.data.dataset import Dataset
from tests.streams.stream_options import CLASSES, N, make, rows_of


def test_random_labels_are_independent_of_the_images(dataset: Dataset) -> None:
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


def test_label_flip_permutes_the_labels(dataset: Dataset) -> None:
    stream = make("label_flip", dataset)
    for task in stream:
        names = stream.permutation(task.index)
        assert torch.equal(names.sort().values, torch.arange(CLASSES))
        assert torch.equal(task.train.y, names[dataset.train.y])
        assert torch.equal(task.test.y, names[dataset.test.y])


def test_pairs_use_every_class_once_before_one_repeats(dataset: Dataset) -> None:
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
