"""Make pictures of noise and folders of them."""

from pathlib import Path

import numpy
from PIL import Image
from torch import Tensor

from pliant.data import Dataset


def picture(seed: int, size: tuple[int, int] = (6, 6), mode: str = "RGB") -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_folder(root: Path, per_class: int = 5, mode: str = "RGB", **size: tuple[int, int]) -> Path:
    for label, name in enumerate(("cat", "dog", "owl")):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            picture(100 * label + i, mode=mode, **size).save(root / name / f"{i}.png")
    return root


def all_images(dataset: Dataset) -> list[Tensor]:
    return [*dataset.train.x, *dataset.test.x]
