"""Decode images to uint8 tensors."""

from collections.abc import Callable, Iterable
from io import BytesIO
from typing import IO, TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pliant._importing import naming_extra

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["L", "RGB"]


class CorruptImageError(ValueError):
    """A file that should be an image cannot be read as one."""


def open_image(source: bytes | IO[bytes], name: str) -> "Image":
    """Read an image and all of its pixels.

    Args:
        source: The encoded bytes, or an open file.
        name: The name used in error messages.

    Raises:
        CorruptImageError: If the file is damaged or not an image.
        ValueError: If the pixels are floating-point numbers, whose range is unknown.
    """
    with naming_extra("reading images", "data"):
        from PIL import Image
    try:
        image = Image.open(BytesIO(source) if isinstance(source, bytes) else source)
        image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CorruptImageError(f"{name} cannot be read as an image: {error}") from error
    if image.mode == "F":
        raise ValueError(f"{name} has floating-point pixels; save it with 8 or 16 bits a channel, or use an .npz file")
    return image


def flatten(image: "Image") -> "Image":
    """Convert palettes, bits and transparency to gray or color on a white background.

    If all pixels are equally transparent, transparency is ignored.
    """
    from PIL import Image

    if image.mode.startswith("I;"):
        return image.convert("I")  # Pillow resizes and scales no other 16-bit mode correctly.
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        gray, image = is_gray(image), image.convert("RGBA")
        low, high = image.getchannel("A").getextrema()
        if low != high:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("L" if gray else "RGB")
    if image.mode in ("1", "P"):  # In these modes, resizing picks one pixel instead of averaging.
        return image.convert("L" if is_gray(image) else "RGB")
    return image


def to_tensor(image: "Image", mode: Mode) -> Tensor:
    """Convert an image to uint8 [C, H, W]."""
    if image.mode.startswith("I"):
        # 16-bit gray: Pillow clips at 255 instead of scaling.
        image = image.point(lambda value: value / 257).convert("L")
    image = image.convert(mode)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode)).permute(2, 0, 1).contiguous()


def is_gray(image: "Image") -> bool:
    """Return whether an image is grayscale."""
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


def decode_all(
    sources: Iterable[tuple[str, Callable[[], "Image"]]], count: int, shape: tuple[int, ...], mode: Mode
) -> Tensor:
    """Decode images of equal size into one tensor.

    Args:
        sources: The name of each image and the function that reads it.
        count: The number of images.
        shape: Channels, height and width.
        mode: "L" for gray, "RGB" for color.

    Returns:
        uint8 [N, C, H, W].
    """
    images = torch.empty((count, *shape), dtype=torch.uint8)
    for place, (name, read) in enumerate(sources):
        pixels = to_tensor(read(), mode)
        if pixels.shape != images.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(pixels.shape)}; the others have {shape}")
        images[place] = pixels
    return images
