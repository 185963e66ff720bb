"""The ViT-Tiny for small images of the spectral regularization and FIRE papers."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from pliant._validation import require_positive
from pliant.models.building_blocks import require_image


class Attention(nn.Module):
    """Multi-head self-attention with separate layers for queries, keys and values, which methods treat separately.

    Args:
        width: Width of a token.
        heads: Number of heads.
        causal: Whether a token sees only those before it.
    """

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention to the tokens."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer MLP, each with a LayerNorm before it and a shortcut around it.

    Args:
        width: Width of a token.
        heads: Number of heads.
        activation: The class of the MLP's activation.
        causal: Whether a token sees only those before it.
    """

    def __init__(self, width: int, heads: int, activation: type[nn.Module] = nn.GELU, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    """Embed the patches of an image and their positions, after a class token.

    Args:
        channels: Channels of the image.
        patches: Number of patches of an image.
        patch: Height and width of a patch.
        width: Width of a token.
    """

    def __init__(self, channels: int, patches: int, patch: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, patches + 1, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the class token and the positions."""
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequence of tokens of each image."""
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(x), -1, -1)
        return torch.cat([first, tokens], dim=1) + self.positions


class FirstToken(nn.Module):
    """Keep the class token."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the first token of every sequence."""
        return x[:, 0]


def vit_tiny(
    shape: tuple[int, ...],
    classes: int,
    *,
    patch: int | None = None,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
) -> nn.Sequential:
    """Build ViT-Tiny: 12 blocks of width 192 with 3 heads.

    Args:
        shape: Channels, height and width of an image.
        classes: Number of outputs.
        patch: Height and width of a patch, a divisor of both image dimensions. By default the divisor nearest to an
            eighth of the image, which gives 64 patches.
        width: Width of a token.
        depth: Number of blocks.
        heads: Number of heads.

    Returns:
        The network.
    """
    channels, height, wide = require_image(shape, "a vision transformer")
    if patch is None:
        fitting = [size for size in range(1, height + 1) if height % size == wide % size == 0]
        patch = min(fitting, key=lambda size: (abs(size - height / 8), -size))
    require_positive(patch=patch, width=width, depth=depth, heads=heads)
    if height % patch or wide % patch:
        raise ValueError(f"patch is {patch}; it must divide height and width of {height} x {wide} images")
    if width % heads:
        raise ValueError(f"heads is {heads}; it must divide width, which is {width}")
    return nn.Sequential(
        Tokens(channels, (height // patch) * (wide // patch), patch, width),
        *(Block(width, heads) for _ in range(depth)),
        nn.LayerNorm(width),
        FirstToken(),
        nn.Linear(width, classes),
    )
