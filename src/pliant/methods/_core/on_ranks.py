"""How a method acts on several ranks: they agree before they act, and plain parameters stand in for shards meanwhile.

`Method` inherits from `OnRanks`. A method's formula is written as for one process, and says by `sharding` what it needs
of a sharded parameter.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from pliant.distributed import (
    Group,
    Shards,
    as_sharded,
    check_same,
    find_group,
    gather_whole,
    group_of,
    has_shards,
    held,
    is_shard,
    local,
    own_part,
    share_seed,
    unwrap_model,
)
from pliant.methods._core.state_trees import leave_out, named_leaves, nested_tensors, value_at

Sharding = Literal["entries", "norms", "owned", "whole", "never"]


class OnRanks(ABC):
    """What a method shares with its copies on other ranks, and what it sees of sharded parameters.

    Args:
        model: The model to act on.

    Attributes:
        parameters: The parameters that the method acts on, by name; a tied parameter once.
        group: The ranks that share the model, since the last `attach()` or `apply()`; None if there is only one.
    """

    name: ClassVar[str]
    """The method's name in recipes and lists."""
    sharding: Sharding = "whole"
    """What the method sees of a sharded parameter when it acts.

    "entries": this rank's shard, also at construction, for formulas that hold entry by entry. "norms": this rank's
    shard, but whole parameters at construction; sums over entries go through `pliant.distributed`. "owned": the whole
    parameters that this rank owns, a batch at a time (`_in_batches`), for formulas that hold parameter by parameter
    and do not change state of the parameters' shapes. "whole": all parameters, whole, which holds for every formula and
    costs the memory of the whole model. "never": the method cannot be made once the model is sharded or wrapped.
    """
    reads_values: ClassVar[bool] = True
    """Whether the constructor reads the values of parameters, and not only their shapes.

    If not, no whole parameters are gathered for it; the values that it sees are NaN.
    """
    parameters: dict[str, nn.Parameter]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: dict[str, Any] = {name: vars(cls)[name] for name in _ENTRIES if name in vars(cls)}
        for name, function in own.items():
            if isinstance(function, property):
                setattr(cls, name, property(_on_plain_model(function.fget, reads=True)))
            elif not getattr(function, "__isabstractmethod__", False):
                wrap = _made_on_plain_model if name == "__init__" else _on_plain_model
                setattr(cls, name, wrap(function))

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.group: Group | None = None
        self._given_group: Group | None = None
        self._arguments: dict[str, Any] = {}
        self._shards: Shards | None = None
        self._sharded_state: list[tuple[str, ...]] = []

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the tensors and plain values that `state_dict()` saves."""

    def _find_shards(self) -> None:
        """Find the parameters again by name if the model was sharded since the method was made."""
        if has_shards(self.model) and self._shards is None:
            self._given_group = self._given_group or group_of(self.model)
            check_same(dict(named_leaves(self._facts())), find_group(self._given_group), self._advice())
            self._adopt(Shards(self.model, self.parameters))

    def _adopt(self, shards: Shards, *, whole: bool = True) -> None:
        """Act on sharded parameters from now on, and keep this rank's part of the state that has their shapes.

        Args:
            shards: The sharded parameters.
            whole: Whether the state has the shapes of whole parameters, not of this rank's shards.
        """
        sharded = shards.held()
        shapes = {name: p.shape if whole else local(p).shape for name, p in sharded.items()}
        tables: dict[tuple[str, ...], dict[tuple[str, ...], Tensor]] = {}
        for path, tensor in nested_tensors(self._state()):
            if path[-1] in shapes:
                tables.setdefault(path[:-1], {})[path] = tensor
        for table in tables.values():
            # A single tensor of another meaning may have the shape of its parameter's shard by chance.
            if all(tensor.shape == shapes[path[-1]] for path, tensor in table.items()):
                self._sharded_state += table
                for path, tensor in table.items() if whole else ():
                    self._place_state(path, own_part(tensor, sharded[path[-1]]).clone())
        self._shards = shards

    def _acting(self, *, reads: bool = False) -> AbstractContextManager[None]:
        """Let the model hold plain parameters while the method acts, if its parameters are sharded.

        Args:
            reads: Whether the method only measures: then it sees whole parameters, and nothing is written.
        """
        return _NOTHING if self._shards is None or self._shards.is_open else self._standing_in(self._shards, reads)

    @contextmanager
    def _standing_in(self, shards: Shards, reads: bool) -> Iterator[None]:
        if self.sharding != "whole" and not reads:
            with shards.standing_in(whole=False):
                yield
            return
        sharded = shards.held()
        own = {path: value_at(self._state(), path) for path in self._sharded_state}
        wholes = gather_whole([as_sharded(own[path], sharded[path[-1]]) for path in own])
        with shards.standing_in(whole=True, write=not reads):
            try:
                for path, whole in zip(own, wholes, strict=True):
                    self._place_state(path, whole)
                yield
                if not reads:
                    own = {path: own_part(value_at(self._state(), path), sharded[path[-1]]).clone() for path in own}
            finally:
                for path, tensor in own.items():
                    self._place_state(path, tensor)

    def _in_batches(self, names: Sequence[str], *, gradients: bool) -> Iterable[Sequence[str]]:
        """Return the parameters to act on: all at once, or in batches that this rank owns if `sharding` is "owned".

        Args:
            names: The parameters.
            gradients: Whether the method changes gradients, rather than values.
        """
        if self._shards is None or self.sharding != "owned":
            return (names,)
        return self._owned_batches(self._shards, names, gradients)

    def _owned_batches(self, shards: Shards, names: Sequence[str], gradients: bool) -> Iterator[Sequence[str]]:
        owned = [name for name in names if is_shard(self.parameters[name])]
        yield [name for name in names if name not in owned]
        if not owned:
            return
        paths = {name: [path for path in self._sharded_state if path[-1] == name] for name in owned}
        state = {name: {path: value_at(self._state(), path) for path in paths[name]} for name in owned}
        sharded = {n: [as_sharded(t, held(self.parameters[n])) for t in own.values()] for n, own in state.items()}
        for batch in shards.owned(owned, sharded, gradients=gradients):
            for name, wholes in batch.items():
                for path, whole in zip(paths[name], wholes, strict=True):
                    self._place_state(path, whole)
            try:
                yield list(batch)
            finally:
                for name in batch:
                    for path, own in state[name].items():
                        self._place_state(path, own)

    def _place_state(self, path: tuple[str, ...], tensor: Tensor) -> None:
        value_at(self._state(), path[:-1])[path[-1]] = tensor

    def _agree(self, group: Group | None) -> None:
        """Agree with the other ranks on the seed, and check that parameters, state and settings are the same."""
        self._given_group = self._given_group if group is None else group
        self.group = find_group(self._given_group)
        if self.group is None:
            return
        if hasattr(self, "seed"):
            self.seed: int | None = share_seed(self.seed, self.group)
        check_same(dict(named_leaves(self._facts())), self.group, self._advice())

    def _advice(self) -> str:
        return (
            f"Give all ranks the same model and settings, or make {self.name} after DistributedDataParallel, which "
            "copies the parameters of rank 0"
        )

    def _facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: arguments, public attributes, parameters and state."""
        attributes = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        settings = {**self._arguments, **attributes, "lam": getattr(self, "lam", None)}
        facts = {**settings, "parameters": self.parameters, **self._state()}
        if self._shards is None or self._shards.whole:
            return facts
        # Each rank holds its own part of these.
        whole = {name: p for name, p in self.parameters.items() if name not in self._shards.plain}
        return dict(leave_out({**facts, "parameters": whole}, self._sharded_state))


_NOTHING = nullcontext()

_ENTRIES = ("__init__", "step", "apply", "value", "receipt")
"""What a user calls; each runs while the model holds plain parameters."""

_OF_A_RANK = ("self", "model", "example", "seed")
"""Arguments of a constructor that may differ between ranks: their examples do, and they agree on a seed."""


def _made_on_plain_model(init: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor see an ordinary model: inside DDP or `torch.compile`, and with plain parameters."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def construct(self: OnRanks, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner, group = unwrap_model(model), group_of(model)
        if self.sharding == "never" and (group is not None or has_shards(inner)):
            state = "its parameters are sharded" if has_shards(inner) else "DistributedDataParallel wraps it already"
            raise ValueError(f"model: {state}; make {self.name} before sharding or wrapping the model")
        if not has_shards(inner):
            init(self, inner, *args, **kwargs)
        else:
            shards = Shards(inner, {})
            whole = self.sharding != "entries"
            with shards.standing_in(whole=whole, values=self.reads_values, write=False):
                init(self, inner, *args, **kwargs)
            self._adopt(shards, whole=whole)
        # The outermost constructor is the last one to write these.
        self._given_group = group
        arguments = signature.bind(self, model, *args, **kwargs)
        arguments.apply_defaults()
        shared = {name: each for name, each in arguments.arguments.items() if name not in _OF_A_RANK}
        self._arguments = dict(named_leaves(shared))

    return construct


def _on_plain_model(function: Callable[..., Any] | None, *, reads: bool = False) -> Callable[..., Any]:
    """Let a method act while the model holds plain parameters.

    Args:
        function: The action.
        reads: Whether it only reads; then it sees whole parameters.
    """
    assert function is not None
    reads = reads or function.__name__ == "value"

    @functools.wraps(function)
    def act(self: OnRanks, *args: Any, **kwargs: Any) -> Any:
        self._find_shards()
        with self._acting(reads=reads):
            return function(self, *args, **kwargs)

    return act
