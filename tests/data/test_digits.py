"""The built-in digits."""

from collections import Counter

import numpy
import pytest
import torch
from sklearn.datasets import load_digits

from pliant import data
from pliant.data import cache, digits

pytestmark = pytest.mark.usefixtures("own_cache")


def count_pairs(images: numpy.ndarray, labels: numpy.ndarray) -> Counter[tuple[bytes, int]]:
    return Counter((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


class TestDigits:
    def test_sizes_and_split(self) -> None:
        loaded = data.load("digits")
        assert (len(loaded.train), len(loaded.test), loaded.shape) == (1437, 360, (1, 8, 8))
        assert set(loaded.test.y.tolist()) == set(range(10))

    def test_every_example_is_in_exactly_one_split(self) -> None:
        bunch, loaded = load_digits(), data.load("digits")
        images = (bunch.images * 255 / 16).round().astype(numpy.uint8)
        x = torch.cat([loaded.train.x, loaded.test.x]).numpy()
        y = torch.cat([loaded.train.y, loaded.test.y]).numpy()
        assert count_pairs(x, y) == count_pairs(images, bunch.target)

    def test_another_decoder_version_does_not_use_the_old_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data.load("digits")
        monkeypatch.setattr(digits, "_DECODER", "another")
        digits.load_digits.cache_clear()
        data.load("digits")
        assert len(cache.entries()) == 2

    def test_pixel_range_and_projection(self) -> None:
        index = torch.arange(1437)
        pixels, _ = data.load("digits", pixels="unit").train.batch(index)
        assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
        inputs, _ = data.load("digits", pixels="unit", project=5).train.batch(index)
        assert inputs.shape == (1437, 5)
        assert torch.equal(inputs, data.load("digits").in_unit_range().project(5).train.x)

    def test_first_keeps_the_first_examples(self) -> None:
        assert len(data.load("digits", first=100).train) == 100
