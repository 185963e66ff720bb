"""DASH: when data is new, shrink each weight vector by its alignment with the negative gradient (Shin et al. 2024).

Paper: "DASH: warm-starting neural network training in stationary settings without loss of plasticity"; FIRE paper, A.3.
The negative gradient of the loss is averaged over chunks of data, G ← (1−α)G + α(−∇), starting at zero. Then each
weight vector w is multiplied by clamp(cos(g, w), λ, 1). A vector is a row of a linear layer (all inputs of one unit),
the kernel of a convolution from one channel to another, or a whole bias. Norm layers stay.

Where we deviate. The authors' code treats every chunk of data that has arrived as one batch, oldest first. Other code
runs it on mini-batches, which changes the meaning of α. `accumulate` selects between them. Parameters that the paper
does not mention follow the same rule by shape: the rows of an embedding are vectors, and so is a class token.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pliant._precision import wide_dtype, widen
from pliant._validation import check_choice, check_number, check_positive_int
from pliant.anatomy.parameters import find_matrices, is_in_norm_layer
from pliant.distributed import iterate_together, sum_over_ranks
from pliant.methods._core.filters import Filter, learnable_parameters, warn_of_computed
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.module_hooks import silent_hooks
from pliant.methods._core.reinitializer import OptimizerState, Reinitializer, Steps
from pliant.running import call_with, left_as_it_was

Accumulate = Literal["chunk", "batch"]


def shrink_factors(weight: Tensor, direction: Tensor, lam: float) -> Tensor:
    """Return clamp(cos(direction, weight), λ, 1) for each vector of a weight, shaped to multiply the weight.

    Args:
        weight: [out, in], whose rows are the vectors; [out, in, *kernel], whose kernels are; or a single vector.
        direction: The averaged negative gradient, of the same shape. The factor of a zero vector is λ.
        lam: λ, the smallest factor.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> shrink_factors(weight, torch.tensor([[3.0, 4.0], [0.0, -1.0]]), lam=0.3)
        tensor([[0.6000],
                [0.3000]])
    """
    vector = tuple(range(min(weight.ndim - 1, 2), weight.ndim))
    products = (weight * direction).sum(vector, keepdim=True)
    norms = torch.linalg.vector_norm(weight, dim=vector, keepdim=True)
    norms = norms * torch.linalg.vector_norm(direction, dim=vector, keepdim=True)
    return torch.where(norms > 0, products / norms, 0).clamp(lam, 1)


class DASH(Reinitializer):
    """Shrink weights by their alignment with the negative gradient on the new data, on `apply()`.

    Args:
        model: The model. Gradients are computed in its current mode. Its `.grad`, its buffers and the random generators
            stay as they were.
        lam: λ in [0, 1], the smallest factor; 1 leaves all weights as they are.
        alpha: α in (0, 1], the weight of the newest chunk in the average. It has no effect on a single chunk.
        accumulate: "chunk" joins batches into chunks of `chunk_size` examples (as the authors do); "batch" treats each
            batch as a chunk (as the FIRE paper's code does).
        chunk_size: The examples per chunk, for accumulate="chunk"; all data is one chunk if None. Batches are not
            split: a chunk ends with the batch that fills it.
        optimizer_state: "keep" (as the authors do) or "reset" the moments of the parameters.
        where: Which parameters to shrink; all learnable ones outside norm layers if None. A norm layer of your own is
            recognized by "Norm" in the name of its class.
        at: Steps after which the method acts by itself, counted from 1. It then uses the gradient of that step.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "dash"

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: float = 0.3,
        alpha: float = 0.3,
        accumulate: Accumulate = "chunk",
        chunk_size: int | None = None,
        optimizer_state: OptimizerState = "keep",
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        learnable_parameters(model)  # rejects unsuitable parameters before their layers are examined
        super().__init__(
            model,
            optimizer_state=optimizer_state,
            where=lambda name, p: not is_in_norm_layer(model, name) and (where is None or where(name, p)),
            at=at,
            every=every,
        )
        warn_of_computed(self.name, model, self.parameters)
        self.lam = check_number("lam", lam, high=1.0)
        self.alpha = check_number("alpha", alpha, high=1.0, above=True)  # at 0 the average would stay zero
        check_choice("accumulate", accumulate, get_args(Accumulate))
        self.accumulate = accumulate
        if chunk_size is not None:
            check_positive_int("chunk_size", chunk_size)
            if accumulate == "batch":
                raise ValueError(f"chunk_size: {chunk_size} has no effect with accumulate='batch'; leave it out")
        self.chunk_size = chunk_size
        self._transposed = {m.parameter: 0 if m.member is None else 1 for m in find_matrices(model) if m.transposed}

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        free = self._free()
        found: Iterable[dict[str, Tensor]]
        if batches is not None and loss_fn is not None:
            found = self._chunks(batches, loss_fn)
        elif batches is None and not self.acts_on_new_data:
            found = [self._gradients(tuple(free))]
        else:
            missing = "batches" if batches is None else "loss_fn"
            raise ValueError(f"{missing}: None, but dash needs the new data; call apply(batches=…, loss_fn=…)")
        average = {name: torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for name, p in free.items()}
        chunks, reached = 0, set[str]()
        with left_as_it_was(self.model), silent_hooks():
            for gradients in found:
                chunks += 1
                reached |= gradients.keys()
                for name, mean in average.items():
                    mean.mul_(1 - self.alpha)
                    if name in gradients:
                        mean.sub_(gradients[name], alpha=self.alpha)
        if chunks == 0:
            raise ValueError("batches: empty; dash needs at least one batch of the new data")
        if not reached:
            raise ValueError("loss_fn: its gradient reaches none of the parameters that dash shrinks")
        shrunk = []
        for name, parameter in free.items():
            weight, direction = parameter.detach(), average[name]
            if name in self._transposed:
                first = self._transposed[name]
                weight, direction = (tensor.transpose(first, first + 1) for tensor in (weight, direction))
            if not torch.linalg.vector_norm(direction).isfinite():
                raise ValueError(f"loss_fn: its gradient of {name!r} on the new data is not finite, or overflows")
            shrunk.append((weight, shrink_factors(weight.to(direction.dtype), direction, self.lam)))
        for weight, factor in shrunk:
            weight.mul_(factor)
        factors = {name: float(factor.mean()) for name, (_, factor) in zip(free, shrunk, strict=True)}
        return {"chunks": chunks, "mean_factors": factors, "unreached": [name for name in free if name not in reached]}

    def _chunks(self, batches: Batches, loss_fn: LossFunction) -> Iterator[dict[str, Tensor]]:
        """Yield the mean gradient of each chunk; on several ranks, a chunk holds the batches of all of them."""
        total: dict[str, Tensor] = {}
        examples = 0
        for batch in iterate_together(batches, self.group):
            size = 0
            if batch is not None:
                if not (isinstance(batch, tuple | list) and len(batch) == 2):
                    raise ValueError(
                        f"batches: holds a {type(batch).__name__}; it must hold pairs of inputs and targets"
                    )
                size = _count_examples(*batch)
                for name, gradient in self._gradients_on(batch[0], batch[1], loss_fn).items():
                    scaled = widen(gradient) * size
                    total[name] = total[name] + scaled if name in total else scaled
            (count,) = sum_over_ranks([torch.tensor(size)], self.group)
            examples += int(count)
            if self.accumulate == "batch" or (self.chunk_size is not None and examples >= self.chunk_size):
                yield self._mean(total, examples)
                total, examples = {}, 0
        if examples:
            yield self._mean(total, examples)

    def _gradients_on(self, inputs: Any, targets: Any, loss_fn: LossFunction) -> dict[str, Tensor]:
        """Return the gradients of the loss on a batch, of the parameters that it reaches."""
        free = self._free()
        with torch.enable_grad():
            # Any other type is a single argument, such as a list from a data loader or a batch of graphs.
            example = inputs if isinstance(inputs, Tensor | tuple | Mapping) else (inputs,)
            loss = loss_fn(call_with(self.model, example), targets)
            sought = free if loss.requires_grad else {}
            gradients = torch.autograd.grad(loss, list(sought.values()), allow_unused=True) if sought else ()
        return {name: gradient for name, gradient in zip(sought, gradients, strict=True) if gradient is not None}

    def _mean(self, total: dict[str, Tensor], examples: int) -> dict[str, Tensor]:
        """Return the mean over the examples of all ranks of the gradients that any rank has."""
        if self.group is not None:
            zeros = {name: torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for name, p in self._free().items()}
            reached = torch.tensor([float(name in total) for name in zeros])
            *sums, counts = sum_over_ranks([*(zeros | total).values(), reached], self.group)
            total = {name: each for name, each, n in zip(zeros, sums, counts, strict=True) if n}
        return {name: gradient / examples for name, gradient in total.items()}


def _count_examples(inputs: Any, targets: Any) -> int:
    """Return the length of the targets, or of the first tensor in the batch if the targets are not a tensor."""
    if isinstance(targets, Tensor) and targets.ndim:
        return len(targets)
    first = next((leaf for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if first is None:
        raise ValueError("batches: neither inputs nor targets hold a tensor, so the examples cannot be counted")
    return len(first)
