"""What ranks must refuse, and what they must agree on; every function runs on all ranks of one launch.

    python -m tests.distributed.checks RANK WORLD FOLDER [START]

START is how the names begin of the checks to run, after "check_"; all if it is left out.
A function that fails on a rank leaves its traceback in FOLDER/checks.WORLD.RANK.pt.
"""

import math
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import pliant
from pliant import methods
from pliant.anatomy import analyze, find_units
from pliant.diagnostics import measure
from pliant.distributed import call_on_first, gather_rows, iterate_together, share_first, stand_ins, sum_over_ranks
from pliant.distributed.shards import gather_on_owners, owner_batches
from tests.distributed import networks, shard_checks
from tests.distributed.cells import Run, make_method
from tests.distributed.launching import joined


def error_of(function: Callable[[], Any]) -> str:
    """Return the message of the ValueError that a function raises."""
    try:
        function()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")


def all_values(values: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of all ranks."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return gathered


def assert_replicas(model: nn.Module) -> None:
    """Assert that the parameters are bit-equal on all ranks."""
    first, *others = all_values(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for other in others:
        assert torch.equal(first, other)


def check_initial_values_of_different_seeds_are_an_error() -> None:
    for name in ("l2_init", "shrink_perturb", "hare_tortoise", "wasserstein"):
        model = networks.build("mlp", seed=dist.get_rank())
        made = make_method(name, model, "mlp")
        DistributedDataParallel(model)  # copies the parameters of rank 0
        optimizer = SGD(model.parameters(), lr=0.1)
        message = error_of(lambda made=made, optimizer=optimizer: made.attach(optimizer))
        assert "['0.weight'] is torch.float64 [" in message, message
        assert "on rank 0" in message
        assert "on rank 1" in message
        assert name in message


def check_models_of_different_seeds_are_an_error() -> None:
    model = networks.build("mlp", seed=dist.get_rank())
    message = error_of(make_method("fire", model, "mlp").apply)
    assert "parameters['0.weight']" in message, message


def check_different_settings_are_an_error() -> None:
    rank = dist.get_rank()
    for name, settings in (
        ("redo", {"tau": 0.1 * rank}),
        ("swr", {"lam": 0.1 + 0.1 * rank}),
        ("fire", {"iterations": 5 + rank}),
        ("shrink", {"proportional": rank == 0}),
    ):
        model = networks.build("mlp")
        made = make_method(name, model, "mlp", **settings)
        message = error_of(lambda made=made, model=model: made.attach(SGD(model.parameters(), lr=0.1)))
        assert next(iter(settings)) in message, message


def check_different_seeds_are_an_error() -> None:
    model = networks.build("mlp")
    message = error_of(make_method("full_reset", model, "mlp", seed=dist.get_rank()).apply)
    assert "seed is 0 on rank 0 and 1 on rank 1" in message, message


def check_unseeded_draws_agree() -> None:
    for name in methods.names():
        if "seed" not in methods.options(name):
            continue
        torch.manual_seed(dist.get_rank())
        settings = {"toward": "fresh"} if name == "shrink_perturb" else {}
        run = Run("ddp", name, "sgd", "mlp", seed=None, **settings)
        run.method.attach(run.optimizer)
        run.train(range(2))
        assert_replicas(run.inner)


def check_a_group_of_one_trains_alone() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = networks.build("mlp", seed=dist.get_rank())
    made = make_method("l2_init", model, "mlp")
    made.attach(SGD(model.parameters(), lr=0.1), group=groups[dist.get_rank()])
    assert made.group is None


def check_the_group_is_that_of_the_model() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    shard = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copy", "shard"))["shard"]
    for wrap in (
        lambda model: DistributedDataParallel(model, process_group=alone),
        lambda model: torch.compile(DistributedDataParallel(model, process_group=alone)),
        lambda model: fully_shard(model, mesh=shard),
    ):
        model = wrap(networks.build("mlp", seed=dist.get_rank()))
        made = make_method("l2_init", model, "mlp")
        optimizer = SGD(model.parameters(), lr=0.1)
        assert made.attach(optimizer).group is None
        assert pliant.Monitor(model, optimizer, loss_fn=networks.loss).group is None


def check_running_statistics_of_each_rank_return_together() -> None:
    networks.BatchNorm.synchronized = False
    run = Run("ddp", "hare_tortoise", "adamw", "cnn_bn")
    networks.BatchNorm.synchronized = True
    run.method.attach(run.optimizer)
    run.train(range(4))  # the last step goes back to the average
    means = all_values(run.inner.get_buffer("1.running_mean"))
    assert torch.equal(means[0], means[1])
    run.method.detach()
    run.method.attach(run.optimizer)


def check_batches_may_be_uneven() -> None:
    rank = dist.get_rank()
    data = [networks.batch("mlp", step) for step in range(3)]
    own = [data[0], data[1]] if rank == 0 else [data[2]]
    model, alone = networks.build("mlp"), networks.build("mlp")
    make_method("dash", model, "mlp").apply(batches=own, loss_fn=networks.loss)
    solo = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    make_method("dash", alone, "mlp").apply(batches=data, loss_fn=networks.loss, group=solo)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def check_sums_rows_and_iteration() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    total, count = sum_over_ranks([torch.full((2, 2), rank, dtype=torch.float32), torch.tensor(3)], group)
    assert total.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert total.dtype == torch.float32
    assert count.item() == 3 * world
    rows, mine = gather_rows(torch.full((rank + 1, 2), float(rank)), group)
    assert rows[:, 0].tolist() == [0.0, 1.0, 1.0]
    assert mine == slice(rank, 2 * rank + 1)
    assert list(iterate_together(range(1 + rank), group)) == ([0, None] if rank == 0 else [0, 1])


def check_a_sharded_model_is_measured_alike_on_all_ranks() -> None:
    data = networks.batch("mlp", 0)
    plain, model = networks.build("mlp"), networks.build("mlp")
    expected = measure(plain, data, networks.loss).values
    sharded = fully_shard(model)
    found = measure(sharded, data, networks.loss).values
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == value or (math.isnan(found[key]) and math.isnan(value)), key
    assert type(model[0].weight).__name__ == "DTensor"


def check_a_monitor_records_the_same_on_all_ranks() -> None:
    data = networks.batch("mlp", 99)
    networks.BatchNorm.synchronized = False  # each rank trains this one on the whole batch
    alone = Run("single", "l2", "adamw", "mlp")
    solo = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    expected = pliant.Monitor(
        alone.inner, alone.optimizer, every=2, probe=data, loss_fn=networks.loss, budget=None, group=solo
    )
    networks.BatchNorm.synchronized = False
    alone.train(range(3))
    for setting in ("ddp", "fsdp"):
        run = Run(setting, "l2", "adamw", "mlp")
        probe = networks.batch("mlp", 99 + dist.get_rank())  # that of the first rank counts
        monitor = pliant.Monitor(run.model, run.optimizer, every=2, probe=probe, loss_fn=networks.loss)
        run.train(range(3))
        records = [(record.step, record.values) for record in monitor.records]
        assert [step for step, _ in records] == [record.step for record in expected.records] == [0, 2]
        assert str(share_first(records, dist.group.WORLD)) == str(records)
        for (_, values), record in zip(records, expected.records, strict=True):
            assert values.keys() == record.values.keys()
            for key, value in record.values.items():
                alike = math.isclose(values[key], value, rel_tol=1e-6, abs_tol=1e-12)
                assert alike or (math.isnan(values[key]) and math.isnan(value)), (setting, key, values[key], value)


def check_a_diagnosis_is_that_of_the_first_rank() -> None:
    inputs, labels = (torch.cat(each) for each in zip(*(networks.batch("mlp", step) for step in range(8)), strict=True))
    settings: dict[str, Any] = {"steps": 5, "budget": None, "progress": False}
    expected = call_on_first(
        lambda: pliant.diagnose(networks.build("mlp"), (inputs, labels), networks.loss, **settings), dist.group.WORLD
    )
    assert expected.verdict is not None
    for wrap in (DistributedDataParallel, fully_shard):
        own = (inputs, labels) if dist.get_rank() == 0 else (inputs[:3], labels[:3])
        found = pliant.diagnose(wrap(networks.build("mlp")), own, networks.loss, **settings)
        assert replace(found.trial, seconds=0.0) == replace(expected.trial, seconds=0.0)
        assert str(found.signs.to_dict()) == str(expected.signs.to_dict())


def check_a_sharded_model_is_analyzed_as_a_plain_one() -> None:
    example = networks.batch("cnn_bn", 0)[0]
    plain = networks.build("cnn_bn")
    for wrapped in (fully_shard(networks.build("cnn_bn")), DistributedDataParallel(networks.build("cnn_bn"))):
        assert torch.equal(analyze(wrapped, example).plan().matrix, analyze(plain, example).plan().matrix)
        ours, theirs = (to_plain_values(find_units(each, example)) for each in (wrapped, plain))
        assert ours == theirs, f"{ours}\nis not\n{theirs}"


def to_plain_values(value: Any) -> Any:
    """Return nested records with tensors as lists, which == compares by value."""
    if is_dataclass(value):
        return {each.name: to_plain_values(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [to_plain_values(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def check_matrices_are_shared_out_in_batches() -> None:
    limit, gathered = 700, []  # the largest weight has 640 bytes

    def gather(tensors: Any, owners: Any) -> dict[int, torch.Tensor]:
        found = gather_on_owners(tensors, owners)
        gathered.append(sum(each.numel() * each.element_size() for each in found.values()))
        return found

    alone, model = networks.build("mlp"), networks.build("mlp")
    solo = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    expected = make_method("fire", alone, "mlp").apply(group=solo)
    with (
        patch.object(stand_ins, "gather_on_owners", gather),
        patch.object(stand_ins, "owner_batches", partial(owner_batches, limit=limit)),
    ):
        receipt = make_method("fire", fully_shard(model), "mlp").apply()
    assert receipt.as_dict() == expected.as_dict()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    assert len(gathered) == 2
    assert max(gathered) <= limit
    assert sum(each.sum().item() for each in all_values(torch.tensor(gathered))) == 8 * (7 * 10 + 10 * 8 + 8 * 5)


def check_other_ways_to_shard_are_refused_by_name() -> None:
    hybrid = fully_shard(networks.build("mlp"), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("copy", "shard")))
    message = error_of(lambda: make_method("l2", hybrid, "mlp"))
    assert "mesh of 2 dimensions" in message, message
    for keep in (True, False):
        model = networks.build("mlp")
        made = [make_method(name, model, "mlp") for name in ("l2", "fire")]
        flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=keep)
        optimizer = SGD(flat.parameters(), lr=0.1)
        for refused in (
            partial(make_method, "l2", flat, "mlp"),
            partial(made[0].attach, optimizer),
            partial(made[1].apply, optimizer),
            partial(pliant.Monitor, flat, optimizer),
            partial(measure, flat, networks.batch("mlp", 0), networks.loss),
            partial(pliant.diagnose, flat, networks.batch("mlp", 0), networks.loss),
        ):
            message = error_of(refused)
            assert "FullyShardedDataParallel (FSDP1)" in message, message
    sharded = fully_shard(networks.build("mlp"))
    message = error_of(lambda: make_method("crelu", sharded, "mlp"))
    assert "make crelu before sharding" in message, message


def check_initial_values_differ_before_sharding() -> None:
    model = networks.build("mlp", seed=dist.get_rank())
    made = make_method("l2_init", model, "mlp")
    fully_shard(model)
    message = error_of(lambda: made.attach(SGD(model.parameters(), lr=0.1)))
    assert "['0.weight']" in message, message


def check_state_of_a_sharded_method_is_sharded() -> None:
    for early in (True, False):
        model = networks.build("mlp")
        made = make_method("l2_init", model, "mlp") if early else None
        fully_shard(model)
        made = made or make_method("l2_init", model, "mlp")
        made.attach(SGD(model.parameters(), lr=0.1))
        state = made.state_dict()["state"]["initial"]["0.weight"]
        assert state.placements == model.get_parameter("0.weight").placements
        assert torch.equal(state.full_tensor(), networks.build("mlp").get_parameter("0.weight"))
        held = made.parameters["0.weight"]
        assert held.numel() < state.numel()  # only a shard stays in memory


def check_state_of_the_shape_of_a_shard_is_not_sharded() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).double()  # shards [3, 6] and [2, 6]
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    made = methods.create("trac", fully_shard(model))
    made.attach(SGD(model.parameters(), lr=0.1))
    tuners = made.state_dict()["state"]["tuners"]["0.weight"]
    assert type(tuners) is torch.Tensor
    assert tuners.shape == (3, 6)  # one per statistic and decay


def check_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto-many-gpus.md").read_text()
    blocks = re.findall(r"```python needs=ranks\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    names = {"pliant": pliant, "torch": torch, "fully_shard": fully_shard, "folder": folder[0]}
    names |= {"model": networks.build("mlp"), "example": networks.batch("mlp", 0)[0]}
    for block in blocks:
        exec(block, names)


def main(rank: int, world: int, folder: str, only: str = "") -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(rank, world, Path(folder) / "checks.rendezvous"):
        results = {}
        for name, function in {**globals(), **vars(shard_checks)}.items():
            if not name.startswith("check_" + only) or name == "check_same":
                continue
            networks.BatchNorm.synchronized = True
            try:
                function()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
        torch.save(results, Path(folder) / f"checks.{world}.{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
