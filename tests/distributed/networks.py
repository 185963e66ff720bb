"""The three networks that the tests on several ranks train, and their data."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import scaled_dot_product_attention

BATCH = 12
"""Examples in a batch of all ranks; 1, 2, 3 and 4 ranks get equal shares."""
CLASSES, TOKENS = 5, 4


class BatchNorm(nn.BatchNorm2d):
    """Batch norm over the batch of all ranks; torch's SyncBatchNorm needs a GPU."""

    synchronized = True

    def forward(self, x: Tensor) -> Tensor:
        together = dist.is_initialized() and dist.get_world_size() > 1 and not torch.compiler.is_exporting()
        if not (self.training and self.synchronized and together):
            return super().forward(x)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = all_reduce(x.sum((0, 2, 3))) / count
        squares = all_reduce((x - mean[:, None, None]).square().sum((0, 2, 3)))
        variance = squares / count
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum or 0.1)
            self.running_var.lerp_(squares / (count - 1), self.momentum or 0.1)
        scale = self.weight / (variance + self.eps).sqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class Attention(nn.Module):
    """Causal attention with separate projections, whose heads tensor parallelism can split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 10), nn.ReLU(), nn.Linear(10, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """A small GPT that predicts a class for every token."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(11, width), Block(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(self.tokens(tokens))))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def cnn_bn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), BatchNorm(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, CLASSES),
    )  # fmt: skip


MODELS = {"mlp": mlp, "cnn_bn": cnn_bn, "gpt": GPT}


def build(name: str, seed: int = 0) -> nn.Module:
    """Return a seeded model in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]().double()


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of all ranks at a step."""
    generator = torch.Generator().manual_seed(100 + step)
    if name == "gpt":
        tokens = torch.randint(0, 11, (BATCH, TOKENS), generator=generator)
        return tokens, torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    shape = (BATCH, 7) if name == "mlp" else (BATCH, 1, 6, 6)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over examples and tokens."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())
