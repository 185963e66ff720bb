"""What the ranks of one training run share: seeds, settings, statistics of units, and shards of parameters.

Every rank runs the same code. `Method.attach` and `Method.apply` are collective: all ranks call them, in the same
order. There the ranks agree on a seed, and check that they hold the same parameters, state and settings. In a step,
only statistics of the batch are exchanged. A single process exchanges nothing.

Under `fully_shard` and `parallelize_module`, each rank holds a shard of each parameter. While a method acts, plain
parameters stand in for them in the model (`Shards`): this rank's shards for a formula that holds entry by entry, whole
parameters for any other. So a method is written as for one process.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dist.ProcessGroup

_BUCKET = 2**26
"""The bytes of one collective, at most, unless a single tensor is larger."""

_MACHINERY = ("__composable_api",)
"""How the names of attributes begin in which `fully_shard` keeps its state."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and `torch.compile`.

    Raises:
        ValueError: If the model is wrapped by FullyShardedDataParallel, whose flat parameters have no shapes.
    """
    while True:
        names = {kind.__name__ for kind in type(model).__mro__}
        if "FullyShardedDataParallel" in names:
            raise ValueError(
                "model: FullyShardedDataParallel (FSDP1) hides the parameters in flat vectors; shard the model with "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        if "DistributedDataParallel" in names:
            model = model.module  # type: ignore[assignment]
        elif "OptimizedModule" in names:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def find_group(group: Group | None = None) -> Group | None:
    """Return the ranks that share a model: all ranks, or those of the given group; None if there is only one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def share_seed(seed: int | None, group: Group | None) -> int | None:
    """Return the seed; on several ranks, None becomes a random seed that the first rank draws for all."""
    if seed is not None or group is None:
        return seed
    drawn = [int(torch.randint(2**62, ()))]
    dist.broadcast_object_list(drawn, group=group, group_src=0)
    return drawn[0]


def check_same(facts: Mapping[str, Any], group: Group | None, advice: str) -> None:
    """Raise a ValueError on every rank that names the first fact that differs between ranks.

    Args:
        facts: Tensors and plain values by name. Of a tensor, a checksum of its bits is compared.
        group: The ranks.
        advice: What the user can do, a sentence.
    """
    if group is None:
        return
    mine = _digest(facts)
    gathered: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, mine, group=group)
    first = gathered[0]
    for rank, other in enumerate(gathered):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"ranks: {name} is {first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank "
                    f"{rank}. {advice}"
                )


def _digest(facts: Mapping[str, Any]) -> dict[str, str]:
    tensors = {name: value.detach() for name, value in facts.items() if isinstance(value, Tensor)}
    device = next((tensor.device for tensor in tensors.values()), None)
    sums = torch.stack([_checksum(t).to(device) for t in tensors.values()]).tolist() if tensors else []
    checked = {
        name: f"{tensor.dtype} {list(tensor.shape)} with checksum {number}"
        for (name, tensor), number in zip(tensors.items(), sums, strict=True)
    }
    return {name: checked.get(name) or repr(value) for name, value in facts.items()}


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, read as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.contiguous().view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def rank_count(group: Group | None) -> int:
    """Return the number of ranks that share a model."""
    return 1 if group is None else dist.get_world_size(group)


def _device(group: Group) -> torch.device:
    """Return the device of the tensors that the ranks exchange."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def sum_over_ranks(tensors: Sequence[Tensor], group: Group | None) -> list[Tensor]:
    """Return the sum of each tensor over the ranks, computed in float64: one collective per `_BUCKET` bytes."""
    if group is None or not tensors:
        return list(tensors)
    device = _device(group)
    sums: list[Tensor] = []
    while len(sums) < len(tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in tensors[len(sums) :]:
            size += 8 * tensor.numel()
            if bucket and size > _BUCKET:
                break
            bucket.append(tensor)
        flat = torch.cat([tensor.detach().flatten().to(device, torch.float64) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        sums += [part.view(tensor.shape).to(tensor) for part, tensor in zip(parts, bucket, strict=True)]
    return sums


def iterate_together(items: Iterable[Any], group: Group | None) -> Iterator[Any]:
    """Yield the items of this rank, and None as long as other ranks have more."""
    if group is None:
        yield from items
        return
    own, end = iter(items), object()
    while True:
        item = next(own, end)
        (left,) = sum_over_ranks([torch.tensor(float(item is not end))], group)
        if not left:
            return
        yield None if item is end else item


def gather_rows(rows: Tensor, group: Group | None) -> tuple[Tensor, slice]:
    """Return the rows of all ranks, and where this rank's rows are among them. Ranks may have different numbers."""
    if group is None:
        return rows, slice(0, len(rows))
    counts = [rows.new_zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, counts[0].new_tensor([len(rows)]), group=group)
    lengths = [int(count) for count in counts]
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    start = sum(lengths[: dist.get_rank(group)])
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole, slice(start, start + len(rows))


def broadcast_(tensors: Sequence[Tensor], group: Group | None) -> None:
    """Overwrite these tensors by those of the first rank."""
    for tensor in tensors if group is not None else ():
        dist.broadcast(tensor, group=group, group_src=0)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, as `fully_shard` and `parallelize_module` make them."""
    return hasattr(tensor, "full_tensor")  # the module of DTensor is slow to import


def held(parameter: Tensor) -> Tensor:
    """Return what the model and its optimizers hold where a method sees this parameter: a DTensor, or itself."""
    return getattr(parameter, "sharded", parameter)


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory; a tensor that is not sharded is returned as it is."""
    shard: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return shard


def own_part(whole: Tensor, sharded: Any) -> Tensor:
    """Return the part of a whole tensor that belongs to this rank's shard, as a view.

    Args:
        whole: A tensor that broadcasts to the shape of the sharded one.
        sharded: The sharded tensor; any other tensor gives the whole.
    """
    if not is_sharded(sharded) or (dim := _sharded_dim(sharded)) is None:
        return whole
    lengths, rank = _lengths(sharded, dim), sharded.device_mesh.get_local_rank()
    return whole.expand(sharded.shape).narrow(dim, sum(lengths[:rank]), lengths[rank])


@torch.no_grad()
def gather_whole(tensors: Sequence[Any]) -> list[Tensor]:
    """Return whole copies of sharded tensors on every rank: one collective per `_BUCKET` bytes and dtype."""
    wholes: list[Tensor] = [local(tensor) for tensor in tensors]
    places = [i for i, tensor in enumerate(tensors) if is_sharded(tensor) and _sharded_dim(tensor) is not None]
    for dtype in dict.fromkeys(tensors[i].dtype for i in places):
        alike = [i for i in places if tensors[i].dtype == dtype]
        while alike:
            size = 0
            bucket: list[int] = []
            for i in alike:
                size += tensors[i].numel() * dtype.itemsize
                if bucket and size > _BUCKET:
                    break
                bucket.append(i)
            for i, whole in zip(bucket, _gather([tensors[i] for i in bucket]), strict=True):
                wholes[i] = whole
            alike = alike[len(bucket) :]
    return [whole.clone() if whole is local(t) else whole for whole, t in zip(wholes, tensors, strict=True)]


def _gather(tensors: Sequence[Any]) -> list[Tensor]:
    """Gather tensors of one dtype in one collective. Shards may be uneven, or empty."""
    mesh = tensors[0].device_mesh
    shapes = [_shard_shapes(tensor) for tensor in tensors]
    totals = [sum(each[rank].numel() for each in shapes) for rank in range(mesh.size())]
    flat = torch.cat([local(tensor).flatten() for tensor in tensors])
    padded = torch.cat([flat, flat.new_zeros(max(totals) - len(flat))])
    received = [torch.empty_like(padded) for _ in range(mesh.size())]
    dist.all_gather(received, padded, group=mesh.get_group())
    parts = [
        torch.split(row[:total], [each[rank].numel() for each in shapes])
        for rank, (row, total) in enumerate(zip(received, totals, strict=True))
    ]
    return [
        torch.cat([parts[rank][i].view(shape) for rank, shape in enumerate(shapes[i])], _sharded_dim(tensor) or 0)
        for i, tensor in enumerate(tensors)
    ]


def _shard_shapes(tensor: Any) -> list[torch.Size]:
    """Return the shape of each rank's shard."""
    dim = _sharded_dim(tensor) or 0
    return [torch.Size([*tensor.shape[:dim], n, *tensor.shape[dim + 1 :]]) for n in _lengths(tensor, dim)]


def _lengths(tensor: Any, dim: int) -> list[int]:
    """Return the length of each rank's shard; the first ones are full, the last ones may be short or empty."""
    count, length = tensor.device_mesh.size(), tensor.shape[dim]
    full = -(-length // count)
    return [max(0, min(full, length - rank * full)) for rank in range(count)]


def _sharded_dim(tensor: Any) -> int | None:
    """Return the dimension that is sharded, or None if every rank holds the whole tensor."""
    (placement,) = tensor.placements
    return None if placement.is_replicate() else placement.dim


def check_shards(model: nn.Module) -> None:
    """Raise a ValueError if a parameter is sharded in another way than along one dimension of one mesh."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            plain = all(type(each).__name__ in ("Shard", "Replicate") for each in placements)
            if mesh.ndim != 1 or not plain:
                raise ValueError(
                    f"model: parameter {name!r} is placed as {placements} on a mesh of {mesh.ndim} dimensions; "
                    "methods support one dimension, with Shard and Replicate (no hybrid sharding)"
                )


def is_shard(parameter: Tensor) -> bool:
    """Return whether a parameter that a method sees is one rank's shard at present."""
    return getattr(parameter, "is_shard", False)


def sum_shards(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Sum over the ranks the values that were computed from shards, in one collective; keep the others.

    Args:
        values: A number of each parameter, such as the sum of its squares.
        parameters: The parameters.
    """
    return _reduce_shards(values, parameters, dist.ReduceOp.SUM)


def largest_of_shards(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Take the maximum over the ranks of the values that were computed from shards, as `sum_shards` takes the sum."""
    return _reduce_shards(values, parameters, dist.ReduceOp.MAX)


def _reduce_shards(values: Sequence[Tensor], parameters: Sequence[Tensor], operation: Any) -> list[Tensor]:
    places = [i for i, parameter in enumerate(parameters) if is_shard(parameter)]
    reduced = list(values)
    if places:
        mesh = held(parameters[places[0]]).device_mesh  # type: ignore[attr-defined]
        flat = torch.stack([values[i].double() for i in places])
        dist.all_reduce(flat, operation, group=mesh.get_group())
        for i, value in zip(places, flat.unbind(), strict=True):
            reduced[i] = value.to(values[i])
    return reduced


def whole_norms(norms: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of whole tensors, given the norms of this rank's shards."""
    if not any(map(is_shard, parameters)):
        return list(norms)
    return [square.sqrt() for square in sum_shards([norm.double() ** 2 for norm in norms], parameters)]


class Shards:
    """The sharded parameters of a model, and plain parameters that stand in for them while a method acts.

    Args:
        model: The model.
        known: The parameters that a method found before the model was sharded. They become the stand-ins.

    Attributes:
        plain: The stand-ins by name. Between actions, each shares its memory with this rank's shard.
    """

    def __init__(self, model: nn.Module, known: Mapping[str, nn.Parameter]) -> None:
        check_shards(model)
        self._model = model
        self._open = False
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

    @property
    def is_open(self) -> bool:
        """Whether the model holds the stand-ins now."""
        return self._open

    def held(self) -> dict[str, Any]:
        """Return the sharded parameters that the model holds, by name."""
        return {name: holder[leaf] for holder, leaf, name in self._places}

    @contextmanager
    def standing_in(self, *, whole: bool, write: bool = True) -> Iterator[None]:
        """Let the model hold plain parameters: an ordinary model, on which a method acts as in one process.

        Args:
            whole: Whether the stand-ins are whole parameters, the same on every rank, rather than this rank's shards.
            write: Whether to write changes of whole parameters and gradients back into the shards.
        """
        sharded = self.held()
        gradients = {name: _aligned_gradient(p) for name, p in sharded.items() if p.grad is not None}
        tensors = [*sharded.values(), *gradients.values()]
        values = gather_whole(tensors) if whole else [local(tensor) for tensor in tensors]
        for name, value in zip(sharded, values, strict=False):
            self._point_at(name, sharded[name], value, shard=not whole)
        for name, value in zip(gradients, values[len(sharded) :], strict=True):
            self.plain[name].grad = value
        for holder, leaf, name in self._places:
            holder[leaf] = self.plain[name]
        self._open = True
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
            self._open = False
            for holder, leaf, name in self._places:
                holder[leaf] = sharded[name]
            self._point_at_shards()

    def _point_at_shards(self) -> None:
        for name, parameter in self.held().items():
            self._point_at(name, parameter, local(parameter), shard=True)

    def _point_at(self, name: str, parameter: Any, value: Tensor, *, shard: bool) -> None:
        plain: Any = self.plain[name]
        plain.grad = None
        plain.data = value.detach()
        plain.requires_grad_(parameter.requires_grad)
        plain.sharded, plain.is_shard = parameter, shard and _sharded_dim(parameter) is not None


@contextmanager
def whole_model(model: nn.Module) -> Iterator[None]:
    """Let a sharded model hold whole parameters, to be measured; nothing is written. All ranks call this."""
    if not any(map(is_sharded, model.parameters())):
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
        kept.append((module, type(module), dict(vars(module))))
        bases = type(module).__bases__
        if bases[0].__name__ == "FSDPModule":
            module.__class__ = bases[1]
        for name in [name for name in vars(module) if name.startswith(_MACHINERY)]:
            del vars(module)[name]
        module._forward_pre_hooks = _of_the_user(module._forward_pre_hooks)
        module._forward_hooks = _of_the_user(module._forward_hooks)
    try:
        yield
    finally:
        for module, kind, attributes in kept:
            module.__class__ = kind
            names = [name for name in attributes if name.startswith((*_MACHINERY, "_forward_"))]
            vars(module).update({name: attributes[name] for name in names})


def _of_the_user(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    return OrderedDict(
        (key, hook)
        for key, hook in hooks.items()
        if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed")
    )


def as_sharded(tensor: Tensor, like: Any) -> Any:
    """Return this rank's shard as a DTensor that is placed as another one."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def as_shard(tensor: Any, like: Any) -> Tensor:
    """Return this rank's shard of a tensor that may be whole, or sharded over any number of ranks."""
    if is_sharded(tensor):
        if tensor.device_mesh == like.device_mesh and tensor.placements == like.placements:
            return local(tensor)
        tensor = tensor.full_tensor()
    if tensor.shape != like.shape:
        raise ValueError(f"state_dict: shape {list(like.shape)} here, {list(tensor.shape)} in the given state")
    return own_part(tensor, like)


def whole_of(tensor: Any) -> Tensor:
    """Return a tensor as a plain one: the sum over examples of activations that tensor parallelism splits."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def add_whole(gradient: Any, addition: Tensor) -> Any:
    """Return a gradient plus a whole tensor, where tensor parallelism may have split the gradient."""
    if not is_sharded(gradient):
        return gradient + addition
    if any(placement.is_partial() for placement in gradient.placements):
        gradient = gradient.redistribute(placements=[_replicate()])
    return gradient + as_sharded(own_part(addition, gradient), gradient)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether `parallelize_module` split the model: then all ranks see the same batch."""
    return any(map(is_sharded, model.parameters())) and not any(
        "FSDPModule" in {kind.__name__ for kind in type(module).__mro__} for module in model.modules()
    )


def splits_units(model: nn.Module, weight: str) -> bool:
    """Return whether tensor parallelism splits the rows of a weight, so that each rank computes some of its units."""
    parameter = dict(model.named_parameters()).get(weight)
    return (
        is_tensor_parallel(model) and parameter is not None and is_sharded(parameter) and _sharded_dim(parameter) == 0
    )


def data_group(model: nn.Module, group: Group | None) -> Group | None:
    """Return the ranks that see different parts of a batch; None under tensor parallelism."""
    return None if is_tensor_parallel(model) else group
