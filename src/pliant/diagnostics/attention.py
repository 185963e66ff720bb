"""Attention entropy: how evenly each head of attention spreads its weights, on a batch.

The entropy of a query's weights, divided by the logarithm of the number of keys that the query may see, is 1 if the
weights are uniform and 0 if a single key has all weight. Heads whose entropy collapses toward 0 barely change any more,
because the softmax is flat there (Zhai et al. 2023, "Stabilizing transformer training by preventing attention entropy
collapse").

A torch function mode sees the attention of a forward pass: `scaled_dot_product_attention`, `nn.MultiheadAttention`, and
a softmax over the last dimension of scores [samples, heads, queries, keys].
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pliant.diagnostics.activations import track_modules, uncompiled
from pliant.diagnostics.batches import Batch

_SOFTMAX = (torch.softmax, Tensor.softmax, functional.softmax)


def attention_entropy(scores: Tensor) -> Tensor:
    """Return −Σ p log p / log n of each head, p = softmax(scores), as a mean over samples and queries.

    n is the number of keys that a query sees. Queries that see a single key are left out.

    Args:
        scores: Scores [samples, heads, queries, keys]; −∞, or the smallest number of their type, at hidden keys.

    Returns:
        The entropy of each head; NaN if no query sees two keys.

    Example:
        >>> attention_entropy(torch.zeros(1, 2, 3, 4))  # uniform
        tensor([1., 1.], dtype=torch.float64)
        >>> hidden = -math.inf
        >>> scores = torch.tensor([[0.0, hidden, hidden], [0.0, 0.0, hidden], [9.0, 0.0, -9.0]])
        >>> attention_entropy(scores[None, None]).round(decimals=2)  # one key; two alike; nearly one of three
        tensor([0.5000], dtype=torch.float64)
    """
    seen = (scores > torch.finfo(scores.dtype).min / 2).sum(-1)
    logarithms = scores.double().log_softmax(-1)
    entropy = -(logarithms.exp() * logarithms.clamp(min=torch.finfo(torch.float64).min)).sum(-1)
    counted = seen > 1
    relative = torch.where(counted, entropy / seen.double().clamp(min=2).log(), 0.0)
    return relative.sum((0, 2)) / counted.sum((0, 2))


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the masked scores of `scaled_dot_product_attention`, with −∞ at hidden keys."""
    if key.shape[-3] != query.shape[-3]:  # several heads of queries share one of keys
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -math.inf)
    return scores + attn_mask


class _Watch(TorchFunctionMode):
    def __init__(self, path: list[str]) -> None:
        super().__init__()
        self._path = path
        self.found: dict[str, list[Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            chosen = {
                name: named[name] for name in ("query", "key", "attn_mask", "is_causal", "scale") if name in named
            }
            self._note(attention_scores(**chosen))
        elif func in _SOFTMAX and args and args[0].ndim == 4 and kwargs.get("dim", (*args, None)[1]) in (-1, 3):
            self._note(args[0])
        elif func is functional.multi_head_attention_forward:
            weights = func(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})[1]
            self._note(weights.log() if weights.ndim == 4 else weights.log()[None])
        return func(*args, **kwargs)

    def _note(self, scores: Tensor) -> None:
        if scores.ndim == 4:
            self.found.setdefault(self._path[-1] if self._path else "", []).append(attention_entropy(scores.detach()))


def head_entropies(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Run a model on a batch and return the entropy of each head of attention, by the module that computes it.

    A module that is called several times has the mean over its calls.
    """
    with torch.no_grad(), uncompiled(), track_modules(model) as path, _Watch(path) as watch:
        batch.forward(model)
    return {name: torch.stack(calls).mean(0) for name, calls in watch.found.items()}
