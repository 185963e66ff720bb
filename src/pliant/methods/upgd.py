"""UPGD, utility-based perturbed gradient descent: protect useful weights, perturb the others (Elsayed & Mahmood 2024).

Paper: "Addressing Loss of Plasticity and Catastrophic Forgetting in Continual Learning". The utility u of a weight is a
bias-corrected moving average of −g·θ, a first-order estimate of how much the loss would rise without it; the step is

    θ ← (1 − ηw)θ − η(g + σε) ⊙ (1 − sigmoid(u / max u)),    ε ~ N(0, 1),

where η is the learning rate, w the weight decay, and the maximum is over all weights of the optimizer. The authors'
code divides corrected utilities by the largest *uncorrected* one, which is smaller by 1 − βᵗ: `normalizer="authors"`.
Early in training the gates of useful weights are then nearly closed.

The paper defines an optimizer; here the method wraps any optimizer. The optimizer's own move Δ takes the place of −ηg:

    θ ← (1 − ηw)θ + (Δ − ησε) ⊙ (1 − sigmoid(u / max u)).

Around plain SGD this is the paper's rule. Around Adam it is the authors' adaptive UPGD, which gates
Adam's move; Adam would undo a gate on the gradient, because it divides by the gradient's size. The optimizer's own
weight decay and momentum are part of Δ, so they are gated; `weight_decay` here is not.

Where we deviate. The authors' code for reinforcement learning and their README double the step and decay weights by
1e-3; here the learning rate is the optimizer's, and w is 0 by default. If no weight has a positive utility, the printed
ratio would change its sign; here all weights with a negative utility then take the whole step.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import widen_all
from pliant._validation import check_choice, check_number, check_seed
from pliant.distributed import largest_of_shards
from pliant.methods._core.after_step import AroundStep
from pliant.methods._core.attachment import Attachment, ascending_names, check_rates, found_inf_of
from pliant.methods._core.averages import bias_corrections, start_averages, update_averages_
from pliant.methods._core.filters import Filter
from pliant.methods._core.initial import draw_normal
from pliant.methods._core.method import Receipt
from pliant.methods._core.on_ranks import Sharding

Normalizer = Literal["corrected", "authors"]


def protections(
    utilities: Sequence[Tensor], parameters: Sequence[Tensor] = (), corrections: Tensor | None = None
) -> list[Tensor]:
    """Return sigmoid(u / max u) for each utility, the maximum taken over all tensors.

    Args:
        utilities: The utilities of the weights.
        parameters: The weights, if some are shards: then the maximum is over all ranks.
        corrections: A factor of each tensor's utilities in the maximum alone; 1 if None.

    Returns:
        The share of its move that each weight does not make, between 0 (harmful weights) and 0.73 (the most useful
        one); 0.5 is neutral.

    Example:
        >>> protections([torch.tensor([2.0, 0.0]), torch.tensor([-2.0])])
        [tensor([0.7311, 0.5000]), tensor([0.2689])]
    """
    # A rank may hold empty shards, which have no maximum.
    shown = [utility if utility.numel() else utility.new_tensor(-torch.inf) for utility in utilities]
    maxima = list(torch._foreach_max(shown))
    if corrections is not None:
        maxima = [largest * factor for largest, factor in zip(maxima, corrections.unbind(), strict=True)]
    largest = torch.stack(largest_of_shards(maxima, parameters)).amax()
    shares: list[Tensor] = list(torch._foreach_div(list(utilities), largest.clamp_(torch.finfo(largest.dtype).tiny)))
    torch._foreach_sigmoid_(shares)
    return shares


def subtract_scaled_(parameters: list[Tensor], tensors: list[Tensor], factors: list[float]) -> None:
    """Subtract factor · tensor from each parameter in place.

    Example:
        >>> theta = torch.tensor([1.0])
        >>> subtract_scaled_([theta], [torch.tensor([2.0])], [0.25])
        >>> theta
        tensor([0.5000])
    """
    if isinstance(factors[0], float) and factors.count(factors[0]) == len(factors):
        torch._foreach_sub_(parameters, tensors, alpha=factors[0])
    else:  # a learning rate may be a tensor on the device
        torch._foreach_sub_(parameters, torch._foreach_mul(tensors, factors))


class UPGD(AroundStep):
    """Gate each weight's move by its utility, and add noise where the utility is low.

    Args:
        model: The model.
        sigma: The noise's standard deviation σ, in units of a gradient.
        beta: β of the utilities' average, in [0, 1).
        weight_decay: w, decoupled and not gated.
        normalizer: Divide by the largest "corrected" utility, or as the "authors" do by the largest uncorrected one.
        seed: The seed of the noise; torch's global generators if None.
        where: Which parameters to gate; all learnable ones if None. The padding row of an embedding gets noise too.
    """

    name = "upgd"
    sharding: Sharding = "entries"
    saved: ClassVar[tuple[str, ...]] = ("averages", "draws")
    pins_placement: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        sigma: float = 1e-3,
        beta: float = 0.999,
        weight_decay: float = 0.0,
        normalizer: Normalizer = "corrected",
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, where=where)
        self.sigma = check_number("sigma", sigma)
        self.beta = check_number("beta", beta, high=1.0, below=True)  # with 1 the average would never move
        self.weight_decay = check_number("weight_decay", weight_decay)
        check_choice("normalizer", normalizer, get_args(Normalizer))
        self.normalizer = normalizer
        self.seed = check_seed(seed)
        self.averages = start_averages(self.parameters, "utilities")
        self.draws = 0

    @property
    def receipt(self) -> Receipt | None:
        """The mean gate now, and the number of steps."""
        if not self.steps:
            return None
        shares: dict[str, Tensor] = {}
        for names in [attachment.names for attachment in self._attachments.values()] or [self._served()]:
            shares |= zip(names, self._protections(names), strict=True)
        entries = sum(share.numel() for share in shares.values())
        mean = 1 - sum(float(share.sum()) for share in shares.values()) / entries
        details = {"mean_gate": mean, "steps": sum(self.steps)}
        return Receipt(self.name, "gate", len(shares), entries, details)

    def _protections(self, names: Sequence[str]) -> list[Tensor]:
        utilities = [self.averages["utilities"][name] for name in names]
        parameters = [self.parameters[name] for name in names]
        authors = self.normalizer == "authors"
        corrections = bias_corrections(self.averages, self.beta, names) if authors else None
        return protections(utilities, parameters, corrections)

    def _match(self, optimizer: Optimizer) -> Attachment:
        check_rates(optimizer, "it scales its noise by the rate")
        return super()._match(optimizer)

    @torch.set_grad_enabled(False)  # cheaper than no_grad
    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        before = self._take_before(attachment)
        groups = dict(zip(attachment.names, attachment.groups, strict=True))
        # By now a closure has computed the gradients, and a fused optimizer has unscaled them.
        gradients = self._gradients(attachment.names)
        ascending = ascending_names(optimizer, attachment.names, attachment.groups)
        names = list(gradients)
        if not names:
            return
        found_inf = found_inf_of(optimizer)
        old = [before[name] for name in names]
        # In place where possible: on a CPU, allocating another copy of the weights costs more than the arithmetic.
        utilities = torch._foreach_mul(widen_all([gradients[name] for name in names]), widen_all(old))
        falling = [u for name, u in zip(names, utilities, strict=True) if name not in ascending]
        if falling:
            torch._foreach_neg_(falling)
        update_averages_(self.averages, self.beta, names, {"utilities": utilities}, found_inf)
        del utilities  # its memory serves the shares
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        shares = self._protections(names)
        noise = draw_normal(parameters, self.seed, self.draws)
        self.draws += 1
        rates = [optimizer.param_groups[groups[name]]["lr"] for name in names]
        subtract_scaled_(parameters, noise, [lr * self.sigma for lr in rates])
        # old + (moved − old) ⊙ (1 − share) is what lies between the two.
        if widen_all(parameters) is not parameters:
            shares = [share.to(p.dtype) for share, p in zip(shares, parameters, strict=True)]
        torch._foreach_lerp_(parameters, old, shares)
        if self.weight_decay:
            subtract_scaled_(parameters, old, [lr * self.weight_decay for lr in rates])
        if found_inf is not None:
            torch._foreach_copy_(
                parameters,
                [torch.where(found_inf == 0, new, kept) for new, kept in zip(parameters, old, strict=True)],
            )
