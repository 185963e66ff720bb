"""Cost of FIRE on whole models: against the paper's loop, SVD, and an epoch of training."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import Adam

from benchmarks.timing import medians, row
from pliant import FIRE
from pliant.anatomy.parameters import find_matrices
from pliant.methods.fire import isometric_scale
from pliant.models import create


class Block(nn.Module):
    """A block with the shapes of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        parts = self.c_attn(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.c_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT-2 of 124 M parameters, its output layer tied to the embedding."""

    def __init__(self, width: int = 768, depth: int = 12, vocabulary: int = 50257) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, 12) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the next token's logits."""
        return self.head(self.norm(self.blocks(self.embed(x) + self.place.weight[: x.shape[1]])))


def each_matrix(model: nn.Module, orthogonalize: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """Return a function that rewrites every matrix of the model, one at a time."""
    views = [m.view(model.get_parameter(m.parameter).detach()) for m in find_matrices(model)]

    def run() -> None:
        for view in views:
            for index in product(*map(range, view.shape[:-2])):
                slice_ = view[index]
                slice_.copy_(isometric_scale(view.shape) * orthogonalize(slice_))

    return run


def on_the_same_weights(model: nn.Module, act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that first restores the weights, since orthogonal matrices make everything faster."""
    parameters: list[Tensor] = [p.detach() for p in model.parameters()]
    initial = [p.clone() for p in parameters]

    def run() -> None:
        torch._foreach_copy_(parameters, initial)
        act()

    return run


def naive_loop(iterations: int) -> Callable[[Tensor], Tensor]:
    def orthogonalize(matrix: Tensor) -> Tensor:
        x = matrix.T if matrix.shape[1] > matrix.shape[0] else matrix
        x = x / x.norm()
        for _ in range(iterations):
            x = 1.5 * x - 0.5 * x @ (x.T @ x)
        return x.T if matrix.shape[1] > matrix.shape[0] else x

    return orthogonalize


def svd(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def training_step(model: nn.Module, batch: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = Adam(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch).flatten(0, -2), labels).backward()
        optimizer.step()

    return step


def whole_model(
    what: str, build: Callable[[], nn.Module], iterations: int, batch: Tensor, classes: int, epoch: int, rounds: int
) -> None:
    labels = torch.randint(0, classes, (batch.numel() if batch.dtype == torch.int64 else len(batch),))
    model = build()
    acts = {
        "fire": FIRE(model, layers="all", iterations=iterations).apply,
        "exact": FIRE(model, layers="all", polynomial="exact").apply,
        "loop": each_matrix(model, naive_loop(iterations)),
        "svd": each_matrix(model, svd),
        "step": training_step(model, batch, labels),
    }
    contestants = {name: on_the_same_weights(model, act) for name, act in acts.items()}
    seconds = medians(contestants, rounds=rounds, warmup=1)
    faster = min(seconds["loop"], seconds["svd"])
    row(f"{what}: FIRE, {iterations} cubic iterations / faster of loop and SVD", seconds["fire"] / faster, "≤ 0.7")
    row(f"{what}: the same / the paper's loop", seconds["fire"] / seconds["loop"], "")
    row(f"{what}: the same / SVD", seconds["fire"] / seconds["svd"], "")
    row(f"{what}: FIRE, exact polar factor / SVD", seconds["exact"] / seconds["svd"], "")
    share = seconds["fire"] / (seconds["step"] * epoch / len(labels))
    row(f"{what}: FIRE / one epoch of {epoch:,} (from one step of {len(labels)})", share, "< 0.01")


def main() -> None:
    """Print the ratios of the design's limits."""
    torch.manual_seed(0)
    images = torch.randn(32, 3, 32, 32)
    whole_model("ResNet-18", lambda: create("resnet18", (3, 32, 32), 10), 10, images, 10, 50_000, rounds=5)
    tokens = torch.randint(0, 50257, (1, 128))
    whole_model("GPT 124 M", GPT, 5, tokens, 50257, 100_000_000, rounds=3)
