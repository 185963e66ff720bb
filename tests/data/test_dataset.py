"""Examples and data sets from tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pliant.data.dataset import Dataset, Examples, from_tensors


def make(n: int = 40, channels: int = 3) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n + 10, channels, 4, 5), generator=generator, dtype=torch.uint8)
    y = torch.arange(n + 10) % 4
    return from_tensors("made", (x[:n], y[:n]), (x[n:], y[n:]))


def test_batches_are_normalized_by_the_training_images_per_channel() -> None:
    data = make()
    x, _ = data.train.batch(torch.arange(40))
    raw = data.train.x.double()
    mean, std = raw.mean((0, 2, 3), keepdim=True), raw.std((0, 2, 3), correction=0, keepdim=True)
    assert torch.allclose(x.double(), (raw - mean) / std, atol=1e-6)
    test, _ = data.test.batch(torch.arange(10))
    assert torch.allclose(test.double(), (data.test.x.double() - mean) / std, atol=1e-6)


def test_a_constant_channel_is_not_divided_by_zero() -> None:
    x = torch.full((6, 1, 2, 2), 7, dtype=torch.uint8)
    data = from_tensors("flat", (x, torch.zeros(6, dtype=torch.int64)), (x, torch.zeros(6, dtype=torch.int64)))
    assert torch.equal(data.train.batch(torch.arange(6))[0], torch.zeros(6, 1, 2, 2))


def test_features_are_not_normalized() -> None:
    x = torch.randn(8, 3)
    data = from_tensors("features", (x, torch.arange(8) % 2), (x, torch.arange(8) % 2))
    assert torch.equal(data.train.batch(torch.arange(8))[0], x)


@given(st.lists(st.integers(0, 39), min_size=1, max_size=30), st.data())
def test_selections_compose(rows: list[int], data: st.DataObject) -> None:
    examples = make().train
    second = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1))
    twice = examples.select(torch.tensor(rows)).select(torch.tensor(second))
    x, y = twice.batch(torch.arange(len(second)))
    expected_x, expected_y = examples.batch(torch.tensor(rows)[torch.tensor(second)])
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)


def test_select_does_not_copy_images() -> None:
    examples = make().train
    assert examples.select(torch.tensor([3, 1])).x.data_ptr() == examples.x.data_ptr()


def test_select_keeps_the_device() -> None:
    chosen = make().to("meta").train.select(torch.arange(3))
    assert chosen.rows is not None
    assert {chosen.x.device, chosen.y.device, chosen.rows.device} == {torch.device("meta")}


def test_pixel_permutation_is_the_same_for_all_channels_and_invertible() -> None:
    examples = make().train.select(torch.tensor([5, 2, 9]))
    order = torch.randperm(20)
    moved = examples.permute_pixels(order)
    index = torch.arange(3)
    flat = examples.batch(index)[0].flatten(2)
    assert torch.equal(moved.batch(index)[0].flatten(2), flat[..., order])
    assert torch.equal(moved.permute_pixels(order.argsort()).batch(index)[0], examples.batch(index)[0])


def test_holdout_excludes_the_test_examples() -> None:
    data = make()
    held = data.holdout(0.25, seed=3)
    assert (len(held.train), len(held.test)) == (30, 10)
    assert held.train.x.data_ptr() == held.test.x.data_ptr() == data.train.x.data_ptr()
    rows = torch.cat([held.train.rows, held.test.rows])
    assert torch.equal(rows.sort().values, torch.arange(40))
    assert not torch.equal(held.test.rows, data.holdout(0.25, seed=4).test.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(3, dtype=torch.int64)}, "y has 3 labels for 40 examples"),
        ({"y": torch.zeros(40)}, "must be torch.int64"),
        ({"x": torch.zeros(40, 2, dtype=torch.int32)}, "x has dtype torch.int32"),
    ],
)
def test_invalid_examples_are_rejected(change: dict[str, torch.Tensor], message: str) -> None:
    examples = make().train
    with pytest.raises(ValueError, match=message):
        Examples(**({"x": examples.x, "y": examples.y} | change))


def test_invalid_data_sets_are_rejected() -> None:
    x, y = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="test has no examples"):
        from_tensors("bad", (x, y), (x[:0], y[:0]))
    with pytest.raises(ValueError, match=r"train images have shape \(4, 2, 2\)"):
        from_tensors("bad", (x[:, 0], y), (x, y))
    with pytest.raises(ValueError, match="with 2 classes they must be 0 … 1"):
        from_tensors("bad", (x, y + 5), (x, y), ("a", "b"))
    with pytest.raises(ValueError, match=r"test inputs \(1, 2, 1\)"):
        from_tensors("bad", (x, y), (x[..., :1], y))
    with pytest.raises(ValueError, match=r"fraction: 1\.5 is not allowed; it must be a number that is in \(0, 1\)"):
        make().holdout(1.5, 0)
    with pytest.raises(ValueError, match="leaves the training set or the test set empty"):
        make().holdout(0.001, 0)
    with pytest.raises(ValueError, match="order has 19 entries; inputs have 20 positions"):
        make().train.permute_pixels(torch.arange(19))
    with pytest.raises(ValueError, match="first is 41; it must be 1 … 40"):
        make().first(41)
    with pytest.raises(ValueError, match=r"train labels have shape \(4, 1\); they must be \[N\]"):
        from_tensors("bad", (x, y[:, None]), (x, y))
    with pytest.raises(ValueError, match="test inputs hold values that are not finite"):
        from_tensors("bad", (x.float(), y), (x / 0, y))


def test_unit_range_divides_pixels_by_255_and_does_not_change_features() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    labels = torch.zeros(3, dtype=torch.int64)
    x, _ = from_tensors("x", (images, labels), (images, labels)).in_unit_range().test.batch(torch.arange(3))
    torch.testing.assert_close(x.flatten(), torch.tensor([0.0, 0.2, 1.0]))
    features = from_tensors("x", (images.float(), labels), (images.float(), labels))
    assert torch.equal(features.in_unit_range().train.batch(torch.arange(3))[0], images.float())


def test_projection_is_one_linear_map_of_normalized_inputs() -> None:
    data = make(80)
    projected = data.project(7)
    assert projected.shape == (7,)
    train, test = (part.batch(torch.arange(10)) for part in (projected.train, projected.test))
    raw_train, raw_test = (part.batch(torch.arange(10)) for part in (data.train, data.test))
    everything, _ = data.train.batch(torch.arange(80))
    matrix = torch.linalg.lstsq(everything.flatten(1).double(), projected.train.x.double()).solution
    torch.testing.assert_close(raw_test[0].flatten(1).double() @ matrix, test[0].double(), rtol=0, atol=1e-4)
    assert torch.equal(train[1], raw_train[1])
    assert torch.equal(projected.train.x, make(80).project(7).train.x)


def test_projection_keeps_the_scale_and_follows_a_selection() -> None:
    data = from_tensors("x", (torch.randn(2000, 500), torch.zeros(2000, dtype=torch.int64)),
                        (torch.randn(5, 500), torch.zeros(5, dtype=torch.int64)))  # fmt: skip
    assert float(data.project(300).train.x.std()) == pytest.approx(1, abs=0.02)
    assert torch.equal(data.first(3).project(4).train.x, data.project(4).train.x[:3])
    with pytest.raises(ValueError, match=r"project is 501; it must be 1 … 500"):
        data.project(501)


def test_held_out_examples_are_those_that_a_network_has_not_learned() -> None:
    dataset = make()
    seen = torch.zeros(len(dataset.train), dtype=torch.bool)
    seen[: len(seen) // 2] = True
    held = dataset.holdout(0.2, seed=1, seen=seen)
    assert len(held.test) == round(0.2 * len(seen))
    assert not held.test.are_in(dataset.train.select(torch.nonzero(seen).flatten())).any()
    assert len(held.train) + len(held.test) == len(seen)
    assert not held.train.are_in(held.test).any()
    known = dataset.holdout(0.2, seed=1, seen=torch.ones_like(seen))
    assert torch.equal(known.test.rows, dataset.holdout(0.2, seed=1).test.rows)
    few = torch.ones_like(seen)
    few[:4] = False
    assert len(dataset.holdout(0.9, seed=1, seen=few).test) == 2
