"""Families of calls, by the names that exported graphs give them."""

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

RESHAPES = ("view", "_unsafe_view", "squeeze", "unsqueeze", "clone", "alias", "detach")
"""Calls that keep all entries in their order."""

MOVES = (
    "transpose", "t", "permute", "expand", "flip", "roll", "rot90", "repeat", "tile", "repeat_interleave", "unfold",
    "diagonal", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
)  # fmt: skip
"""Calls that put entries elsewhere, or in several places."""

SPLITS = ("select", "slice", "split", "split_with_sizes", "unbind")
"""Calls that take a tensor apart."""

POOLS = (
    "max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Calls that combine the entries of a channel at neighbouring places."""


def pooled_dimensions(name: str) -> int:
    """Return how many of the last dimensions a pooling, or an interpolation, acts on.

    Example:
        >>> pooled_dimensions("max_pool2d_with_indices"), pooled_dimensions("adaptive_avg_pool1d")
        (2, 1)
    """
    return int("".join(letter for letter in name if letter.isdigit()))
