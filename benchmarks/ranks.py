"""What methods add to a training step on two gloo ranks: collectives, bytes and time, under DDP and fully_shard.

`python -m benchmarks ranks` prints a table with one line per method and keeps it in `results/ranks.txt`. Only what
Pliant itself exchanges is counted, per step of the optimizer or, for methods that wait for new data, per `apply()`,
without the checks of `attach()` and `apply()`. Bytes are those that one rank contributes. The network is an MLP with
0.4 million parameters, trained by AdamW on batches of 64. Steps with and without the method take turns. The ratio is
that of the median processor times of a rank's step, which depend less on other load than the time on the clock.
"""

import itertools
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from pliant import methods
from pliant.distributed import ranks, shards

WIDTHS = (256, 512, 512, 10)
WARM_UP, STEPS = 4, 20
RANKS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "feature_rank": {"lam": 1e-4},
    "redo": {"every": 1},
    "regrama": {"every": 1},
    "selective_reinit": {"every": 1},
    "continual_backprop": {"rate": 1e-3, "maturity": 1},
    "hare_tortoise": {"every": 4},
}
"""Settings with which a method acts in a short run."""


class Counter:
    """Stands in for `torch.distributed` inside the modules of `pliant.distributed`, and counts what is exchanged."""

    def __init__(self) -> None:
        self.collectives = self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(dist, name)
        if name not in ("all_reduce", "all_gather", "all_to_all_single", "broadcast"):
            return function

        def counted(*args: Any, **kwargs: Any) -> Any:
            sent: Tensor = args[1] if name in ("all_gather", "all_to_all_single") else args[0]
            self.collectives += 1
            self.bytes += sent.numel() * sent.element_size()
            return function(*args, **kwargs)

        return counted


class Training:
    """A network on one of the ranks, with or without a method."""

    def __init__(self, setting: str, name: str | None) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(WIDTHS):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.model: nn.Module = nn.Sequential(*layers[:-1])
        example = torch.randn(2, WIDTHS[0])
        created = None
        if name is not None:
            created = methods.create(name, self.model, example=example, seed=0, **SETTINGS.get(name, {}))
        self.wrapped = DistributedDataParallel(self.model) if setting == "ddp" else fully_shard(self.model)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-3)
        self.method = created
        self.times: list[float] = []
        if self.method is not None:
            self.method.attach(self.optimizer)
        torch.manual_seed(1 + dist.get_rank())
        self.batch = torch.randn(64, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (64,))

    def step(self) -> None:
        """Train on the batch once, and keep the processor time."""
        dist.barrier()
        start = time.process_time()
        self.optimizer.zero_grad()
        cross_entropy(self.wrapped(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()
        self.times.append(time.process_time() - start)


def count(treated: Training, steps: int) -> tuple[float, float]:
    """Return the collectives and the bytes of a method for each action: for each step, or for one `apply()`."""
    assert treated.method is not None
    counter = Counter()
    ranks.dist = shards.dist = counter  # type: ignore[assignment]
    try:
        for _ in range(steps):
            treated.step()
        if treated.method.kind == "reinitializer":
            counter.collectives = counter.bytes = 0
            treated.method.apply(treated.optimizer, batches=[treated.batch], loss_fn=cross_entropy)
            return counter.collectives, counter.bytes
    finally:
        ranks.dist = shards.dist = dist
    return counter.collectives / steps, counter.bytes / steps


def time_ratio(setting: str, name: str) -> float:
    """Return the ratio of the median step times with and without a method, by turns, after a few steps."""
    plain, treated = Training(setting, None), Training(setting, name)
    for _ in range(WARM_UP + STEPS):
        plain.step()
        treated.step()
    return statistics.median(treated.times[WARM_UP:]) / statistics.median(plain.times[WARM_UP:])


def describe(setting: str, name: str) -> str:
    """Return the columns of collectives and bytes of a method."""
    collectives, sent = count(Training(setting, name), WARM_UP)
    return f"{collectives:11.2f} {sent:9.0f}"


def run(rank: int, place: str) -> None:
    """Measure all methods on one rank; the first one prints."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    table = Path(place.removeprefix("file://") + ".txt")
    for name in methods.names():
        waits = methods.info(name).kind == "reinitializer"  # and does nothing at steps
        cells = [
            f"{describe(setting, name)} {'' if waits else f'{time_ratio(setting, name):.2f}':>6}"
            for setting in ("ddp", "fsdp")
        ]
        line = f"{name:22} {'apply' if waits else 'step':6} {'  '.join(cells)}"
        if rank == 0:
            with table.open("a") as file:
                print(line, file=file)
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{folder}/ranks"
        mp.spawn(run, args=(place,), nprocs=RANKS)
        head = "collectives     bytes  ratio"
        print(f"{'':29} {'DDP':^28}  {'fully_shard':^28}")
        print(f"{'method':22} {'per':6} {head}  {head}")
        print((Path(folder) / "ranks.txt").read_text(), end="")


if __name__ == "__main__":
    main()
