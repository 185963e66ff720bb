"""What must hold of sharded and wrapped models as users train them; checks.py runs these too, on all ranks."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from benchmarks import ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from pliant import methods
from pliant.diagnostics import measure
from pliant.distributed import gather_whole, share_first, stand_ins
from pliant.distributed.ranks import check_same
from tests.distributed import networks
from tests.distributed.cells import EAGER, Run, make_method, shard_fully
from tests.distributed.test_cells import distance

ROOT = Path(__file__).parents[2]


class Experts(nn.Module):
    """Stacks of five matrices, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.head = nn.Linear(7, 6), nn.Linear(6, networks.CLASSES)
        self.up = nn.Parameter(torch.randn(5, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(5, 8, 6) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bi,eih->beh", self.inputs(x), self.up).relu()
        out: torch.Tensor = self.head(torch.einsum("beh,eho->bo", hidden, self.down))
        return out


def alone() -> dist.ProcessGroup:
    """Return a group of this rank only."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole copies of the parameters."""
    state = model.state_dict()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t.clone()) for name, t in state.items()}


def train_one(model: nn.Module, optimizer: Optimizer, step: int = 0) -> None:
    """Train on a batch that all ranks share."""
    inputs, labels = networks.batch("mlp", step)
    optimizer.zero_grad()
    networks.loss(model(inputs), labels).backward()
    optimizer.step()


def evaluate(model: nn.Module) -> None:
    """Leave the model as an evaluation does: under `fully_shard`, with whole parameters in its root."""
    with torch.no_grad():
        model(networks.batch("mlp", 9)[0])


def check_an_evaluation_before_changes_nothing() -> None:
    solo = alone()
    for name in ("fire", "full_reset", "l2_init", "hare_tortoise", "redo"):
        models = [networks.build("mlp"), shard_fully(networks.build("mlp"))]
        for model, settings in zip(models, ({"group": solo}, {}), strict=True):
            optimizer = AdamW(model.parameters(), lr=1e-2)
            if settings == {}:
                evaluate(model)
                assert not hasattr(model[4].weight, "full_tensor")  # the root is whole now
            made = make_method(name, model, "mlp")
            evaluate(model)
            if made.kind != "reinitializer":
                made.attach(optimizer, **settings)
            for step in range(3):
                evaluate(model)
                if made.kind == "reinitializer":
                    made.apply(optimizer, **settings)
                train_one(model, optimizer, step)
        assert distance(whole(models[1]), whole(models[0])) <= 1e-12, name
    evaluate(models[1])
    data = networks.batch("mlp", 0)
    ours, theirs = (measure(model, data, networks.loss).values for model in reversed(models))
    assert ours.keys() == theirs.keys()
    assert type(models[1].get_submodule("4").weight).__name__ == "DTensor"


def check_stacks_are_treated_as_in_one_process() -> None:
    solo = alone()
    along_rows = partial(fully_shard, shard_placement_fn=lambda p: Shard(1) if p.ndim > 2 else None)
    for name in ("swr", "fire", "spectral", "weight_rescaling", "parseval", "nap", "wasserstein", "weight_clipping"):
        found = []
        for wrap, settings in ((None, {"group": solo}), (fully_shard, {}), (along_rows, {})):
            torch.manual_seed(0)
            model = Experts().double()
            if wrap is not None:
                wrap(model)  # type: ignore[operator]
            made = make_method(name, model, "mlp")
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            if made.kind == "reinitializer":
                made.apply(optimizer, **settings)
            else:
                made.attach(optimizer, **settings)
            for step in range(2):
                train_one(model, optimizer, step)
            assert made.receipt is not None
            assert made.receipt.entries > 0
            found.append(whole(model))
        assert max(distance(each, found[0]) for each in found[1:]) <= 1e-12, name


def check_layers_are_not_changed_behind_ddp() -> None:
    for name in (name for name in methods.names() if methods.info(name).kind == "architecture"):
        with pytest.raises(ValueError, match=f"make {name} before sharding or wrapping"):
            make_method(name, DistributedDataParallel(networks.build("mlp")), "mlp")


def check_filters_see_whole_shapes() -> None:
    for name in (name for name in methods.names() if "where" in methods.options(name)):
        plain, sharded = networks.build("mlp"), fully_shard(networks.build("mlp"))
        chosen = []
        for model in (plain, sharded):
            if methods.info(name).kind != "architecture":
                made = make_method(name, model, "mlp", where=lambda _, p: p.ndim < 2 or p.shape[0] > 7)
                chosen.append((list(made.parameters), list(getattr(made, "strengths", []))))
        assert chosen[1:] == chosen[:-1], name


def check_shapes_suffice_to_make_a_method() -> None:
    gathered = []

    def gather(tensors: Any) -> list[torch.Tensor]:
        gathered.append(name)
        return gather_whole(tensors)

    with patch.object(stand_ins, "gather_whole", gather):
        for name in ("l2", "fire", "parseval", "weight_clipping", "nap"):
            make_method(name, fully_shard(networks.build("mlp")), "mlp")
    assert gathered == ["nap"]


def check_mixed_precision_of_fully_shard() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in ("infer", "c_chain", "plasticity_injection", "redo", "feature_rank"):
        model = fully_shard(networks.build("mlp").float(), mp_policy=policy)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        made = methods.create(name, model, example=networks.batch("mlp", 0)[0][:2].float(), **EAGER.get(name, {}))
        if made.kind != "reinitializer":
            made.attach(optimizer)
        for step in range(4):
            inputs, labels = networks.batch("mlp", step)
            if made.kind == "reinitializer" and step == 1:
                made.apply(optimizer)
            optimizer.zero_grad()
            networks.loss(model(inputs.float()).float(), labels).backward()
            optimizer.step()
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.full_tensor().isfinite().all(), name


def check_compiled_models_and_steps() -> None:
    for setting in ("ddp", "fsdp"):
        found = []
        for compiled in (False, True):
            torch._dynamo.reset()
            run = Run(setting, "redo", "sgd", "mlp")
            penalty = make_method("swr", run.model, "mlp")
            run.method.attach(run.optimizer)
            penalty.attach(run.optimizer)
            if compiled:
                run.model = torch.compile(run.model, backend="eager")
                run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")  # type: ignore[method-assign]
            run.train(range(4))
            for made in (run.method, penalty):
                assert made.receipt is not None
                assert made.receipt.entries > 0
            found.append(run.values())
        assert distance(*found) <= 1e-12, setting


def check_a_rebuilt_model_is_an_error() -> None:
    wrappers: tuple[Callable[[nn.Module], nn.Module], ...] = (DistributedDataParallel, fully_shard)
    for wrap in wrappers:
        for name in ("l2_init", "swr", "redo", "fire", "hare_tortoise"):
            made = make_method(name, wrap(networks.build("mlp")), "mlp")
            rebuilt = wrap(networks.build("mlp"))
            optimizer = SGD(rebuilt.parameters(), lr=0.1)
            act = made.apply if made.kind == "reinitializer" else made.attach
            with pytest.raises(ValueError, match=r"of another model|of this model"):
                act(optimizer)


def check_inputs_of_another_rank_are_left_out() -> None:
    states: list[Any] = [None]
    for loaded in (False, True):
        run = Run("ddp", "c_chain", "sgd", "mlp")
        if loaded:
            dist.broadcast_object_list(states)  # as a checkpoint that the first rank wrote
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run.method.load_state_dict(states[0])
            told = [str(each.message) for each in caught if "rank 0 of 2 saw" in str(each.message)]
            assert len(told) == dist.get_rank(), told
        run.method.attach(run.optimizer)
        run.train(range(3))  # no rank waits for another
        states = [run.method.state_dict()]
    first = torch.cat([p.detach().flatten() for p in run.inner.parameters()])
    copies = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, first)
    assert torch.equal(copies[0], copies[1])


def check_checksums_notice_exchanged_entries() -> None:
    group = dist.group.WORLD
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        ours = torch.tensor([1, -2, 3, 4], dtype=dtype)
        check_same({"weight": ours}, group, "")
        for theirs in (ours[[1, 0, 2, 3]], ours * torch.tensor([-1, -1, 1, 1], dtype=dtype)):
            mine = ours if dist.get_rank() == 0 else theirs
            with pytest.raises(ValueError, match="weight is"):
                check_same({"weight": mine}, group, "")


def check_dash_differs_only_where_gradients_are_rounding() -> None:
    """Rounding decides the factor of a bias before batch norm. Replicas are bit-equal all the same."""
    inputs, labels = networks.batch("cnn_bn", 0)
    size, rank = len(inputs) // dist.get_world_size(), dist.get_rank()
    own = slice(rank * size, (rank + 1) * size)
    ours, theirs = networks.build("cnn_bn"), networks.build("cnn_bn")
    make_method("dash", ours, "cnn_bn", where=None).apply(batches=[(inputs[own], labels[own])], loss_fn=networks.loss)
    networks.BatchNorm.synchronized = False
    solo = alone()
    make_method("dash", theirs, "cnn_bn", where=None).apply(
        batches=[(inputs, labels)], loss_fn=networks.loss, group=solo
    )
    networks.loss(theirs(inputs), labels).backward()
    sizes = {name: float(p.grad.norm()) for name, p in theirs.named_parameters() if p.grad is not None}
    rounding = {name for name, norm in sizes.items() if norm <= 1e-12 * max(sizes.values())}
    assert rounding == {"0.bias"}
    left, right = ({name: p.detach() for name, p in model.named_parameters()} for model in (ours, theirs))
    biases = [torch.empty_like(left["0.bias"]) for _ in range(dist.get_world_size())]
    dist.all_gather(biases, left.pop("0.bias"))
    assert torch.equal(biases[0], biases[1])
    del right["0.bias"]
    assert distance(left, right) <= 1e-12


def check_what_is_exchanged_is_as_kept() -> None:
    kept = (ROOT / "benchmarks" / "results" / "ranks.txt").read_text()
    rows = {line.split()[0]: re.sub(r"\s+", " ", line) for line in kept.splitlines() if line}
    counted = {
        (name, setting): share_first(re.sub(r"\s+", " ", ranks.describe(setting, name)), dist.group.WORLD)
        for name in methods.names()
        for setting in ("ddp", "fsdp")
    }
    different = {
        cell: f"{each} is not in {rows[cell[0]]}" for cell, each in counted.items() if each not in rows[cell[0]]
    }
    assert not different, different
