"""Watching a forward pass for the places where parameters meet samples.

A torch function mode sees every call of a torch function, whichever module makes it. A tensor that comes of parameters
and does not grow with the number of samples is a *weight*: a parameter itself, a transposed, split or re-parametrized
one, a position embedding. A call that takes a weight and whose output grows with the samples is a *use* of it. What
grows is found by comparing shapes with those of a pass over another number of samples, which also tells which dimension
the samples are in.

A weight that meets samples in a call without a rule (`rules.py`) is reported, so that its gradients can be taken in
another way: nothing is left out in silence.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pliant._precision import widen
from pliant.diagnostics.per_sample.gradient_rules import RULES, Call, Contribution, matrix_shape
from pliant.diagnostics.per_sample.inner_products import Dense, Outer, Rows, Use, check_memory

# The positional arguments of `multi_head_attention_forward` after query, key and value.
_ATTENTION = (
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)


class Shapes(TorchFunctionMode):
    """Records the shape of every tensor that a forward pass makes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Size] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._attention(*args, **kwargs)
        out = func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.saw(func, args, kwargs, tensor)
        return out

    def saw(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Take note of a tensor that a call made."""
        self.made.append(out.shape)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Do multi-head attention with its four projections as calls that the mode can see.

        The function itself gets what they give, and identities in their place.
        """
        given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
        size = given["embed_dim_to_check"]
        with self:
            weight, bias = given["in_proj_weight"], given["in_proj_bias"]
            separate = [given.pop(f"{name}_proj_weight", None) for name in "qkv"]
            if query is key is value and weight is not None:
                projected = functional.linear(query, weight, bias).chunk(3, dim=-1)
            else:
                weights = weight.chunk(3) if weight is not None else separate
                biases = bias.chunk(3) if bias is not None else [None] * 3
                three = zip((query, key, value), weights, biases, strict=True)
                projected = tuple(functional.linear(*each) for each in three)
        weight_out, bias_out = given["out_proj_weight"], given["out_proj_bias"]
        identity = torch.eye(size, dtype=query.dtype, device=query.device)
        given |= {"in_proj_weight": identity.repeat(3, 1), "in_proj_bias": None, "use_separate_proj_weight": False}
        given |= {"out_proj_weight": identity, "out_proj_bias": None}
        mixed, attention = functional.multi_head_attention_forward(*projected, **given)  # type: ignore[arg-type]
        for extra in (given["bias_k"], given["bias_v"]):
            if extra is not None:
                self.saw(functional.multi_head_attention_forward, (extra,), {}, mixed)
        with self:
            return functional.linear(mixed, weight_out, bias_out), attention


class Uses(Shapes):
    """Watches a forward pass, and during the backward pass hands every use of a parameter to a callback.

    Attributes:
        pending: For each parameter, how many uses are still to come.
        untreated: Parameters that met samples in a call that no rule covers, and why.
        cut_off: Parameters that were used where no gradients are recorded.
        diverged: Whether the pass made other calls than the one it is compared with.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        samples: int,
        probe: Shapes,
        probe_samples: int,
        deliver: Callable[[str, Use], None],
    ) -> None:
        super().__init__()
        self.pending = dict.fromkeys(parameters, 0)
        self.untreated: dict[str, str] = {}
        self.cut_off: set[str] = set()
        self.diverged = False
        self._parameters = parameters
        self._samples = samples
        self._probe = probe.made
        self._probe_samples = probe_samples
        self._deliver = deliver
        # Weights by identity, with the parameters they come of. The tensor is kept, or its identity could be reused.
        self._weights = {id(p): (p, frozenset([name])) for name, p in parameters.items()}

    def saw(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], out: Tensor) -> None:
        """Take note of a tensor that a call made: a weight, a use of weights, or neither."""
        place = len(self.made)
        super().saw(func, args, kwargs, out)
        if place >= len(self._probe) or len(self._probe[place]) != out.ndim:
            self.diverged = True
            return
        weights = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._weights]
        if not weights or not out.is_floating_point():
            return
        grown = [axis for axis, size in enumerate(self._probe[place]) if size != out.shape[axis]]
        if not grown:
            if out.requires_grad:  # not of a parameter that was detached on the way
                sources = frozenset().union(*(self._weights[id(weight)][1] for weight in weights))
                self._weights.setdefault(id(out), (out, sources))
            return
        contributions: dict[int, Contribution] = {}
        why = f"it is used in `{getattr(func, '__name__', func)}`, which has no rule"
        if not self._holds_samples(grown, out.shape, self._probe[place]):
            why = f"{why} for what does not hold all samples alike"
        elif func in RULES:
            rule, names = RULES[func]
            call = Call({**dict(zip(names, args, strict=False)), **kwargs}, out.shape, self._samples, grown[0])
            contributions = {id(weight): contribution for weight, contribution in rule(call)}
        for weight in weights:
            if id(weight) in contributions:
                self._watch(weight, contributions[id(weight)], out)
            else:
                self.untreated |= dict.fromkeys(self._weights[id(weight)][1], why)

    def _holds_samples(self, grown: list[int], shape: torch.Size, probe: torch.Size) -> bool:
        """Say whether one dimension grew, which holds all samples, and each as often as the other pass did."""
        if len(grown) != 1 or shape[grown[0]] % self._samples:
            return False
        return shape[grown[0]] * self._probe_samples == probe[grown[0]] * self._samples

    def _watch(self, weight: Tensor, contribution: Contribution, out: Tensor) -> None:
        sources = self._weights[id(weight)][1]
        if not out.requires_grad:
            self.cut_off |= sources
            return
        for name in sources:
            self.pending[name] += 1

        # The hook lives as long as the graph does; what the contribution keeps of the forward pass must not.
        once = [contribution]
        del contribution

        def arrived(delta: Tensor) -> None:
            use = once.pop()(widen(delta.detach()))
            for name in sources:
                self.pending[name] -= 1
                self._deliver(name, use if weight is self._parameters[name] else self._through(use, weight, name))

        out.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _through(self, use: Use, weight: Tensor, name: str) -> Use:
        """Return the contribution to a parameter of a use of a weight that was computed from it."""
        parameter = self._parameters[name]
        if (same := _of_view(use, weight, parameter)) is not None:
            return same
        check_memory([parameter], self._samples, f"{name} (its use is that of a tensor computed from it)")
        rows = torch.arange(matrix_shape(weight)[0], device=weight.device)
        gradients = []
        for gradient in use.block(rows):
            outer = gradient.reshape(weight.shape).to(weight.dtype)
            (inner,) = torch.autograd.grad(weight, parameter, outer, retain_graph=True, allow_unused=True)
            gradients.append((torch.zeros_like(parameter) if inner is None else inner).reshape(matrix_shape(parameter)))
        return Dense(torch.stack(gradients))


def _of_view(use: Use, weight: Tensor, parameter: Tensor) -> Use | None:
    """Return the use of a view of a parameter as one of the parameter; `None` if it takes more than other indices."""
    if weight._base is not parameter or weight.ndim != parameter.ndim or not weight.ndim:
        return None
    transposed = weight.shape == parameter.shape[::-1] and weight.stride() == parameter.stride()[::-1]
    if isinstance(use, Outer) and weight.ndim == 2 and transposed:
        return Outer(use.right, use.left)
    in_rows = weight.shape[1:] == parameter.shape[1:] and weight.stride() == parameter.stride()
    if isinstance(use, Outer | Dense) and in_rows:
        start = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
        return Rows(use, start, len(weight))
    return None
