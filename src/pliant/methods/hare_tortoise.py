"""Hare & Tortoise: return to a slow average of the network every n steps (Lee et al. 2024).

Paper: "Slow and Steady Wins the Race: Maintaining Plasticity with Hare and Tortoise Networks". The hare is the trained
model. After every step the tortoise follows it, τ ← βτ + (1 − β)θ, over parameters and floating-point buffers; integer
buffers are copied. Every n steps, and on `apply()`, the hare goes back to the tortoise: θ ← τ. The optimizer's state is
kept. To evaluate the tortoise: `with method.tortoise_weights(): …`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import widen, widen_all
from pliant._validation import check_number
from pliant._warnings import warn_user
from pliant.anatomy.plan import Block, BlockTensors
from pliant.distributed import Group, broadcast_
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.attachment import Attachment, check_timing, count_step, found_inf_of, is_due
from pliant.methods._core.filters import Filter
from pliant.methods._core.method import Batches, LossFunction, Receipt, Targets
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.surgery import check_targets, copy_targets_


def follow_(tortoise: Sequence[Tensor], hare: Sequence[Tensor], weight: float, found_inf: Tensor | None = None) -> None:
    """Move the tortoise in place: τ ← τ + weight·(θ − τ) for floats, τ ← θ for what counts.

    Args:
        tortoise: The slow tensors.
        hare: The fast ones, in the same order.
        weight: 1 − β.
        found_inf: If given and not zero, no float moves.

    Example:
        >>> slow = [torch.tensor([1.0]), torch.tensor([3])]
        >>> follow_(slow, [torch.tensor([2.0]), torch.tensor([7])], 0.25)
        >>> slow
        [tensor([1.2500]), tensor([7])]
    """
    if not hare:
        return
    pairs = list(zip(tortoise, hare, strict=True))
    counts = [pair for pair in pairs if not pair[1].is_floating_point()]
    floats = [pair for pair in pairs if pair[1].is_floating_point()] if counts else pairs
    slow_floats, fast_floats = [slow for slow, _ in floats], widen_all([fast for _, fast in floats])
    if found_inf is None:
        torch._foreach_lerp_(slow_floats, fast_floats, weight)
    else:
        torch._foreach_lerp_(slow_floats, fast_floats, [(found_inf == 0).to(slow) * weight for slow in slow_floats])
    for slow, fast in counts:
        slow.copy_(fast)


class HareTortoise(AfterStep):
    """Keep a slow average of the model and return to it every n steps.

    Args:
        model: The model, the hare. The tortoise starts at its present values.
        beta: β of the average, in [0, 1).
        every: The number of steps between two returns; None to return only on `apply()`.
        first: The step of the first return, counted from 1; `every` if None. If tasks last a multiple of `every`
            steps, `first` shifts the returns away from the ends of tasks.
        where: Which parameters to average; all learnable ones if None. Buffers go with the parameters of their module;
            buffers of modules without parameters go with the first parameter.

    Attributes:
        tortoise: The slow values of parameters and buffers, by name.
    """

    name = "hare_tortoise"
    sharding: Sharding = "entries"
    order: ClassVar[int] = 30
    saved: ClassVar[tuple[str, ...]] = ("tortoise", "returns")
    pins_placement: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        *,
        beta: float = 0.999,
        every: int | None = 1000,
        first: int | None = None,
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, where=where)
        self.beta = check_number("beta", beta, high=1.0, below=True)  # with 1 the average would never move
        if every is None and first is not None:
            raise ValueError(f"first: {first!r} has no effect without `every`")
        self.every, self.first = every, first
        if every is not None:
            self.every, self.first = check_timing(every, first)
        self._companions = _companions(model, self.parameters)
        self._places: dict[tuple[str, ...], tuple[list[str], BlockTensors]] = {}
        self.tortoise = {
            name: widen(tensor.detach()).clone()
            for name, tensor in zip(*self._hare(tuple(self.parameters)), strict=True)
        }
        self.returns = 0

    def step(self) -> None:
        """Let the tortoise follow once, and the hare go back if a return is due."""
        names = tuple(self.parameters)
        self._follow(names, None)
        if is_due(count_step(self.steps), self.every, self.first):
            self._go_back(names, None)

    def apply(
        self,
        *optimizers: Optimizer,
        batches: Batches | None = None,
        loss_fn: LossFunction | None = None,
        targets: Targets = (),
        group: Group | None = None,
    ) -> Receipt:
        """Let the hare go back to the tortoise now. Optimizers keep their state.

        If the method is attached, only parameters of attached optimizers change: the tortoise follows only those.

        Args:
            optimizers: Not used.
            batches: Not used.
            loss_fn: Not used.
            targets: Pairs of a network and the target network that follows it. Each target becomes a copy.
            group: The ranks that train this model together, all of which call this; as at `attach()` if None.
        """
        check_targets(targets)
        self._agree(group)
        returns = self.returns
        self._go_back(self._served(), None)
        copy_targets_(targets)
        receipt = self._make_receipt()
        if self.returns == returns:
            warn_user("hare_tortoise.apply() changed nothing: every parameter is frozen")
            return replace(receipt, tensors=0, entries=0)
        return receipt

    @contextmanager
    def tortoise_weights(self) -> Iterator[None]:
        """Temporarily give the model the tortoise's values, to evaluate it."""
        names, hare = self._hare(self._served())
        with torch.no_grad():
            kept = [tensor.clone() for tensor in hare]
            _copy_all_(hare, [self.tortoise[name] for name in names])
        try:
            yield
        finally:
            with torch.no_grad():
                _copy_all_(hare, kept)

    @property
    def receipt(self) -> Receipt | None:
        """The distance between hare and tortoise, and the number of returns."""
        return self._make_receipt() if self.steps or self.returns else None

    def _make_receipt(self) -> Receipt:
        names, hare = self._hare(self._served())
        gaps = [widen(self.parameters[name].detach()) - self.tortoise[name] for name in self._served()]
        distance = float(torch.stack([gap.norm().float() for gap in gaps]).norm())
        details = {"distance": distance, "returns": self.returns, "steps": sum(self.steps)}
        return Receipt(self.name, "average", len(names), sum(tensor.numel() for tensor in hare), details)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._follow(self._attachment(optimizer).names, found_inf_of(optimizer))
        super()._after_step(optimizer, args, kwargs)

    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        self._go_back(attachment.names, found_inf_of(optimizer))

    @torch.set_grad_enabled(False)  # cheaper than no_grad
    def _follow(self, parameters: tuple[str, ...], found_inf: Tensor | None) -> None:
        with self._acting():
            names, hare = self._hare(parameters)
            follow_([self.tortoise[name] for name in names], hare, 1 - self.beta, found_inf)

    def _facts(self) -> dict[str, Any]:
        self._share_buffers()
        return super()._facts()

    def _share_buffers(self) -> None:
        """Copy averaged buffers, such as running statistics, from the first rank, as DDP does."""
        broadcast_([self.tortoise[name] for name in self._companions], self.group)

    @torch.no_grad()
    def _go_back(self, parameters: tuple[str, ...], found_inf: Tensor | None) -> None:
        with self._acting():
            # Parameters that were frozen since construction keep their values.
            names, hare = self._hare(tuple(name for name in parameters if self.parameters[name].requires_grad))
            if not names:
                return
            self._share_buffers()
            slow = [self.tortoise[name] for name in names]
            if found_inf is not None:
                slow = [torch.where(found_inf == 0, old, new.to(old)) for old, new in zip(slow, hare, strict=True)]
            _copy_all_(hare, slow)
            self.returns += 1

    def _hare(self, parameters: tuple[str, ...]) -> tuple[list[str], list[Tensor]]:
        """Return the names and tensors of these parameters and of the buffers that go with them."""
        if parameters not in self._places:
            names = [*parameters, *(buffer for buffer, owner in self._companions.items() if owner in parameters)]
            self._places[parameters] = (names, BlockTensors(self.model, [Block(name) for name in names]))
        names, tensors = self._places[parameters]
        return names, tensors.get()


def _copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _companions(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the parameter that each averaged buffer goes with, by the buffer's name."""
    owners = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [prefix + leaf for leaf, _ in module.named_parameters(recurse=False)]
        owner = next((name for name in own or parameters if name in parameters), None)
        for leaf, _ in module.named_buffers(recurse=False):
            if owner is not None and leaf not in module._non_persistent_buffers_set:
                owners[prefix + leaf] = owner
    return owners
