"""From encoded images to uint8 tensors."""

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
    """Read an image completely.

    Args:
        source: Its encoded bytes, or an open file of them.
        name: What error messages call it.

    Raises:
        CorruptImageError: If it is damaged or no image.
        ValueError: If its pixels are floating-point numbers, whose range nobody knows.
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
    """Turn palettes, bits and transparency into what they stand for: gray or color, as it looks on white paper.

    Where all of an image is equally transparent, its colors are taken as they are.
    """
    from PIL import Image

    if image.mode.startswith("I;"):
        return image.convert("I")  # The only one of the 16-bit modes whose pixels Pillow resizes and scales rightly.
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        gray, image = is_gray(image), image.convert("RGBA")
        low, high = image.getchannel("A").getextrema()
        if low != high:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("L" if gray else "RGB")
    if image.mode in ("1", "P"):  # Resizing would pick one of the pixels instead of their mean.
        return image.convert("L" if is_gray(image) else "RGB")
    return image


def to_tensor(image: "Image", mode: Mode) -> Tensor:
    """Convert an image to uint8 [C, H, W]."""
    if image.mode.startswith("I"):
        # 16-bit gray: Pillow would clip at 255 instead of scaling.
        image = image.point(lambda value: value / 257).convert("L")
    image = image.convert(mode)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, len(mode)).permute(2, 0, 1).contiguous()


def is_gray(image: "Image") -> bool:
    """Say whether an image has no colors."""
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


def decode_all(
    sources: Iterable[tuple[str, Callable[[], "Image"]]], count: int, shape: tuple[int, ...], mode: Mode
) -> Tensor:
    """Decode many images of one size into one tensor.

    Args:
        sources: A name and a function that reads the image, for each.
        count: How many there are.
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
