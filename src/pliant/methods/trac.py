"""TRAC: scale the distance from the initial weights without a learning rate of its own (Muppidi et al. 2024).

Paper: "Fast TRAC: A Parameter-Free Optimizer for Lifelong Reinforcement Learning". It wraps any optimizer. θ_r are the
initial weights, Δ the optimizer's own move, g the gradient and S ≥ 0 a learned scale:

    D = (θ − θ_r)/(S + ε),    h = ⟨g, D⟩,    v_j ← β_j²v_j + h²,    σ_j ← β_jσ_j − h,
    S = Σ_j s₀/erfi(1/√2) · erfi(σ_j/(√(2v_j) + ε)),    θ ← θ_r + max(S, 0)·(D + Δ),

with one tuner j for each discount β_j. S grows while moving away from θ_r pays, and falls back when it does not: the
network returns toward its initial, plastic weights. All parameters of an optimizer share S.

If every σ_j falls below zero, the weights return to θ_r, D and h are zero from then on, and no σ_j changes its sign
again: the network stays at θ_r for good. The authors' code does the same. This method warns.

Where we deviate. θ_r are the weights at construction; the authors take those before the first step. The tuners are in
float64, and erfi is its power series.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import widen
from pliant._validation import check_number
from pliant._warnings import warn_user
from pliant.distributed import sum_shards
from pliant.methods._core.after_step import AroundStep
from pliant.methods._core.attachment import Attachment, ascending_names, found_inf_of
from pliant.methods._core.filters import Filter
from pliant.methods._core.method import Receipt
from pliant.methods._core.on_ranks import Sharding

DISCOUNTS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
_EPS = 1e-8
_TERMS = 512
_LARGEST = 12.0
"""erfi(12) is about 10⁶¹. Its series needs about e·12² terms."""


def erfi(x: Tensor) -> Tensor:
    """Return the imaginary error function, 2/√π Σₙ x²ⁿ⁺¹/(n!(2n + 1)), for |x| ≤ 12; larger arguments count as 12.

    Args:
        x: A vector in float64.

    Example:
        >>> erfi(torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64))
        tensor([ 0.0000,  1.6504, -1.6504], dtype=torch.float64)
    """
    n = torch.arange(_TERMS, dtype=x.dtype, device=x.device)
    size = x.abs().clamp(max=_LARGEST)[:, None]
    logs = (2 * n + 1) * size.log() - torch.lgamma(n + 1) - (2 * n + 1).log()
    return x.sign() * (2 / math.sqrt(math.pi)) * logs.exp().sum(1)


def update_tuners(tuners: Tensor, h: Tensor, discounts: Tensor, scale: float = 1e-8) -> Tensor:
    """Return the tuners after a step, as rows v, σ, s.

    Args:
        tuners: v, σ and s of every discount, one row each.
        h: ⟨g, D⟩.
        discounts: β.
        scale: s₀.

    Example:
        >>> start = torch.tensor([[0.0], [1e-8], [0.0]], dtype=torch.float64)
        >>> v, sigma, s = update_tuners(start, torch.tensor(-1.0), torch.tensor([0.5], dtype=torch.float64)).flatten()
        >>> float(v), round(float(sigma), 6), round(float(s) * 1e8, 4)
        (1.0, 1.0, 1.0)
    """
    v = discounts**2 * tuners[0] + h**2
    sigma = discounts * tuners[1] - h
    s = scale / erfi(v.new_tensor([2**-0.5])) * erfi(sigma / ((2 * v).sqrt() + _EPS))
    return torch.stack([v, sigma, s])


class TRAC(AroundStep):
    """Learn how far to go from the initial weights, around any optimizer.

    Args:
        model: The model; its present values are θ_r.
        scale: s₀, the first scale of the tuners.
        where: Which parameters to scale; all learnable ones if None.

    Attributes:
        reference: θ_r by name.
        tuners: v, σ and s of every discount, by parameter; all parameters of an optimizer have the same.
    """

    name = "trac"
    saved: ClassVar[tuple[str, ...]] = ("reference", "tuners")
    pins_placement: ClassVar[bool] = True
    sharding: Sharding = "entries"

    def __init__(self, model: nn.Module, *, scale: float = 1e-8, where: Filter | None = None) -> None:
        super().__init__(model, where=where)
        self.scale = check_number("scale", scale, above=True)
        self.reference = {name: p.detach().clone() for name, p in self.parameters.items()}
        start = torch.tensor([[0.0], [1e-8], [0.0]], dtype=torch.float64).repeat(1, len(DISCOUNTS))
        self.tuners = {name: start.to(p.device, copy=True) for name, p in self.parameters.items()}
        self._warned = False

    @property
    def receipt(self) -> Receipt | None:
        """The scale S and the distance from the initial weights now, and the number of steps."""
        if not self.steps:
            return None
        names = self._served()
        gaps = [widen(self.parameters[name].detach() - self.reference[name]).norm().float() for name in names]
        details = {
            "scale": float(self.tuners[names[0]][2].sum()),
            "distance": float(torch.stack(gaps).norm()),
            "steps": sum(self.steps),
        }
        return Receipt(self.name, "scale the move", len(names), sum(self.parameters[n].numel() for n in names), details)

    @torch.no_grad()
    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        before = self._take_before(attachment)
        gradients = self._gradients(attachment.names)
        names = list(gradients)
        if not names:
            return
        ascending = ascending_names(optimizer, attachment.names, attachment.groups)
        old = self.tuners[names[0]]
        shrunk = {name: widen(before[name]) - widen(self.reference[name]) for name in names}
        directions = {name: gap / (old[2].sum() + _EPS).to(gap) for name, gap in shrunk.items()}
        products = [(widen(gradients[name]) * directions[name]).sum().to(old) for name in names]
        whole = sum_shards(products, [self.parameters[name] for name in names])
        h = sum(
            [-each if name in ascending else each for name, each in zip(names, whole, strict=True)], old.new_zeros(())
        )
        tuners = update_tuners(old, h, old.new_tensor(DISCOUNTS), self.scale)
        total = tuners[2].sum().clamp(min=0)
        found_inf = found_inf_of(optimizer)
        for name in names:
            parameter = self.parameters[name]
            move = directions[name] + (widen(parameter) - widen(before[name]))
            new = (widen(self.reference[name]) + total.to(move) * move).to(parameter.dtype)
            parameter.copy_(new if found_inf is None else torch.where(found_inf == 0, new, before[name]))
        kept = tuners if found_inf is None else torch.where(found_inf == 0, tuners, old)
        for name in attachment.names:
            self.tuners[name].copy_(kept)
        self._warn_if_stuck(kept[1], self.steps[attachment.slot])

    def _warn_if_stuck(self, sigma: Tensor, step: int) -> None:
        """Warn once if the weights are at θ_r for good; only after 2, 4, 8 … steps, because it waits for the device."""
        if self._warned or step & (step - 1) or bool((sigma >= 0).any()):
            return
        self._warned = True
        warn_user(
            f"trac: at step {step} the weights are back at their initial values and will stay there, because moving "
            "away did not lower the loss; detach it, or attach a new one to try again"
        )
