"""Random labels, permuted pixels, permuted labels and pairs of classes."""

import pytest
import torch

from pliant import streams
from pliant.data.dataset import Dataset, from_tensors
from tests.streams.stream_options import CLASSES, N, content, make, rows_of, same


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
    assert stream.outputs == 2
    pairs = [stream.pair(index) for index in range(8)]
    assert {label for pair in pairs[:5] for label in pair} == set(range(CLASSES))
    assert len({label for pair in pairs[5:] for label in pair}) == 6
    for task, (zero, one) in zip(stream, pairs, strict=True):
        assert len(task.train) == 2 * N // CLASSES
        rows = task.train.rows
        assert torch.equal(dataset.train.y[rows] == one, task.train.y == 1)
        assert torch.equal(dataset.train.y[rows] == zero, task.train.y == 0)
        assert task.changed == (frozenset({"classes", "head"}) if task.index else frozenset())


@pytest.mark.parametrize("name", ["random_labels", "label_flip", "pixel_permutation"])
def test_drift_changes_a_growing_part_of_the_examples(name: str, dataset: Dataset) -> None:
    sudden = streams.create(name, dataset, tasks=3, epochs=1)
    drifting = streams.create(name, dataset, tasks=9, epochs=1, drift=4)
    for state in range(3):
        assert same(drifting[4 * state], sudden[state])

    def differing(index: int, state: int) -> torch.Tensor:
        pairs = zip(content(drifting[index].train), content(sudden[state].train), strict=True)
        return torch.stack([(a != b).flatten(1).any(1) if a.ndim > 1 else a != b for a, b in pairs]).any(0)

    for part in (1, 2, 3):
        from_old, from_new = differing(4 + part, 1), differing(4 + part, 2)
        assert not (from_old & from_new).any()  # Every example is as before or as it will be.
        assert int(from_old.sum()) <= N * part // 4
        assert int((~from_new).sum()) >= N * part // 4
    assert bool((differing(5, 1) <= differing(6, 1)).all())


def make_images() -> Dataset:
    images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    return from_tensors("images", images, images)
