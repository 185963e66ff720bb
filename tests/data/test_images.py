"""Images are converted to gray or color before they are resized."""

from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image, ImageDraw

from pliant import data
from tests.data.pictures import all_images, picture

pytestmark = pytest.mark.usefixtures("own_cache")


def only_image(root: Path, image: Image.Image, name: str = "0.png", **options: object) -> torch.Tensor:
    """Save the same image to four files of a folder and return it as loaded."""
    for place in ("cat/0", "cat/1", "dog/0", "dog/1"):
        file = root / f"{place}{Path(name).suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    first, *others = all_images(data.load(str(root), **options))
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("mode", ["P", "1"])
def test_palettes_and_bits_are_converted_before_resizing(tmp_path: Path, mode: str) -> None:
    image = picture(0, (16, 16)).convert(mode)
    plain = image.convert("RGB" if mode == "P" else "L")
    assert torch.equal(only_image(tmp_path / mode, image, size=5), only_image(tmp_path / "plain", plain, size=5))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(tmp_path: Path, mode: str) -> None:
    drawing = Image.new("LA" if mode == "LA" else "RGBA", (8, 8), 0)  # Black, and all transparent.
    ImageDraw.Draw(drawing).rectangle((2, 2, 5, 5), fill=(0, 255) if mode == "LA" else (0, 0, 0, 255))
    read = only_image(tmp_path / mode, drawing.convert(mode))
    assert read.shape == ((1 if mode == "LA" else 3), 8, 8)
    expected = torch.full((8, 8), 255, dtype=torch.uint8)
    expected[2:6, 2:6] = 0
    assert all(torch.equal(channel, expected) for channel in read)


@pytest.mark.parametrize("alpha", [0, 128, 255])
def test_uniform_transparency_is_ignored(tmp_path: Path, alpha: int) -> None:
    image = picture(3)
    read = only_image(tmp_path / "even", image.copy())
    image.putalpha(alpha)
    assert torch.equal(only_image(tmp_path / str(alpha), image), read)


@pytest.mark.parametrize("size", [None, 4])
def test_16_bit_images_may_have_either_byte_order(tmp_path: Path, size: int | None) -> None:
    values = numpy.arange(64, dtype=numpy.uint16).reshape(8, 8) * 1000
    little = Image.frombytes("I;16", (8, 8), values.tobytes())
    big = Image.frombytes("I;16B", (8, 8), values.byteswap().tobytes())
    read = only_image(tmp_path / "big", big, "0.tif", size=size)
    assert torch.equal(read, only_image(tmp_path / "little", little, "0.tif", size=size))
    if size is None:
        assert torch.equal(read[0], torch.from_numpy((values // 257).astype(numpy.uint8)))
