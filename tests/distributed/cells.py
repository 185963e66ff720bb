"""Train every method in every cell (setting, optimizer, network) on the ranks of one launch.

    python -m tests.distributed.cells SETTING RANK WORLD FOLDER [few] [METHOD ...]

Each rank writes what it ends with to FOLDER/SETTING.WORLD.RANK.pt. One rank without a setting ("single") is the
reference.
"""

import io
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from pliant import Method, methods
from tests.distributed import networks
from tests.distributed.launching import joined

STEPS, NEW_DATA_AT = 4, (1, 3)

EAGER: dict[str, dict[str, Any]] = {
    "swr": {"lam": 0.1},
    "l2": {"lam": 1e-2},
    "l2_init": {"lam": 1e-2},
    "weight_clipping": {"kappa": 0.5},
    "hare_tortoise": {"every": 2, "beta": 0.5},
    "redo": {"tau": 0.8, "every": 2},
    "continual_backprop": {"rate": 0.2, "maturity": 1},
    "spectral": {"lam": 1e-2},
    "spectral_norm": {"lam": 1e-2},
    "parseval": {"lam": 1e-2},
    "wasserstein": {"lam": 1e-2},
    "feature_rank": {"lam": 1e-2},
    # Gradients of a bias before batch norm and of the keys' bias are rounding, and so are DASH's directions.
    "dash": {"where": lambda name, p: not name.endswith(("0.bias", "k.bias"))},
    "regrama": {"tau": 0.8, "every": 2},
    "snr": {"longest": 2},
    "selective_reinit": {"fraction": 0.2, "every": 2, "beta": 0.5},
    "trac": {"scale": 1e-2},
    "infer": {"lam": 1e-2},
}
"""Settings that make a method act within a few steps, strongly enough to be seen."""


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    # The gradient of a bias before batch norm is zero up to rounding; a small eps would turn that into steps.
    return SGD(model.parameters(), lr=0.1, momentum=0.9) if name == "sgd" else AdamW(
        model.parameters(), lr=1e-2, eps=1e-4
    )  # fmt: skip


def make_method(name: str, model: nn.Module, network: str, **settings: Any) -> Method:
    example = networks.batch(network, 0)[0][:2]
    if name == "plasticity_injection" and network == "gpt":
        settings |= {"head": "block.mlp"}
    return methods.create(name, model, example=example, **{"seed": 7, **EAGER.get(name, {}), **settings})


def share(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a batch; under tensor parallelism, all of it."""
    if not dist.is_initialized() or not networks.BatchNorm.synchronized:
        return batch
    rank, world = dist.get_rank(), dist.get_world_size()
    size = networks.BATCH // world
    return batch[0][rank * size : (rank + 1) * size], batch[1][rank * size : (rank + 1) * size]


class Run:
    """A method, an optimizer and a network on the ranks of a setting.

    The method is made before the model is wrapped or sharded with SGD, and afterwards with AdamW.
    """

    def __init__(self, setting: str, method: str, optimizer: str, network: str, **settings: Any) -> None:
        self.network = network
        networks.BatchNorm.synchronized = setting != "tp"
        self.inner = networks.build(network)
        early = optimizer == "sgd" or methods.info(method).kind == "architecture"
        made = make_method(method, self.inner, network, **settings) if early else None
        self.model = WRAPPERS[setting](self.inner)
        self.method = made or make_method(method, self.model, network, **settings)
        self.optimizer = make_optimizer(optimizer, self.inner)

    def train(self, steps: range) -> None:
        """Train on one batch a step; a reinitializer acts when data is new."""
        for step in steps:
            inputs, labels = share(networks.batch(self.network, step))
            if step in NEW_DATA_AT and self.method.kind == "reinitializer":
                self.method.apply(self.optimizer, batches=[(inputs, labels)], loss_fn=networks.loss)
            self.optimizer.zero_grad()
            networks.loss(self.model(inputs), labels).backward()
            self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters and buffers."""
        state = self.inner.state_dict()
        return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in state.items()}

    def shards(self) -> list[torch.Tensor]:
        """Return what this rank holds of all parameters and buffers."""
        state = self.inner.state_dict()
        return [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]

    def save(self) -> dict[str, Any]:
        """Return the state of the model, the optimizer and the method, written and read again."""
        parts = {"inner": self.inner, "optimizer": self.optimizer, "method": self.method}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        file.seek(0)
        saved: dict[str, Any] = torch.load(file, weights_only=False)
        return saved

    def load(self, saved: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        for name, state in saved.items():
            getattr(self, name).load_state_dict(state)


def shard_fully(model: nn.Module) -> nn.Module:
    """Shard the first linear layer apart from the rest; 3 ranks get uneven and empty shards."""
    fully_shard(next(module for module in model.modules() if isinstance(module, nn.Linear)))
    return fully_shard(model)


def parallelize(model: nn.Module) -> nn.Module:
    """Split pairs of linear layers over the ranks, by columns and by rows."""
    columns = ("0", "5", "block.mlp.0", "block.attention.q", "block.attention.k", "block.attention.v")
    rows = ("2", "7", "block.mlp.2", "block.attention.out")
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    plan = {name: ColwiseParallel() for name in linear if name in columns}
    plan |= {name: RowwiseParallel() for name in linear if name in rows}
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def run(setting: str, method: str, optimizer: str, network: str, **settings: Any) -> dict[str, Any]:
    """Train, and train again from a state that was saved halfway; return what both end with."""
    first = Run(setting, method, optimizer, network, **settings)
    first.method.attach(first.optimizer)
    first.train(range(STEPS // 2))
    saved = first.save()
    first.train(range(STEPS // 2, STEPS))
    second = Run(setting, method, optimizer, network, **settings)
    second.load(saved)
    second.method.attach(second.optimizer)
    second.train(range(STEPS // 2, STEPS))
    receipt = first.method.receipt
    acted = receipt is not None and receipt.entries > 0
    pairs = zip(first.shards(), second.shards(), strict=True)
    return {"final": first.values(), "resumed": all(torch.equal(*pair) for pair in pairs), "acted": acted}


def replicate(model: nn.Module) -> nn.Module:
    """Wrap a model in DDP, whose gradients are summed in the order of the ranks.

    Gloo's order depends on the place of an entry in its bucket, and DDP fills the buckets anew after the first step: on
    three ranks, resumed runs would differ by rounding.
    """

    def sum_in_order(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        own = bucket.buffer()
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        summed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        summed.set_result(torch.stack(gathered).sum(0) / len(gathered))
        return summed

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, sum_in_order)
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "single": lambda model: model,
    "ddp": replicate,
    "fsdp": shard_fully,
    "tp": parallelize,
}


def cells(*chosen: str) -> list[tuple[str, str, str]]:
    """Return the cells of the chosen methods, all if none; "few" stands for one cell of each method."""
    cells = [
        [(method, optimizer, network) for optimizer in ("sgd", "adamw") for network in networks.MODELS]
        for method in methods.names()
        if set(chosen) <= {"few"} or method in chosen
    ]
    if "few" in chosen:
        return [own[place % len(own)] for place, own in enumerate(cells)]
    return [cell for own in cells for cell in own]


def main(setting: str, rank: int, world: int, folder: str, *chosen: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(rank, world, Path(folder) / f"{setting}.{world}.rendezvous"):
        results: dict[tuple[str, str, str], dict[str, Any]] = {}
        for cell in cells(*chosen):
            torch.manual_seed(1000 + rank)
            try:
                results[cell] = run(setting, *cell)
            except Exception as error:
                results[cell] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        torch.save(results, Path(folder) / f"{setting}.{world}.{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
