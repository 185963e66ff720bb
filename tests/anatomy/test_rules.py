"""Every rule against the call that it is for: its degree, and by `analyze`'s own check every value in between."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pliant.anatomy import analyze
from pliant.anatomy.rescaling import ScaleGraph
from pliant.anatomy.walk import RULES

X = torch.rand(3, 4, 6, 6, generator=torch.Generator().manual_seed(0)) + 0.5  # positive, for roots and logarithms
IDS = torch.tensor([[0, 2], [1, 1], [3, 0]])
MASK = torch.arange(6) % 2 == 0


def seq(x: Tensor) -> Tensor:
    return x.flatten(2)


def vol(x: Tensor) -> Tensor:
    return x.unsqueeze(2)


# Degree of homogeneity by call; None where there is none.
UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Fraction | int | None]] = {
    # activations
    "relu": (torch.relu, 1),
    "leaky_relu": (lambda x: F.leaky_relu(x - x.mean(), 0.3), 1),
    "abs": (torch.abs, 1),
    "neg": (torch.neg, 1),
    "crelu": (lambda x: torch.cat([F.relu(x), F.relu(-x)], 1), 1),
    "rrelu": (lambda x: F.rrelu(x - x.mean(), training=False), 1),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), 1),
    "dropout_eval": (lambda x: F.dropout(x, 0.5, training=False), 1),
    "dropout2d": (lambda x: F.dropout2d(x, 0.5, training=True), 1),
    "clamp_zero": (lambda x: (x - x.mean()).clamp(min=0), 1),
    "clamp_max_zero": (lambda x: (x - x.mean()).clamp_max(0.0), 1),
    "clamp_min_zero": (lambda x: (x - x.mean()).clamp_min(0.0), 1),
    "threshold": (lambda x: F.threshold(x - x.mean(), 0.0, 0.0), 1),
    "nan_to_num": (torch.nan_to_num, 1),
    "maximum": (lambda x: torch.maximum(x - x.mean(), 0.3 * (x - x.mean())), 1),
    "minimum": (lambda x: torch.minimum(x, x.flip(0)), 1),
    "clamp_from_above": (lambda x: 1 / x.abs().clamp(max=1e-4), None),
    "clamp_one": (lambda x: x.clamp(0.0, 1.0), None),
    "relu6": (F.relu6, None),
    "hardtanh": (F.hardtanh, None),
    "gelu": (F.gelu, None),
    "silu": (F.silu, None),
    "mish": (F.mish, None),
    "elu": (F.elu, None),
    "celu": (F.celu, None),
    "selu": (F.selu, None),
    "softplus": (F.softplus, None),
    "hardswish": (F.hardswish, None),
    "hardsigmoid": (F.hardsigmoid, None),
    "hardshrink": (F.hardshrink, None),
    "softshrink": (F.softshrink, None),
    "tanhshrink": (F.tanhshrink, None),
    "softsign": (F.softsign, None),
    "logsigmoid": (F.logsigmoid, None),
    "tanh": (torch.tanh, None),
    "sigmoid": (torch.sigmoid, None),
    "exp": (torch.exp, None),
    "exp2": (torch.exp2, None),
    "expm1": (torch.expm1, None),
    "log": (torch.log, None),
    "log2": (torch.log2, None),
    "log10": (torch.log10, None),
    "log1p": (torch.log1p, None),
    "erf": (torch.erf, None),
    "erfc": (torch.erfc, None),
    "erfinv": (lambda x: torch.erfinv(x / 4), None),
    "logit": (lambda x: torch.logit(x / 4), None),
    "asin": (lambda x: torch.asin(x / 4) + torch.acos(x / 4) + torch.atanh(x / 4), None),
    "asinh": (lambda x: torch.asinh(x) + torch.acosh(x + 1), None),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, training=True), None),
    "bce": (lambda x: F.binary_cross_entropy(x / 4, torch.ones_like(x)), None),
    "sin": (torch.sin, None),
    "cos": (torch.cos, None),
    "tan": (torch.tan, None),
    "atan": (torch.atan, None),
    "sinh": (torch.sinh, None),
    "cosh": (torch.cosh, None),
    "floor": (torch.floor, None),
    "ceil": (torch.ceil, None),
    "round": (torch.round, None),
    "trunc": (torch.trunc, None),
    "frac": (torch.frac, None),
    "fmod": (lambda x: torch.fmod(x, 0.3), None),
    "remainder": (lambda x: x % 0.3, None),
    "floor_divide": (lambda x: x // 0.3, None),
    "div_floor": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), None),
    "softmax": (lambda x: x.softmax(-1), None),
    "log_softmax": (lambda x: x.log_softmax(-1), None),
    "softmin": (lambda x: F.softmin(x, -1), None),
    "logsumexp": (lambda x: x.logsumexp(-1), None),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), None),
    "glu": (lambda x: F.glu(x, 1), None),
    "prod": (lambda x: x.prod(-1), None),
    "cumprod": (lambda x: x.cumprod(-1), None),
    "cast_int": (lambda x: x.long().float(), None),
    "plus_one": (lambda x: x + 1, None),
    "one_minus": (lambda x: 1 - x, None),
    "masked_fill_one": (lambda x: x.masked_fill(MASK, 1.0), None),
    "exponent": (lambda x: 2.0**x, None),
    "mse": (lambda x: F.mse_loss(x, torch.ones_like(x)), None),
    "l1": (lambda x: F.l1_loss(x, torch.ones_like(x)), None),
    "smooth_l1": (lambda x: F.smooth_l1_loss(x, torch.ones_like(x)), None),
    "huber": (lambda x: F.huber_loss(x, torch.ones_like(x)), None),
    "cross_entropy": (lambda x: F.cross_entropy(x.mean((2, 3)), IDS[:, 0]), None),
    "nll": (lambda x: F.nll_loss(x.mean((2, 3)), IDS[:, 0]), None),
    "kl": (lambda x: F.kl_div(x, torch.ones_like(x)), None),
    "bce_logits": (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), None),
    # powers
    "square": (torch.square, 2),
    "sqrt": (torch.sqrt, Fraction(1, 2)),
    "rsqrt": (torch.rsqrt, Fraction(-1, 2)),
    "reciprocal": (torch.reciprocal, -1),
    "cube": (lambda x: x**3, 3),
    "root": (lambda x: x**0.25, Fraction(1, 4)),
    "product": (lambda x: x * x.flip(0), 2),
    "ratio": (lambda x: x / x.sum(), 0),
    "inverse": (lambda x: 3.0 / x, -1),
    "zero_power": (lambda x: (x * 0) ** 0 + x, None),
    "addcmul": (lambda x: torch.addcmul(x * x, x, x), 2),
    "addcdiv": (lambda x: torch.addcdiv(x.reciprocal() * x, x, x), 0),
    # arithmetic
    "add": (lambda x: x + x.flip(0), 1),
    "add_zero": (lambda x: x + torch.zeros(6), 1),
    "add_full_zero": (lambda x: x + torch.full((6,), 0.0), 1),
    "add_full_infinity": (lambda x: x + torch.full((6,), float("inf")), 1),
    "add_number_zero": (lambda x: x + 0, 1),
    "add_in_place": (lambda x: x.clone().add_(x), 1),
    "sub": (lambda x: x - 0.5 * x.flip(0), 1),
    "rsub": (lambda x: torch.rsub(x, x.flip(0)), 1),
    "scaled": (lambda x: -3.0 * x / 7.0, 1),
    "lerp": (lambda x: torch.lerp(x, x.flip(0), 0.3), 1),
    "lerp_weight": (lambda x: torch.lerp(torch.ones_like(x), torch.zeros_like(x), x), None),
    "hypot": (lambda x: torch.hypot(x, x.flip(0)), 1),
    "atan2": (lambda x: torch.atan2(x, x.flip(0)), 0),
    "masked_fill_zero": (lambda x: x.masked_fill(MASK, 0.0), 1),
    "masked_fill_inf": (lambda x: x.masked_fill(MASK, float("-inf")), 1),
    "where": (lambda x: torch.where(MASK, x, -x), 1),
    "where_zero": (lambda x: torch.where(MASK, x, torch.tensor(0.0)), 1),
    "compare": (lambda x: (x > x.flip(0)).float() + (x <= x.flip(0)).float() + (x != 0).float(), 0),
    "compare_one": (lambda x: (x > 1).float(), None),
    "less": (lambda x: ((x < x.flip(0)) & (x >= 0.5 * x) | (x == 0)).float(), 0),
    "logical": (lambda x: torch.logical_not(x).float() + torch.logical_and(x, x).float(), 0),
    "sign": (lambda x: torch.sign(x) + torch.sgn(x), 0),
    "either": (lambda x: torch.logical_or(x, x.flip(0)).float(), 0),
    "finite": (lambda x: (x.isnan() | x.isinf() | x.isfinite()).float(), 0),
    "like": (lambda x: torch.zeros_like(x) + torch.full_like(x, 2.0) + torch.ones_like(x) + x.new_ones(6), 0),
    "new": (lambda x: x.new_zeros(3, 4, 6, 6) + x.new_full((6,), 3.0) + torch.rand_like(x) * 0, 0),
    "new_empty": (lambda x: x.new_empty(6).fill_(2.0) + torch.empty_like(x).copy_(torch.ones(6)), 0),
    "random_like": (lambda x: torch.randn_like(x), 0),
    # reductions
    "mean": (lambda x: x.mean((2, 3)), 1),
    "mean_all": (torch.mean, 1),
    "sum": (lambda x: x.sum(-1, keepdim=True), 1),
    "amax": (lambda x: x.amax(1), 1),
    "amin": (lambda x: x.amin((0, 1)), 1),
    "max_dim": (lambda x: x.max(1).values, 1),
    "max_all": (torch.max, 1),
    "max_two": (lambda x: torch.max(x, x.flip(0)), 1),
    "min_dim": (lambda x: x.min(1).values, 1),
    "median": (lambda x: x.median(1).values, 1),
    "norm": (lambda x: x.norm(dim=1), 1),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 3, dim=(1, 2)), 1),
    "count": (lambda x: torch.linalg.vector_norm(x, 0, dim=(1, 2)), 0),
    "std": (lambda x: x.std(1), 1),
    "var": (lambda x: x.var((1, 2)), 2),
    "var_mean": (lambda x: torch.var_mean(x, (1, 2))[1], 1),
    "std_mean": (lambda x: torch.std_mean(x, (1, 2))[0], 1),
    "aminmax": (lambda x: torch.aminmax(x, dim=1).max, 1),
    "argmax": (lambda x: x.argmax(1).float() + x.argmin(1).float() + x.argsort(1)[:, 0].float(), 0),
    "any": (lambda x: x.any().float() + x.all().float() + x.count_nonzero().float(), 0),
    "cumsum": (lambda x: x.cumsum(1), 1),
    "cummax": (lambda x: x.cummax(1).values - x.cummin(1).values, 1),
    "sort": (lambda x: x.sort(1).values, 1),
    "topk": (lambda x: x.topk(2, dim=1).values, 1),
    "kthvalue": (lambda x: x.kthvalue(2, dim=1).values, 1),
    "diff": (lambda x: x.diff(dim=1), 1),
    "diff_edges": (lambda x: x.diff(dim=1, prepend=x[:, :1]), 1),
    "diff_from_one": (lambda x: x.diff(dim=1, prepend=torch.ones(3, 1, 6, 6)), None),
    # pooling and resizing
    "max_pool1d": (lambda x: F.max_pool1d(seq(x), 2), 1),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 1, 1), 1),
    "max_pool2d_indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 1),
    "max_pool3d": (lambda x: F.max_pool3d(vol(x), (1, 2, 2)), 1),
    "avg_pool1d": (lambda x: F.avg_pool1d(seq(x), 2), 1),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 1, 1), 1),
    "avg_pool3d": (lambda x: F.avg_pool3d(vol(x), (1, 2, 2)), 1),
    "adaptive_avg1d": (lambda x: F.adaptive_avg_pool1d(seq(x), 4), 1),
    "adaptive_avg2d": (lambda x: F.adaptive_avg_pool2d(x, 2), 1),
    "adaptive_avg3d": (lambda x: F.adaptive_avg_pool3d(vol(x), 1), 1),
    "adaptive_max1d": (lambda x: F.adaptive_max_pool1d(seq(x), 4), 1),
    "adaptive_max2d": (lambda x: F.adaptive_max_pool2d(x, 2), 1),
    "adaptive_max3d": (lambda x: F.adaptive_max_pool3d(vol(x), 1), 1),
    "lp_pool": (lambda x: F.lp_pool2d(x, 2.0, 2), 1),
    "nearest1d": (lambda x: F.interpolate(seq(x), scale_factor=2.0), 1),
    "nearest2d": (lambda x: F.interpolate(x, scale_factor=2.0), 1),
    "nearest3d": (lambda x: F.interpolate(vol(x), scale_factor=2.0), 1),
    "nearest_exact": (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"), 1),
    "nearest_exact1d": (lambda x: F.interpolate(seq(x), scale_factor=2.0, mode="nearest-exact"), 1),
    "nearest_exact3d": (lambda x: F.interpolate(vol(x), scale_factor=2.0, mode="nearest-exact"), 1),
    "linear1d": (lambda x: F.interpolate(seq(x), scale_factor=2.0, mode="linear"), 1),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), 1),
    "bilinear_aa": (lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True), 1),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), 1),
    "bicubic_aa": (lambda x: F.interpolate(x, size=(3, 3), mode="bicubic", antialias=True), 1),
    "trilinear": (lambda x: F.interpolate(vol(x), scale_factor=2.0, mode="trilinear"), 1),
    "grid_sample": (lambda x: F.grid_sample(x, torch.zeros(3, 2, 2, 2), align_corners=False), 1),
    # norm layers, and norms written by hand
    "layer_norm": (lambda x: F.layer_norm(x, (6, 6)), 0),
    "group_norm": (lambda x: F.group_norm(x, 2), 0),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), 0),
    "instance_norm": (lambda x: F.instance_norm(x), 0),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), 0),
    "normalize": (lambda x: F.normalize(x, dim=1), 0),
    "rms_by_hand": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-20), 0),
    "norm_by_hand": (lambda x: (x - x.mean(1, True)) / torch.sqrt(x.var(1, keepdim=True) + 1e-20), 0),
    "std_by_hand": (lambda x: x / (x.std(1, keepdim=True) + 1e-20), 0),
    "power_by_hand": (lambda x: x * ((x * x).mean(1, keepdim=True) + 1e-20) ** -0.5, 0),
    "no_guard": (lambda x: (x - x.mean() + 1e-5).sqrt(), None),
    "cosine": (lambda x: F.cosine_similarity(x, x.flip(0), dim=1), 0),
    "cdist": (lambda x: torch.cdist(x[0], x[1]), 1),
    # shapes
    "reshape": (lambda x: x.reshape(3, -1).view(3, 4, 36).flatten().unflatten(0, (12, 36)), 1),
    "permute": (lambda x: x.permute(1, 0, 3, 2).transpose(0, 1).movedim(1, 3).mT, 1),
    "t": (lambda x: x[0, 0].t(), 1),
    "reshape_copied": (lambda x: x.transpose(1, 2).reshape(18, 24), 1),
    "squeeze": (lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(2).squeeze(), 1),
    "expand": (lambda x: x[:1].expand(5, 4, 6, 6), 1),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1).repeat_interleave(2, dim=0).tile(2, 1, 1, 1), 1),
    "repeat_some": (lambda x: x.repeat_interleave(torch.tensor([1, 2, 1]), dim=0, output_size=4), 1),
    "flip": (lambda x: x.flip(1).roll(1, 2).rot90(1, (2, 3)), 1),
    "split": (lambda x: x.split(2, 1)[0] + x.chunk(2, 1)[1] + x.split([1, 3], 1)[0] + x.tensor_split(2, 1)[0], 1),
    "unbind": (lambda x: x.unbind(1)[2] + x.select(1, 0) + x[:, 1] + x.narrow(1, 0, 1)[:, 0], 1),
    "whole": (lambda x: x[...], 1),
    "slice": (lambda x: x[:, ::2, 1:, :-1], 1),
    "stack": (lambda x: torch.stack([x, x.flip(0)], 2), 1),
    "cat": (lambda x: torch.cat([x, x.flip(0), torch.zeros(3, 1, 6, 6)], 1), 1),
    "pad": (lambda x: F.pad(x, (1, 2)), 1),
    "pad_one": (lambda x: F.pad(x, (1, 2), value=1.0).sum(-1), None),
    "pad_reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 1),
    "pad_reflect1d": (lambda x: F.pad(seq(x), (1, 1), mode="reflect"), 1),
    "pad_reflect3d": (lambda x: F.pad(vol(x), (1, 1, 1, 1, 0, 0), mode="reflect"), 1),
    "pad_replicate": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), 1),
    "pad_replicate1d": (lambda x: F.pad(seq(x), (1, 1), mode="replicate"), 1),
    "pad_replicate3d": (lambda x: F.pad(vol(x), (1, 1, 1, 1, 0, 0), mode="replicate"), 1),
    "pad_circular": (lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), 1),
    "unfold": (lambda x: x.unfold(2, 3, 1), 1),
    "im2col": (lambda x: F.unfold(x, 3, padding=1), 1),
    "diagonal": (lambda x: x.diagonal(0, 2, 3), 1),
    "triangle": (lambda x: x.tril() + x.triu(), 1),
    "pixel_shuffle": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), 1),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), 1),
    "cast": (lambda x: x.double().float().type_as(x), 1),
    "cast_bool": (lambda x: x.bool().float(), 0),
    "clone": (lambda x: x.clone().detach().contiguous().to("cpu"), 1),
    "index": (lambda x: x[:, IDS], 1),
    "index_mask": (lambda x: x.index_select(1, IDS[0]) + x.gather(1, torch.zeros(3, 2, 6, 6, dtype=torch.long)), 1),
    "take_along": (lambda x: x.take_along_dim(torch.zeros(3, 2, 6, 6, dtype=torch.long), 1), 1),
    "set_zero": (lambda x: _written(x, 0.0), 1),
    "set_slice": (lambda x: _written(x, 0.0, slice(1, 3)), 1),
    "set_one": (lambda x: _written(x, 1.0).sum(1), None),
    "index_put": (lambda x: x.index_put((IDS[:, 0] % 3,), x[0]), 1),
    "scatter": (lambda x: x.scatter(1, torch.zeros(3, 1, 6, 6, dtype=torch.long), x), 1),
    "scatter_add": (lambda x: x.scatter_add(1, torch.zeros(3, 1, 6, 6, dtype=torch.long), x), 1),
    "scatter_reduce": (lambda x: x.scatter_reduce(1, torch.zeros(3, 1, 6, 6, dtype=torch.long), x, "sum"), 1),
    "scatter_one": (lambda x: x.scatter(1, torch.zeros(3, 1, 6, 6, dtype=torch.long), 1.0).sum(1), None),
    "scatter_zero": (lambda x: x.scatter(1, torch.zeros(3, 1, 6, 6, dtype=torch.long), 0.0), 1),
    "scatter_product": (lambda x: x.scatter_reduce(1, torch.zeros(3, 1, 6, 6, dtype=torch.long), x, "prod"), None),
    "index_copy": (lambda x: x.index_copy(1, IDS[0], x[:, :2]), 1),
    "index_add": (lambda x: x.index_add(1, IDS[0], x[:, :2]), 1),
    "masked_scatter": (lambda x: x.masked_scatter(MASK, x.flip(0)), 1),
    # contractions of what has a scale with what has none
    "embedding": (lambda x: F.embedding(IDS, x[0, 0]), 1),
    "matmul": (lambda x: x @ torch.ones(6, 2), 1),
    "matmul_vector": (lambda x: x @ torch.ones(6) + torch.ones(6) @ x, 1),
    "mv": (lambda x: torch.mv(x[0, 0], torch.ones(6)) + torch.dot(x[0, 0, 0], torch.ones(6)), 1),
    "gram": (lambda x: x @ x.transpose(2, 3), 2),
    "mm": (lambda x: torch.mm(x[0, 0], x[0, 1]) + torch.bmm(x[0], x[1])[0], 2),
    "addmm": (lambda x: torch.addmm(x[0, 0], torch.ones(6, 6), x[0, 1]), 1),
    "addmv": (lambda x: torch.addmv(x[0, 0, 0], torch.ones(6, 6), x[0, 1, 0]), 1),
    "baddbmm": (lambda x: torch.baddbmm(x[0], torch.ones(4, 6, 6), x[1]), 1),
    "outer": (lambda x: torch.outer(x[0, 0, 0], x[0, 0, 1]), 2),
    "einsum": (lambda x: torch.einsum("bcij, b...kj -> b...cik", x, x[:, :1]), 2),
    "einsum_implicit": (lambda x: torch.einsum("ij,jk", x[0, 0], x[0, 1]), 2),
    "einsum_diagonal": (lambda x: torch.einsum("bcii->bci", x), 1),
    "tensordot": (lambda x: torch.tensordot(x, x, dims=([1, 2], [1, 2])), 2),
    "linear": (lambda x: F.linear(x, torch.ones(2, 6)), 1),
    "linear_bias": (lambda x: F.linear(x, torch.ones(2, 6), torch.ones(2)), None),
    "bilinear_form": (lambda x: F.bilinear(x, x.flip(0), torch.ones(2, 6, 6)), 2),
    "conv1d": (lambda x: F.conv1d(seq(x), torch.ones(2, 4, 3), padding=1), 1),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3), groups=2), 1),
    "conv2d_same": (lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3), padding="same"), 1),
    "conv2d_single": (lambda x: F.conv2d(x[0], torch.ones(2, 4, 3, 3)), 1),
    "conv3d": (lambda x: F.conv3d(vol(x), torch.ones(2, 4, 1, 3, 3)), 1),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(seq(x), torch.ones(4, 2, 3)), 1),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), groups=2), 1),
    "conv_transpose3d": (lambda x: F.conv_transpose3d(vol(x), torch.ones(4, 2, 1, 3, 3)), 1),
    "attention_values": (
        lambda x: F.scaled_dot_product_attention(torch.ones(3, 4, 2, 6), torch.ones_like(x) * 1, x),
        1,
    ),
    "attention_scores": (lambda x: F.scaled_dot_product_attention(x, x, torch.ones(3, 4, 6, 6)), None),
    "attention_norm": (lambda x: F.scaled_dot_product_attention(x, 1 / x, x, enable_gqa=True), 1),
    "weight_norm": (lambda x: torch._weight_norm(torch.rand(4, 6), x[0, 0, :4, :1], 0), 1),
    "weight_direction": (lambda x: torch._weight_norm(x[0, 0], torch.ones(6, 1), 0), 0),
}


def _written(x: Tensor, value: float, where: int | slice = 0) -> Tensor:
    x = x.clone()
    x[:, where] = value
    return x


class Probes(nn.Module):
    """Many functions side by side, each of an input times a parameter of its own."""

    def __init__(self, functions: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = functions
        self.factors = nn.ParameterDict({name: nn.Parameter(torch.tensor(1.1)) for name in functions})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: function(x * self.factors[name]) for name, function in self.functions.items()}


class Modules(nn.Module):
    """Modules with parameters, each after a factor of its own, on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "prelu": nn.PReLU(),
                "lstm": nn.LSTM(6, 5, batch_first=True),
                "gru": nn.GRU(6, 5, batch_first=True),
                "rnn_tanh": nn.RNN(6, 5, batch_first=True),
                "rnn_relu": nn.RNN(6, 5, batch_first=True, nonlinearity="relu"),
                "lstm_cell": nn.LSTMCell(6, 5),
                "gru_cell": nn.GRUCell(6, 5),
                "rnn_tanh_cell": nn.RNNCell(6, 5),
                "rnn_relu_cell": nn.RNNCell(6, 5, nonlinearity="relu"),
                "batch_norm": nn.BatchNorm1d(4),
                "batch_norm_plain": nn.BatchNorm1d(4, affine=False),
                "batch_norm_blind": nn.BatchNorm1d(4, track_running_stats=False),
                "instance_norm": nn.InstanceNorm1d(4, affine=True),
                "instance_norm_tracked": nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
                "layer_norm": nn.LayerNorm(6),
                "layer_norm_unbiased": nn.LayerNorm(6, bias=False),
                "group_norm": nn.GroupNorm(2, 4),
                "rms_norm": nn.RMSNorm(6),
                "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
                "spectral_norm": nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)),
            }
        )
        self.factors = nn.ParameterDict({name: nn.Parameter(torch.tensor(1.1)) for name in self.parts})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for name, part in self.parts.items():
            scaled = x * self.factors[name]
            result = part(scaled[:, 0] if name.endswith("cell") else scaled)
            outputs[name] = result[0] if isinstance(result, tuple) else result
        return outputs


@pytest.fixture(scope="module")
def probed() -> ScaleGraph:
    return analyze(Probes({name: function for name, (function, _) in UNARY.items()}), X)


@pytest.fixture(scope="module")
def modules() -> dict[str, ScaleGraph]:
    torch.manual_seed(0)
    model = Modules()
    return {mode: analyze(model.train(mode == "training"), X[..., 0]) for mode in ("training", "eval")}


@pytest.mark.parametrize("name", UNARY)
def test_degree_of_a_call(probed: ScaleGraph, name: str) -> None:
    function, degree = UNARY[name]
    own = next(n for n, block in enumerate(probed.blocks) if block.name == f"factors.{name}")
    assert probed.is_fixed(probed.blocks[own]) == (degree is None)
    if degree is not None:
        assert probed.system.outputs[name] == ({own: degree} if degree else {})
        torch.manual_seed(0)
        before = function(X)
        torch.manual_seed(0)
        torch.testing.assert_close(function(4 * X), 4.0 ** float(degree) * before, rtol=1e-4, atol=1e-4, equal_nan=True)


# The powers of (the factor before the module, its weight) in the factor of the output, and of what else follows.
MODULES: dict[str, tuple[str | None, tuple[int, int], dict[str, tuple[int, int]]]] = {
    "prelu": (None, (1, 0), {"weight": (0, 0)}),
    "batch_norm": ("weight", (0, 1), {"bias": (0, 1), "running_mean": (1, 0), "running_var": (2, 0)}),
    "batch_norm_plain": (None, (0, 0), {"running_mean": (1, 0), "running_var": (2, 0)}),
    "batch_norm_blind": ("weight", (0, 1), {"bias": (0, 1)}),
    "instance_norm": ("weight", (0, 1), {"bias": (0, 1)}),
    "layer_norm": ("weight", (0, 1), {"bias": (0, 1)}),
    "layer_norm_unbiased": ("weight", (0, 1), {}),
    "group_norm": ("weight", (0, 1), {"bias": (0, 1)}),
    "rms_norm": ("weight", (0, 1), {}),
    "weight_norm": ("parametrizations.weight.original0", (1, 1), {"bias": (1, 1)}),
    "spectral_norm": ("parametrizations.weight.original", (1, 0), {"bias": (1, 0)}),
}


@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_scales_of_a_module(modules: dict[str, ScaleGraph], name: str, mode: str) -> None:
    weight, output, others = MODULES[name]
    wishes = [f"factors.{name}"] + ([f"parts.{name}.{weight}"] if weight else [])
    plan = modules[mode].plan(wishes)
    assert sorted(block.name for block in plan.wishes) == sorted(wishes)
    columns = [[block.name for block in plan.wishes].index(wish) for wish in wishes]
    rows = {block.name: row for block, row in zip(plan.targets, plan.matrix[:, columns].tolist(), strict=True)}
    row = plan.outputs[list(modules[mode].system.outputs).index(name), columns].tolist()
    assert row == list(output[: len(wishes)])
    for leaf, powers in others.items():
        assert rows.get(f"parts.{name}.{leaf}", [0] * len(wishes)) == list(powers[: len(wishes)])


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell"])
def test_recurrent_layers_are_fixed(modules: dict[str, ScaleGraph], name: str) -> None:
    graph = modules["training"]
    blocks = [b for b in graph.blocks if b.name.startswith(f"parts.{name}.") or b.name == f"factors.{name}"]
    assert len(blocks) == 5
    assert all(graph.is_fixed(block) for block in blocks)


def test_every_rule_has_a_probe(probed: ScaleGraph, modules: dict[str, ScaleGraph]) -> None:
    # The other probes are traced twice, because some calls write to operands; then dropout is `native_dropout`.
    once = analyze(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.ones(1, 2))
    seen = {graph.graph.operator(node) for graph in (probed, once, *modules.values()) for node in graph.graph.nodes}
    assert set(RULES) - seen == set()
