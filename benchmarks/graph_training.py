"""Train a residual network and a vision transformer with and without SWR: norms, bounds and drift.

`python -m benchmarks.graph_training [resnet18] [vit]` prints the tables and keeps them in
`results/graph_training_NAME.txt`.

The first table has one line per weight: the growth of its norm without and with SWR, and for free weights the bound.
With δ the largest growth of the norm in one optimizer step, ‖W_t‖ ≤ ‖W₀‖ + δ/λ (docs/proportionality.md). Theorem 2 of
the paper has √B instead of δ, with B the largest growth of the squared norm; √B is never smaller.

The second table rescales the trained network without training and shows how far its outputs drift from a multiple of
the original outputs: with the scale graph, and with scaling layer by layer, which ignores residual connections.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from benchmarks.__main__ import Tee
from pliant import SWR
from pliant._seeding import permutation
from pliant.anatomy import ScaleGraph, analyze
from pliant.anatomy.chain import CHAIN_LAYERS
from pliant.anatomy.layers import called_layers
from pliant.anatomy.plan import BlockTensors
from pliant.data import Examples, load
from pliant.models import create

LAM = 1e-2
STEPS = 750
BATCH = 64


def batches(examples: Examples) -> Iterator[tuple[Tensor, Tensor]]:
    order = permutation(len(examples), "graph_training")
    for start in range(0, STEPS * BATCH, BATCH):
        yield examples.batch(order[start : start + BATCH])


def train(
    model: nn.Module, examples: Examples, watched: BlockTensors, swr: SWR | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Train for less than an epoch; return the last norms, and the largest growth per step of norms and squares."""
    optimizer = Adam(model.parameters(), lr=1e-3)
    growth = squared = torch.zeros(len(watched.get()))
    for x, y in batches(examples):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        before = norms(watched)
        optimizer.step()
        after = norms(watched)
        growth = torch.maximum(growth, after - before)
        squared = torch.maximum(squared, after**2 - before**2)
        if swr is not None:
            swr.step()
    return norms(watched), growth, squared


@torch.no_grad()
def norms(tensors: BlockTensors) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors.get()))


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    model = copy.deepcopy(model).eval()
    x, y = examples.batch(torch.arange(2000))
    return float((model(x).argmax(-1) == y).float().mean())


def is_free(graph: ScaleGraph, position: int) -> bool:
    """Return whether a block gets exactly the factor it wants, independent of other blocks."""
    plan = graph.plan()
    row = plan.matrix[plan.targets.index(plan.wishes[position])]
    expected = torch.zeros_like(row)
    expected[position] = 1
    return torch.equal(row, expected)


def compare_norms(what: str, build: Callable[[], nn.Module], examples: Examples, test: Examples) -> nn.Module:
    """Train with and without SWR, and print one line per weight."""
    vanilla, rescaled = build(), build()
    graph = analyze(rescaled, examples.batch(torch.arange(4))[0])
    blocks = graph.plan().wishes
    watched = [BlockTensors(model, blocks) for model in (vanilla, rescaled)]
    initial = norms(watched[0])
    plain, _, _ = train(vanilla, examples, watched[0], None)
    swr = SWR(rescaled, examples.batch(torch.arange(4))[0], lam=LAM)
    pulled, growth, squared = train(rescaled, examples, watched[1], swr)
    free = [is_free(graph, position) for position in range(len(blocks))]
    print(f"## {what}: {STEPS} steps of Adam, lr 1e-3, batch {BATCH}, λ = {LAM}\n")
    print(f"{'weight':<44} {'‖W₀‖':>8} {'vanilla':>9} {'SWR':>9}   bounds: ‖W₀‖+δ/λ, ‖W₀‖+√B/λ")
    for i, block in enumerate(blocks):
        bounds = (initial[i] + growth[i] / LAM, initial[i] + squared[i] ** 0.5 / LAM)
        kept = "kept" if pulled[i] <= bounds[0] and pulled[i] <= bounds[1] else "BROKEN"
        state = f"{bounds[0]:8.2f} {bounds[1]:8.1f}  {kept}" if free[i] else "tied"
        print(f"{block!s:<44} {initial[i]:8.3f} {plain[i] / initial[i]:8.3f}x {pulled[i] / initial[i]:8.3f}x   {state}")
    for name, chosen in (("free", free), ("tied", [not f for f in free])):
        mask = torch.tensor(chosen)
        if mask.any():
            grown = [(end[mask] / initial[mask]).log().mean().exp().item() for end in (plain, pulled)]
            print(f"geometric mean over {int(mask.sum())} {name} weights: vanilla {grown[0]:.3f}x, SWR {grown[1]:.3f}x")
    print(f"test accuracy: vanilla {accuracy(vanilla, test):.4f}, SWR {accuracy(rescaled, test):.4f}\n")
    return vanilla


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).eval().double()(x.double())


def compare_drift(what: str, build: Callable[[], nn.Module], trained: nn.Module, test: Examples) -> None:
    """Rescale a trained network repeatedly without training, and print how far its outputs drift."""
    x = test.batch(torch.arange(256))[0]
    before = outputs(trained, x)
    print(f"## {what}: rescaling alone, after training without it, λ = {LAM}")
    print("‖f' − kf‖/‖kf‖ with the best k, and the predictions that changed, of 256 in eval mode\n")
    print(f"{'rescalings':>10} {'scale graph':>24} {'layer by layer':>24}")
    models = {}
    layers = [layer.name for layer in called_layers(trained, x[:4]) if isinstance(layer.module, CHAIN_LAYERS)]
    for order in ("graph", layers):
        model = build()
        swr = SWR(model, x[:4], lam=LAM, plan={"order": order})
        model.load_state_dict(trained.state_dict())
        models[str(order)] = (model, swr)
    for count in range(1, 201):
        cells = []
        for model, swr in models.values():
            swr.step()
            if count in (1, 2, 5, 10, 20, 50, 100, 200):
                after = outputs(model, x)
                factor = (after * before).sum() / (before * before).sum()
                drift = ((after - factor * before).norm() / (factor * before).norm()).item()
                changed = int((after.argmax(-1) != before.argmax(-1)).sum())
                cells.append(f"{drift:14.1e} {changed:6d}/256")
        if cells:
            print(f"{count:>10} " + " ".join(f"{cell:>24}" for cell in cells))
    print()


CASES: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "resnet18": ("ResNet-18, width 8, CIFAR-10", "cifar10", "resnet18", {"width": 8}),
    "vit": ("ViT, width 48, depth 4, MNIST", "mnist", "vit_tiny", {"width": 48, "depth": 4, "patch": 7}),
}


def run(case: str) -> None:
    """Print the tables of one network."""
    what, data, model, options = CASES[case]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dataset = load(data)
    build = partial(create, model, dataset.shape, len(dataset.classes), **options)
    trained = compare_norms(what, build, dataset.train, dataset.test)
    compare_drift(what, build, trained, dataset.test)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        kept = Tee()
        with contextlib.redirect_stdout(kept):
            print(f"# python -m benchmarks.graph_training {chosen}   (torch {torch.__version__}, one thread)\n")
            run(chosen)
        (Path(__file__).parent / "results" / f"graph_training_{chosen}.txt").write_text(kept.getvalue())
