"""Families of operators, by the names that exported graphs give them.

The rules for scales, the rules for shapes and the tracker of units all read these tables.
"""

from fractions import Fraction

# Elementwise operators: each entry of the result depends on one entry of each operand.

HOMOGENEOUS = ("relu", "leaky_relu", "rrelu", "neg", "abs", "nan_to_num", "dropout")
"""h(kx) = k h(x) for every k > 0."""

POWERS = {"square": Fraction(2), "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": Fraction(-1)}
"""h(kx) = k^d h(x), with the degree d."""

APPROXIMABLE = frozenset({"gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "hardswish"})
"""Activations close to relu far from zero, so that a caller may ask to treat them as relu."""

NONLINEAR = (
    *sorted(APPROXIMABLE), "tanh", "sigmoid", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc",
    "erfinv", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "log_sigmoid",
    "hardsigmoid", "hardtanh", "relu6", "logit", "floor", "ceil", "round", "trunc", "frac", "fmod", "remainder",
    "floor_divide",
)  # fmt: skip
"""Elementwise operators without a degree."""

CLAMPS = ("clamp", "clamp_min", "clamp_max", "threshold")
SUMS = ("add", "sub", "rsub", "maximum", "minimum", "hypot")
"""Both operands must have one scale, which the result has too."""

ELEMENTWISE = frozenset({
    *HOMOGENEOUS, *POWERS, *NONLINEAR, *CLAMPS, *SUMS, "prelu", "pow", "mul", "div", "native_dropout",
})  # fmt: skip

# Operators that combine entries.

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

LAYER_NORMS = ("layer_norm", "rms_norm")
BATCH_NORMS = (
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    "instance_norm",
)  # fmt: skip
NORMS = frozenset({*LAYER_NORMS, *BATCH_NORMS, "group_norm"})

REDUCTIONS = {
    "mean": 1, "sum": 1, "amax": 1, "amin": 1, "max": 1, "min": 1, "median": 1, "linalg_vector_norm": 1, "std": 1,
    "var": 2, "std_mean": 1, "var_mean": 2, "aminmax": 1, "argmax": 0, "argmin": 0, "any": 0, "all": 0,
    "count_nonzero": 0,
}  # fmt: skip
"""Reductions over dimensions, with the degree of their first result."""

POOLS = (
    "max_pool1d", "max_pool2d", "max_pool2d_with_indices", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Pooling and interpolation: they combine neighboring entries of a channel."""

FIXED = (
    "softmax", "log_softmax", "logsumexp", "logcumsumexp", "glu", "prod", "cumprod", "bernoulli", "cross_entropy_loss",
    "nll_loss_nd", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell",
)  # fmt: skip
"""Operators without a degree that combine entries: softmax, products, losses, recurrent layers."""

# Operators that compute nothing.

RESHAPES = ("view", "_unsafe_view", "squeeze", "unsqueeze", "clone", "alias", "detach")
"""They keep all entries in their order."""

MOVES = (
    "transpose", "t", "permute", "expand", "flip", "roll", "rot90", "repeat", "tile", "repeat_interleave", "unfold",
    "diagonal", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
)  # fmt: skip
"""They reorder or repeat entries."""

SPLITS = ("select", "slice", "split", "split_with_sizes", "unbind")
"""They return parts of a tensor."""

CASTS = ("_to_copy", "type_as")

VIEWS = frozenset({*RESHAPES, *MOVES, *SPLITS, "_to_copy"})
"""They only move, cut or repeat entries of their first argument: a view of a parameter is still the parameter."""

FILLS = ("zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full")
"""They fill a new tensor with one number."""

SHAPE_ONLY = frozenset({
    "new_zeros", "zeros_like", "new_full", "full_like", "new_ones", "ones_like", "rand_like", "randn_like",
    "new_empty", "empty_like", "_assert_tensor_metadata",
})  # fmt: skip
"""They use the shape or type of their operand, not its entries."""


def pooled_dimensions(name: str) -> int:
    """Return how many of the last dimensions a pooling or interpolation acts on.

    Example:
        >>> pooled_dimensions("max_pool2d_with_indices"), pooled_dimensions("adaptive_avg_pool1d")
        (2, 1)
    """
    return int("".join(letter for letter in name if letter.isdigit()))
