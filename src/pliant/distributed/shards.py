"""Shards of tensors: how `fully_shard` and `parallelize_module` place them, and how they become whole again."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pliant.distributed.ranks import BUCKET, Group

TensorType = TypeVar("TensorType", bound=Tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, as `fully_shard` and `parallelize_module` make them."""
    return hasattr(tensor, "full_tensor")  # the module of DTensor is slow to import


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules on which `fully_shard` was called."""
    return [each for each in model.modules() if "FSDPModule" in {kind.__name__ for kind in type(each).__mro__}]


def has_shards(model: nn.Module) -> bool:
    """Return whether the parameters of a model are sharded.

    After a forward pass without a backward pass, as when a model is evaluated, `fully_shard` leaves whole parameters in
    the model. Here they become shards again.
    """
    for module in fully_sharded(model):
        module.reshard()
    return any(map(is_sharded, model.parameters()))


def group_of(model: nn.Module) -> Group | None:
    """Return the ranks of a model's DistributedDataParallel or shards; None if it has neither."""
    names = {kind.__name__ for kind in type(model).__mro__}
    if "OptimizedModule" in names:  # torch.compile
        return group_of(model._orig_mod)  # type: ignore[arg-type]
    if "DistributedDataParallel" in names:
        return model.process_group  # type: ignore[return-value]
    if not has_shards(model):
        return None
    sharded: Any = next(filter(is_sharded, model.parameters()))
    return None if sharded.device_mesh.ndim > 1 else sharded.device_mesh.get_group()


def held(parameter: TensorType) -> TensorType:
    """Return what the model and its optimizers hold where a method sees this parameter: a DTensor, or itself."""
    found: TensorType = getattr(parameter, "sharded", parameter)
    return found


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
    if not is_sharded(sharded) or (dim := sharded_dim(sharded)) is None:
        return whole
    return whole.expand(sharded.shape)[(slice(None),) * dim + (_own_range(sharded, dim),)]


def own_rows_and_columns(sharded: Any) -> tuple[slice, slice]:
    """Return which rows and columns of a weight, read as the matrix [first dimension, others], this rank holds."""
    dim = sharded_dim(sharded)
    rows = _own_range(sharded, 0) if dim == 0 else slice(None)
    return rows, _own_range(sharded, 1) if dim == 1 else slice(None)


def _own_range(sharded: Any, dim: int) -> slice:
    lengths, rank = _lengths(sharded, dim), sharded.device_mesh.get_local_rank()
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


@torch.no_grad()
def gather_whole(tensors: Sequence[Any]) -> list[Tensor]:
    """Return whole copies of sharded tensors on every rank: one collective per `BUCKET` bytes and dtype."""
    wholes: list[Tensor] = [local(tensor) for tensor in tensors]
    places = [i for i, tensor in enumerate(tensors) if is_sharded(tensor) and sharded_dim(tensor) is not None]
    for dtype in dict.fromkeys(tensors[i].dtype for i in places):
        alike = [i for i in places if tensors[i].dtype == dtype]
        while alike:
            size = 0
            bucket: list[int] = []
            for i in alike:
                size += tensors[i].numel() * dtype.itemsize
                if bucket and size > BUCKET:
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
        torch.cat([parts[rank][i].view(shape) for rank, shape in enumerate(shapes[i])], sharded_dim(tensor) or 0)
        for i, tensor in enumerate(tensors)
    ]


def owner_batches(sizes: Sequence[int], ranks: int, limit: int = BUCKET) -> list[dict[int, int]]:
    """Return the tensors of each batch by their place, each with the rank that owns it.

    Each tensor goes to the rank with the fewest bytes. A batch ends before a rank would hold more than the limit.

    Args:
        sizes: The bytes of each tensor.
        ranks: The number of ranks.
        limit: The bytes that a rank holds at a time, at most, unless a single tensor is larger.

    Example:
        >>> owner_batches([4, 3, 2, 5], ranks=2, limit=6)
        [{0: 0, 1: 1, 2: 1}, {3: 0}]
    """
    batches: list[dict[int, int]] = [{}]
    load = [0] * ranks
    for place, size in enumerate(sizes):
        owner = load.index(min(load))
        if load[owner] and load[owner] + size > limit:
            batches.append({})
            load, owner = [0] * ranks, 0
        batches[-1][place] = owner
        load[owner] += size
    return batches


@torch.no_grad()
def gather_on_owners(tensors: Sequence[Any], owners: Sequence[int]) -> dict[int, Tensor]:
    """Return whole copies of the tensors that this rank owns, by their place: one collective per dtype."""
    wholes: dict[int, Tensor] = {}
    for mesh, places in _by_dtype(tensors):
        sent = [[local(tensors[i]) for i in places if owners[i] == rank] for rank in range(mesh.size())]
        mine = [i for i in places if owners[i] == mesh.get_local_rank()]
        shapes = [[_shard_shapes(tensors[i])[rank] for i in mine] for rank in range(mesh.size())]
        parts = _exchange(sent, shapes, tensors[places[0]])
        wholes |= {i: torch.cat([each[k] for each in parts], sharded_dim(tensors[i]) or 0) for k, i in enumerate(mine)}
    return wholes


@torch.no_grad()
def scatter_from_owners_(wholes: Mapping[int, Tensor], tensors: Sequence[Any], owners: Sequence[int]) -> None:
    """Overwrite the shards of all ranks by whole tensors, which their owners have, by place."""
    for mesh, places in _by_dtype(tensors):
        mine = [i for i in places if owners[i] == mesh.get_local_rank()]
        dims = {i: sharded_dim(tensors[i]) or 0 for i in places}
        split = {i: torch.split(wholes[i], _lengths(tensors[i], dims[i]), dims[i]) for i in mine}
        sent = [[split[i][rank] for i in mine] for rank in range(mesh.size())]
        theirs = [[i for i in places if owners[i] == rank] for rank in range(mesh.size())]
        shapes = [[local(tensors[i]).shape for i in each] for each in theirs]
        for own, parts in zip(theirs, _exchange(sent, shapes, tensors[places[0]]), strict=True):
            for i, part in zip(own, parts, strict=True):
                local(tensors[i]).copy_(part)


def _by_dtype(tensors: Sequence[Any]) -> list[tuple[Any, list[int]]]:
    """Return the places of the tensors of each dtype, with their mesh."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    places = [[i for i, tensor in enumerate(tensors) if tensor.dtype == dtype] for dtype in dtypes]
    return [(tensors[each[0]].device_mesh, each) for each in places]


def _exchange(sent: list[list[Tensor]], shapes: list[list[torch.Size]], like: Any) -> list[list[Tensor]]:
    """Send tensors to each rank, and return the tensors of these shapes from each rank: one collective."""
    flat = torch.cat([local(like).new_empty(0), *(tensor.flatten() for each in sent for tensor in each)])
    counts = [sum(tensor.numel() for tensor in each) for each in sent]
    expected = [sum(shape.numel() for shape in each) for each in shapes]
    received = flat.new_empty(sum(expected))
    dist.all_to_all_single(received, flat, expected, counts, group=like.device_mesh.get_group())
    parts = iter(torch.split(received, [shape.numel() for each in shapes for shape in each]))
    return [[next(parts).view(shape) for shape in each] for each in shapes]


def _shard_shapes(tensor: Any) -> list[torch.Size]:
    """Return the shape of each rank's shard."""
    dim = sharded_dim(tensor) or 0
    return [torch.Size([*tensor.shape[:dim], n, *tensor.shape[dim + 1 :]]) for n in _lengths(tensor, dim)]


def _lengths(tensor: Any, dim: int) -> list[int]:
    """Return the length of each rank's shard; the first ones are full, the last ones may be short or empty."""
    count, length = tensor.device_mesh.size(), tensor.shape[dim]
    full = -(-length // count)
    return [max(0, min(full, length - rank * full)) for rank in range(count)]


def sharded_dim(tensor: Any) -> int | None:
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
        values: A number or vector of each parameter, such as the sum of its squares.
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
        flat = torch.cat([values[i].double().flatten() for i in places])
        dist.all_reduce(flat, operation, group=mesh.get_group())
        for i, part in zip(places, torch.split(flat, [values[i].numel() for i in places]), strict=True):
            reduced[i] = part.view(values[i].shape).to(values[i])
    return reduced


def whole_norms(norms: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of whole tensors, given the norms of this rank's shards."""
    if not any(map(is_shard, parameters)):
        return list(norms)
    return [square.sqrt() for square in sum_shards([norm.double() ** 2 for norm in norms], parameters)]


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
    return any(map(is_sharded, model.parameters())) and not fully_sharded(model)


def splits_units(model: nn.Module, weight: str) -> bool:
    """Return whether tensor parallelism splits the rows of a weight, so that each rank computes some of its units."""
    return _split_dim(model, weight) == 0


def splits_inputs(model: nn.Module, weight: str) -> bool:
    """Return whether tensor parallelism splits the columns of a weight, so that each rank sees some of its inputs."""
    return _split_dim(model, weight) == 1


def _split_dim(model: nn.Module, name: str) -> int | None:
    """Return the dimension along which tensor parallelism splits a parameter, or None."""
    parameter = dict(model.named_parameters()).get(name)
    split = parameter is not None and is_sharded(parameter) and is_tensor_parallel(model)
    return sharded_dim(parameter) if split else None


def data_group(model: nn.Module, group: Group | None) -> Group | None:
    """Return the ranks that see different parts of a batch; None under tensor parallelism."""
    return None if is_tensor_parallel(model) else group
