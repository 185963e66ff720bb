"""Plain parameters that stand in for the sharded ones of a model while a method acts."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from pliant.distributed.shards import (
    check_shards,
    fully_sharded,
    gather_on_owners,
    gather_whole,
    has_shards,
    is_sharded,
    local,
    own_part,
    owner_batches,
    scatter_from_owners_,
    sharded_dim,
)

_MACHINERY = ("__composable_api",)
"""How the names of attributes begin in which `fully_shard` keeps its state."""


class Shards:
    """The sharded parameters of a model, and plain parameters that stand in for them while a method acts.

    Args:
        model: The model.
        known: The parameters that a method found before the model was sharded. They become the stand-ins.

    Attributes:
        plain: The stand-ins by name. Between actions, each shares its memory with this rank's shard.
        is_open: Whether the model holds the stand-ins now.
        whole: Whether the stand-ins are whole now.
    """

    def __init__(self, model: nn.Module, known: Mapping[str, nn.Parameter]) -> None:
        check_shards(model)
        self._model = model
        self._resharding = fully_sharded(model)
        self.is_open = self.whole = False
        self.plain: dict[str, nn.Parameter] = {}
        names = {}
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                names[parameter] = name
                self.plain[name] = known[name] if name in known else nn.Parameter(local(parameter).detach())
        self._places = [
            (module._parameters, leaf, names[parameter])
            for module in model.modules()
            for leaf, parameter in module._parameters.items()
            if parameter is not None and parameter in names
        ]
        self._point_at_shards()

    def held(self) -> dict[str, Any]:
        """Return the sharded parameters that the model holds, by name."""
        for module in self._resharding:
            module.reshard()
        return {name: holder[leaf] for holder, leaf, name in self._places}

    @contextmanager
    def standing_in(self, *, whole: bool, values: bool = True, write: bool = True) -> Iterator[None]:
        """Let the model hold plain parameters: an ordinary model, on which a method acts as in one process.

        Args:
            whole: Whether the stand-ins are whole parameters, the same on every rank, rather than this rank's shards.
            values: Whether whole stand-ins have the values of the parameters, rather than only their shapes.
            write: Whether to write changes of whole parameters and gradients back into the shards.
        """
        sharded = self.held()
        gradients = {name: _aligned_gradient(p) for name, p in sharded.items() if p.grad is not None and values}
        tensors = [*sharded.values(), *gradients.values()]
        if not values:
            seen = [local(tensor).new_full((), float("nan")).expand(tensor.shape) for tensor in tensors]
        else:
            seen = gather_whole(tensors) if whole else [local(tensor) for tensor in tensors]
        for name, value in zip(sharded, seen, strict=False):
            self._point_at(name, sharded[name], value, shard=not whole)
        for name, value in zip(gradients, seen[len(sharded) :], strict=True):
            self.plain[name].grad = value
        for holder, leaf, name in self._places:
            holder[leaf] = self.plain[name]
        self.is_open, self.whole = True, whole
        try:
            with _without_machinery(self._model) if whole else nullcontext():
                yield
            if whole and write:
                for name, parameter in sharded.items():
                    local(parameter).copy_(own_part(self.plain[name].detach(), parameter))
                for name, gradient in gradients.items():
                    new = self.plain[name].grad
                    assert new is not None
                    local(gradient).copy_(own_part(new, gradient))
        finally:
            self.is_open = self.whole = False
            for holder, leaf, name in self._places:
                holder[leaf] = sharded[name]
            self._point_at_shards()

    def owned(
        self, names: Sequence[str], state: Mapping[str, Sequence[Any]], *, gradients: bool
    ) -> Iterator[dict[str, list[Tensor]]]:
        """Divide the parameters among the ranks: yield what this rank owns, whole, in batches of bounded size.

        While the stand-ins are shards, a batch becomes whole on its owner. What the method changes is then
        written back into the shards of all ranks.

        Args:
            names: The parameters.
            state: Sharded tensors of each parameter, which are only read.
            gradients: Whether the method changes gradients, rather than values.

        Yields:
            The whole state of each owned parameter, by name.
        """
        held: dict[str, Any] = {name: self.plain[name].sharded for name in names}  # type: ignore[attr-defined]
        held = {name: parameter for name, parameter in held.items() if not gradients or parameter.grad is not None}
        if not held:
            return
        mesh = next(iter(held.values())).device_mesh
        tensors = {n: [p, *([p.grad] if gradients else []), *state[n]] for n, p in held.items()}
        sizes = [sum(each.numel() * each.dtype.itemsize for each in own) for own in tensors.values()]
        for batch in owner_batches(sizes, mesh.size()):
            owners = {list(held)[place]: owner for place, owner in batch.items()}
            flat = [(name, each) for name in owners for each in tensors[name]]
            found = gather_on_owners([each for _, each in flat], [owners[name] for name, _ in flat])
            mine: dict[str, list[Tensor]] = {}
            for place in sorted(found):
                mine.setdefault(flat[place][0], []).append(found[place])
            for name, (value, *others) in mine.items():
                self._point_at(name, held[name], value, shard=False)
                self.plain[name].grad = others.pop(0) if gradients else None
                mine[name] = others
            yield mine
            changed: dict[str, Any] = {n: self.plain[n].grad if gradients else self.plain[n].data for n in mine}
            for name in mine:
                self._point_at(name, held[name], local(held[name]), shard=True)
                self.plain[name].grad = local(held[name].grad) if gradients else None
            targets = [held[name].grad if gradients else held[name] for name in owners]
            wholes = {place: changed[name] for place, name in enumerate(owners) if name in mine}
            scatter_from_owners_(wholes, targets, list(owners.values()))

    def _point_at_shards(self) -> None:
        for name, parameter in self.held().items():
            self._point_at(name, parameter, local(parameter), shard=True)

    def _point_at(self, name: str, parameter: Any, value: Tensor, *, shard: bool) -> None:
        plain: Any = self.plain[name]
        plain.grad = None
        plain.data = value.detach()
        plain.requires_grad_(parameter.requires_grad)
        plain.sharded, plain.is_shard = parameter, shard and sharded_dim(parameter) is not None


@contextmanager
def whole_model(model: nn.Module) -> Iterator[None]:
    """Let a sharded model hold whole parameters, to be measured; nothing is written. All ranks call this."""
    if not has_shards(model):
        yield
        return
    with Shards(model, {}).standing_in(whole=True, write=False):
        yield


def _aligned_gradient(parameter: Any) -> Any:
    """Return the gradient of a sharded parameter, placed as the parameter is."""
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad


@contextmanager
def _without_machinery(model: nn.Module) -> Iterator[None]:
    """Remove the classes, attributes and hooks by which `fully_shard` and `parallelize_module` change modules."""
    kept = []
    for module in model.modules():
        kind, bases = type(module), type(module).__bases__
        if bases[0].__name__ == "FSDPModule":
            module.__class__ = bases[1]
        kept.append((module, kind, type(module), dict(vars(module))))
        for name in [name for name in vars(module) if name.startswith(_MACHINERY)]:
            del vars(module)[name]
        module._forward_pre_hooks = _of_the_user(module._forward_pre_hooks)
        module._forward_hooks = _of_the_user(module._forward_hooks)
    try:
        yield
    finally:
        for module, kind, plain, attributes in kept:
            if type(module) is plain:
                module.__class__ = kind
            elif kind is not plain:  # a method changed the class
                module.__class__ = type(kind.__name__, (kind.__bases__[0], type(module)), {})
            names = [name for name in attributes if name.startswith((*_MACHINERY, "_forward_"))]
            vars(module).update({name: attributes[name] for name in names})


def _of_the_user(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    return OrderedDict(
        (key, hook)
        for key, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed")
    )
