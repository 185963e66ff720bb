"""What the ranks of one training run agree on and sum up: seeds, settings, statistics of units."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Group = dist.ProcessGroup

BUCKET = 2**26
"""The bytes of one collective, at most, unless a single tensor is larger."""

_alone = ContextVar("alone", default=False)

_FSDP1 = (
    "FullyShardedDataParallel (FSDP1) hides the parameters in flat vectors; shard the model with "
    "torch.distributed.fsdp.fully_shard (FSDP2) instead"
)

_CHUNK = 2**20
"""The entries of which a checksum holds copies at a time."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of data parallelism and `torch.compile`.

    Raises:
        ValueError: If the model is not a module, or is wrapped by FullyShardedDataParallel, whose flat parameters have
            no shapes.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {model!r} is not allowed; it must be a torch.nn.Module")
    while True:
        names = {kind.__name__ for kind in type(model).__mro__}
        if "FullyShardedDataParallel" in names:
            raise ValueError(f"model: {_FSDP1}")
        if names & {"DistributedDataParallel", "DataParallel"}:
            model = model.module  # type: ignore[assignment]
        elif "OptimizedModule" in names:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def check_not_flat(parameters: Iterable[Tensor]) -> None:
    """Raise a ValueError if FullyShardedDataParallel made an optimizer's parameters flat."""
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters):
        raise ValueError(f"optimizers: {_FSDP1}")


def find_group(group: Group | None = None) -> Group | None:
    """Return the group of ranks that share a model: the given group, or all ranks; None if there is only one rank."""
    if _alone.get() or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def share_seed(seed: int | None, group: Group | None) -> int | None:
    """Return the seed; on several ranks, None becomes a random seed that the first rank draws for all."""
    if seed is not None or group is None:
        return seed
    drawn: int = share_first(int(torch.randint(2**62, ())), group)
    return drawn


def share_first(value: Any, group: Group | None) -> Any:
    """Return the value of the first rank."""
    if group is None:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    return shared[0]


def call_on_first(function: Callable[[], Any], group: Group | None) -> Any:
    """Call a function on the first rank; return its result, or raise its error, on all ranks.

    Meanwhile, nothing in the function waits for other ranks: `find_group` finds none.
    """
    if group is None:
        return function()
    result, error = None, None
    if dist.get_rank(group) == 0:
        token = _alone.set(True)
        try:
            result = function()
        except Exception as raised:
            error = raised
        finally:
            _alone.reset(token)
    result, error = share_first((result, error), group)
    if error is not None:
        raise error
    return result


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
    """Return the sum of a tensor's entries, read as integers, each times an odd number that depends on its place.

    So a checksum notices exchanged entries and signs, which a plain sum does not.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    entries = real.flatten().view(_INTEGERS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(torch.split(entries, _CHUNK)):
        factors = 2 * torch.arange(len(part), device=part.device) + 1
        total += (part * factors).sum() * (2 * number + 1)
    return total


def rank_count(group: Group | None) -> int:
    """Return the number of ranks that share a model."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group | None) -> tuple[int, int]:
    """Return the number of this rank, and of all ranks that share a model."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _device(group: Group) -> torch.device:
    """Return the device of the tensors that the ranks exchange."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def sum_over_ranks(tensors: Sequence[Tensor], group: Group | None) -> list[Tensor]:
    """Return the sum of each tensor over the ranks, computed in float64: one collective per `BUCKET` bytes."""
    if group is None or not tensors:
        return list(tensors)
    device = _device(group)
    sums: list[Tensor] = []
    while len(sums) < len(tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in tensors[len(sums) :]:
            size += 8 * tensor.numel()
            if bucket and size > BUCKET:
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
    """Copy these tensors from the first rank."""
    for tensor in tensors if group is not None else ():
        dist.broadcast(tensor, group=group, group_src=0)


def merge_over_ranks(facts: Mapping[str, Any], group: Group | None) -> dict[str, Any]:
    """Return the entries of all ranks' dictionaries."""
    if group is None:
        return dict(facts)
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, dict(facts), group=group)
    return {name: fact for each in gathered for name, fact in each.items()}
