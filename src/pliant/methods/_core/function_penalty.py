"""Penalties on what the model computes, taken at the inputs of training passes.

The term is computed before the step, in eval mode, with the inputs that a hook on the model has seen. So it needs
forward and backward passes of its own, and works in any training loop. On several ranks, each takes its own inputs, and
the gradients are averaged.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from pliant._validation import check_number
from pliant._warnings import warn_user
from pliant.distributed import Group, find_group, rank_count, rank_in, sum_over_ranks
from pliant.methods._core.filters import Filter
from pliant.methods._core.module_hooks import ModuleHook, silent_hooks
from pliant.methods._core.penalty import Penalty
from pliant.running import eval_mode

Pass = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call of the model."""


class FunctionPenalty(Penalty):
    """A term λ·penalty of the function that the model computes on inputs of training.

    Args:
        model: The model.
        lam: λ.
        where: Which parameters get the term's gradient; all learnable ones if None.
    """

    lag: ClassVar[int] = 0
    """How many steps ago the inputs of the term were seen."""

    def __init__(self, model: nn.Module, *, lam: float, where: Filter | None = None) -> None:
        super().__init__(model, lam=check_number("lam", lam), where=where)
        self.lam = float(lam)
        self._history: list[list[Pass]] = []  # of the last steps, oldest first; each rank has its own
        self._passes: list[Pass] = []
        self._observed = False
        self._handle: RemovableHandle | None = None
        self._warned = False

    def attach(self, *optimizers: Optimizer, group: Group | None = None) -> Self:
        """Watch the inputs of the model, and add the term's gradient before every step of these optimizers."""
        super().attach(*optimizers, group=group)
        if self._handle is None:
            self._handle = self.model.register_forward_pre_hook(ModuleHook(self.model, self._see), with_kwargs=True)
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Stop acting for these optimizers, or for all if none is given. With the last one, the hook is removed."""
        super().detach(*optimizers)
        if not self._attachments and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def step(self) -> None:
        """Raise a TypeError: the inputs are seen only once the method is attached."""
        raise TypeError(f"{self.name} acts on inputs of the model, which it sees once attached: call attach()")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method, including the inputs of the last steps that this rank has seen."""
        place = list(rank_in(find_group(self._given_group)))
        return {**super().state_dict(), "history": self._history, "rank": place}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state made by `state_dict()`.

        Each rank sees inputs of its own. If another rank saved the state, the inputs are left out, and the term
        begins again as soon as there are new inputs. One process has seen the inputs of all ranks.
        """
        super().load_state_dict(state_dict)
        device = next(iter(self.parameters.values())).device
        history, saved = state_dict.get("history", []), tuple(state_dict.get("rank", (0, 1)))
        mine = rank_in(find_group(self._given_group))
        if self.lag and history and saved not in ((0, 1), mine):
            warn_user(
                f"{self.name}: the state holds the inputs that rank {saved[0]} of {saved[1]} saw, and this is rank "
                f"{mine[0]} of {mine[1]}; the term begins again in {self.lag} steps. Save and load the state on every "
                "rank to continue exactly"
            )
            history = []
        self._history = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, history)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handle": None, "_passes": []}

    @abstractmethod
    def penalty(self, passes: Sequence[Pass]) -> Tensor:
        """Return the penalty on these passes, with a graph if gradients are enabled."""

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ·penalty on the inputs of the term; 0 before there are any."""
        passes = self._inputs()
        if not passes or (names is not None and not names):
            return torch.zeros(())
        with torch.no_grad():
            return self.lam * self._evaluate(passes)

    def _evaluate(self, passes: Sequence[Pass]) -> Tensor:
        with silent_hooks(), eval_mode(self.model):
            return self.penalty(passes)

    def _inputs(self) -> list[Pass]:
        return self._history[0] if len(self._history) > self.lag else []

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self._attachments and module.training and torch.is_grad_enabled()):
            return
        if self._observed:
            self._passes, self._observed = [], False
        self._passes.append(tree_map(self._keep, (args, kwargs)))

    def _keep(self, value: Any) -> Any:
        """Return an input without its graph, in the precision of the parameters if `fully_shard` has lowered it."""
        if not isinstance(value, Tensor):
            return value
        lowered = self._shards is not None and value.is_floating_point()
        return value.detach().to(next(iter(self.parameters.values())).dtype if lowered else value.dtype)

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        if found_inf is not None and bool(found_inf):
            self._passes = []
        elif not self._observed:  # another optimizer of the same passes has done so otherwise
            self._observed = True
            if self._passes:
                self._history = [*self._history, self._passes][-1 - self.lag :]
            elif not self._warned:
                self._warned = True
                warn_user(
                    f"{self.name} saw no inputs before this step: the model was not called in training mode, only "
                    "inside torch.func, or was compiled before attach()"
                )

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        passes = self._inputs()
        names = [name for name in gradients if self.parameters[name].requires_grad]
        if not (names and self.lam and (passes or self.group is not None)):
            return
        found: Sequence[Tensor | None] = [None] * len(names)
        if passes:  # other ranks may have some where this one has none
            with torch.enable_grad():
                term = self._evaluate(passes)
                found = torch.autograd.grad(term, [self.parameters[name] for name in names], allow_unused=True)
        own = [torch.zeros_like(gradients[name]) if g is None else g for name, g in zip(names, found, strict=True)]
        factor = self.lam / rank_count(self.group)
        for name, gradient in zip(names, sum_over_ranks(own, self.group), strict=True):
            added = gradient if scale is None else gradient * scale
            gradients[name].add_(added.to(gradients[name].dtype), alpha=factor)


def call_on(model: nn.Module, tensors: Mapping[str, Tensor], inputs: Pass) -> Any:
    """Return the model's output on the inputs of a pass, with these parameters and buffers in place of its own."""
    return functional_call(model, dict(tensors), *inputs)
