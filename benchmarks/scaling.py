"""How the cost of methods and measures grows, measured on one core, and what it is for 70 billion parameters on paper.

Four tables are measured: parameters, layers, units, samples. The last one follows from kept numbers: the bytes that
each method moves per step (`results/operators.txt`) and the bytes that it holds, both per byte of the parameters.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils._pytree import tree_leaves

from benchmarks.steps import training_step
from benchmarks.timing import medians
from pliant import methods
from pliant.diagnostics.batches import Batch
from pliant.diagnostics.per_sample.gradient_gram import gradient_gram

OPERATORS = Path(__file__).parent / "results" / "operators.txt"
SIZES = (10**5, 10**6, 10**7, 10**8)
LARGEST = {"swr": 10**8, "l2_init": 10**8, "weight_clipping": 10**8, "spectral": 10**7, "upgd": 10**7}
"""The methods of the first table, and the most parameters that each is timed with."""
ON_PAPER = (*LARGEST, "l2", "wasserstein", "streaming_ewc", "trac", "hare_tortoise", "nap", "weight_rescaling")

# Llama 3 70B, spread over the ranks by `fully_shard` in float32.
LAYERS, WIDTH, HIDDEN, KEYS, TOKENS = 80, 8192, 28672, 1024, 128256
PARAMETERS = LAYERS * (2 * WIDTH * WIDTH + 2 * KEYS * WIDTH + 3 * HIDDEN * WIDTH) + 2 * TOKENS * WIDTH
RANKS, BATCH = 256, 4_000_000
# NVIDIA H100 SXM, from its data sheet: dense bf16 operations and bytes a second.
OPERATIONS, BANDWIDTH, UTILIZATION = 989e12, 3.35e12, 0.4


def parameters() -> None:
    """Print the time of a method's action per step, in passes over the weights: `mul_` reads and writes each once."""
    print("Parameters: time of the method in a step / one pass of mul_ over the weights, 4 square layers\n")
    print(f"{'':20}" + "".join(f"{count:>10.0e}" for count in SIZES))
    for name, largest in LARGEST.items():
        ratios = [added_passes(name, count) for count in SIZES if count <= largest]
        print(f"{name:20}" + "".join(f"{ratio:10.1f}" for ratio in ratios), flush=True)


def added_passes(name: str, count: int) -> float:
    """Return the time that a method adds to a step of SGD, relative to one pass over the weights."""
    width = round((count / 4) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    weights = [weight.detach() for weight in model.parameters()]
    optimizer, plain = (SGD(model.parameters(), lr=1e-9) for _ in range(2))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    methods.create(name, model, example=torch.zeros(1, width), seed=0).attach(optimizer)
    times = medians(
        {"with": optimizer.step, "without": plain.step, "pass": lambda: torch._foreach_mul_(weights, 1.0)},
        rounds=max(3, min(50, 10**7 // count)),
        warmup=1,
    )
    return (times["with"] - times["without"]) / times["pass"]


def layers() -> None:
    """Print the seconds of SWR's construction, and of torch.export alone."""
    print("\nLayers: seconds to construct SWR for a network of linear layers with ReLU, and of torch.export alone\n")
    print(f"{'layers':>10}{'SWR()':>10}{'export':>10}{'ratio':>10}")
    methods.create("swr", nn.Linear(2, 2), example=torch.zeros(1, 2), lam=1e-3)  # the first one imports torch.export
    for depth in (10, 30, 100, 300):
        parts = [part for _ in range(depth) for part in (nn.Linear(8, 8), nn.ReLU())]
        model, example = nn.Sequential(*parts), torch.randn(2, 8)
        contestants: dict[str, Callable[[], object]] = {
            "swr": lambda model=model, example=example: methods.create("swr", model, example=example, lam=1e-3),
            "export": lambda model=model, example=example: torch.export.export(model, (example,), strict=False),
        }
        times = medians(contestants, rounds=1 if depth > 100 else 3, warmup=0)
        print(
            f"{depth:10}{times['swr']:10.2f}{times['export']:10.2f}{times['swr'] / times['export']:10.1f}", flush=True
        )


def units() -> None:
    """Print the cost of watching units, relative to a step of training."""
    print("\nUnits: training step with / without, one hidden layer, batch 64\n")
    print(f"{'units':>10}{'redo':>10}{'cbp':>10}{'snr':>10}")
    for width in (100, 1000, 10_000):
        batch = torch.randn(64, 100)
        contestants: dict[str, Callable[[], object]] = {}
        for name in (None, "redo", "continual_backprop", "snr"):
            model = nn.Sequential(nn.Linear(100, width), nn.ReLU(), nn.Linear(width, 10))
            step, optimizer = training_step(model, batch)
            if name is not None:
                methods.create(name, model, example=batch[:2], seed=0).attach(optimizer)
            contestants[str(name)] = step
        times = medians(contestants, rounds=15, warmup=2)
        print(f"{width:10}" + "".join(f"{times[name] / times['None']:10.2f}" for name in list(times)[1:]), flush=True)


def samples() -> None:
    """Print the cost of the inner products of per-sample gradients, from which the rank of the Hessian follows."""
    print("\nSamples: inner products of all per-sample gradients / a forward and backward pass on the samples\n")
    print(f"{'samples':>10}{'ratio':>10}")
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def train(x: Tensor, y: Tensor) -> None:
        cross_entropy(model(x), y).backward()

    for count in (64, 128, 256, 512):
        x, y = torch.randn(count, 784), torch.randint(0, 10, (count,))
        times = medians(
            {
                "gram": lambda x=x, y=y: gradient_gram(model, Batch.of((x, y)), cross_entropy),
                "pass": lambda x=x, y=y: train(x, y),
            },
            rounds=3,
            warmup=1,
        )
        print(f"{count:10}{times['gram'] / times['pass']:10.1f}", flush=True)


def moved_bytes() -> dict[str, float]:
    """Return the bytes that each method moves in a step, as a multiple of the parameters' bytes: the kept MLP's."""
    table = OPERATORS.read_text().split("\n\n")[2]
    return {words[0]: float(words[2]) for line in table.splitlines() if len(words := line.split()) == 4}


def held_bytes(name: str) -> float:
    """Return the bytes of a method's state, as a multiple of the parameters' bytes."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    method = methods.create(name, model, example=torch.zeros(1, 256), seed=0)
    state = [leaf.numel() for leaf in tree_leaves(method.state_dict()) if isinstance(leaf, Tensor)]
    return sum(state) / sum(parameter.numel() for parameter in model.parameters())


def seventy_billion() -> None:
    """Print what methods cost for 70 billion parameters, by the bytes that they move on one GPU."""
    share, step = 4 * PARAMETERS / RANKS, 6 * PARAMETERS * BATCH / (RANKS * OPERATIONS * UTILIZATION)
    print(f"\nOn paper: N = {PARAMETERS:.3g} in float32 over {RANKS} H100, {share / 1e9:.2g} GB of weights on each")
    print(f"A step on {BATCH / 1e6:g} million tokens: 6N operations each at {UTILIZATION:.0%} of peak, {step:.1f} s\n")
    print(f"{'':20}{'held GB':>10}{'moved GB':>10}{'ms':>10}{'of a step':>12}")
    for name, moved in moved_bytes().items():
        if name in ON_PAPER:
            seconds = moved * share / BANDWIDTH
            held = held_bytes(name) * share / 1e9
            print(f"{name:20}{held:10.2f}{moved * share / 1e9:10.1f}{1e3 * seconds:10.1f}{seconds / step:12.4%}")


def main() -> None:
    """Print the tables."""
    torch.manual_seed(0)
    parameters()
    layers()
    units()
    samples()
    seventy_billion()
