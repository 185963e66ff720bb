"""Small networks of every kind of layer and of weight sharing, each with a batch, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

from pliant.diagnostics.batches import Batch, LossFn

SAMPLES = 7
BATCH = Batch.of(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
IMAGES = Batch.of(torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0)))


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Residual(nn.Module):
    """BatchNorm, an in-place activation, a residual connection, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4)
        self.block = nn.Conv2d(4, 4, 3, padding="same")
        self.head, self.unused = nn.Linear(4, 4), nn.Linear(3, 3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)), inplace=True)
        x = x + functional.relu(self.block(x))
        return self.head(x.mean((2, 3)))


class Language(nn.Module):
    """Attention in both of PyTorch's forms, learned positions, a class token, and an output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(5, 8)
        self.token, self.shift = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.wide = nn.MultiheadAttention(8, 2, kdim=6, vdim=6)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        h = torch.cat([self.token.expand(len(tokens), -1, -1), h], 1) + self.shift
        h = self.layer(h) * self.scale
        h = h + self.cross(h[:, :2], h, h, need_weights=False)[0].mean(1, keepdim=True)
        first = h.transpose(0, 1)  # positions before samples
        h = first + self.wide(first, first[..., :6], first[..., 2:], need_weights=False)[0]
        return h[0] @ self.embed.weight.t()


class Recurrent(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


class Conv1D(nn.Module):
    """A linear layer as GPT-2 has it: `addmm` with a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(*x.shape[:-1], 4).mean(1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 4)),
        (6,),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(), nn.RMSNorm(8), nn.Linear(8, 4)),
        (6,),
    ),
    "positions": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Flatten(), nn.Linear(24, 4)), (3, 6)),
    "weight_norm": (lambda: nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 4)), (6,)),
    "twice": (Twice, (6,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.PReLU(4),
            nn.Conv2d(4, 8, (3, 2), padding="same", groups=2, dilation=2), nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, groups=8, padding_mode="circular", padding=1), nn.Flatten(), nn.Linear(160, 4),
        ),
        (3, 9, 8),
    ),
    "residual": (Residual, (3, 8, 8)),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, stride=2), nn.InstanceNorm1d(4, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
        ),
        (3, 8),
    ),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, (3, 2, 1), stride=(2, 1, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)),
        (2, 4, 5, 4),
    ),
    "language": (Language, (5,)),
    "gpt2_linear": (Conv1D, (3, 6)),
    "recurrent": (Recurrent, (3, 6)),
}  # fmt: skip


def network(name: str, samples: int = SAMPLES, seed: int = 0) -> tuple[nn.Module, Batch, LossFn]:
    """Return a seeded network in eval mode, a batch for it, and a loss."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        build, shape = NETWORKS[name]
        model = build().double().eval()
        inputs: Any = torch.randn(samples, *shape, dtype=torch.float64)
        if name == "language":
            inputs = torch.randint(0, 11, (samples, *shape))
        target = torch.randint(0, 11 if name == "language" else 4, (samples,))
    return model, Batch.of((inputs, target)), cross_entropy


class Between(nn.Module):
    """Two layers and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], into: int = 6) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 6), nn.Linear(into, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))
