"""Random networks: whatever is built, a rescaling is proportional. There is no third case, silent drift."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pliant.anatomy import analyze

WIDTH = 4
UNARY = {
    "relu": F.relu,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "abs": torch.abs,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-300),
    "pool": lambda x: F.avg_pool1d(x.unsqueeze(1), 3, 1, 1).squeeze(1),
    "roll": lambda x: x.roll(1, -1),
    "dropout": lambda x: F.dropout(x, 0.2),
    "detach": lambda x: x.detach(),
    "mean": lambda x: x.mean(-1, keepdim=True).expand_as(x),
    "gate": lambda x: x * torch.sigmoid(x.amax(-1, keepdim=True)),
}
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "unbiased": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "layer_norm": lambda: nn.LayerNorm(WIDTH, eps=1e-300),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH, eps=1e-300),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, eps=1e-300, elementwise_affine=False),
    "prelu": nn.PReLU,
}
BINARY = ("add", "mul", "maximum", "concat", "split", "attend", "cross")

step = st.one_of(
    st.tuples(st.sampled_from([*UNARY, *LAYERS, "position", "shared"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(BINARY), st.integers(0, 9), st.integers(0, 9)),
)


class Network(nn.Module):
    """Runs a list of steps; each reads results of earlier ones and appends its own."""

    def __init__(self, steps: list[tuple[str, ...]]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleDict()
        self.shifts = nn.ParameterDict()
        for number, (name, *_) in enumerate(steps):
            if name in LAYERS:
                self.layers[str(number)] = LAYERS[name]()
            elif name in ("concat", "cross"):
                self.layers[str(number)] = nn.Linear(2 * WIDTH if name == "concat" else WIDTH, WIDTH)
            elif name in ("split", "attend"):
                self.layers[str(number)] = nn.Linear(WIDTH, 2 * WIDTH if name == "split" else 3 * WIDTH)
            elif name == "position":
                self.shifts[str(number)] = nn.Parameter(torch.randn(WIDTH))
        if any(name == "shared" for name, *_ in steps):
            self.layers["shared"] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [x]
        for number, (name, *sources) in enumerate(self.steps):
            operands = [found[-1 - source % len(found)] for source in sources]
            found.append(self.run(str(number), name, *operands))
        return found[-1], found[len(found) // 2]

    def run(self, number: str, name: str, x: Tensor, y: Tensor | None = None) -> Tensor:
        if name in UNARY:
            return UNARY[name](x)
        if name == "shared":
            return self.layers["shared"](x)
        if name == "position":
            return x + self.shifts[number]
        if name in LAYERS:
            return self.layers[number](x)
        if name == "add":
            return x + y
        if name == "mul":
            return x * y
        if name == "maximum":
            return torch.maximum(x, y)
        if name == "concat":
            return self.layers[number](torch.cat([x, y], dim=-1))
        if name == "split":
            left, right = self.layers[number](x).chunk(2, dim=-1)
            return left * y + right
        if name == "attend":
            q, k, v = self.layers[number](torch.stack([x, y], 1)).split(WIDTH, dim=-1)
            return F.scaled_dot_product_attention(q, k, v)[:, 0]
        return (x.unsqueeze(-1) @ self.layers[number](y).unsqueeze(1)).sum(1)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(step, min_size=3, max_size=12))
def test_random_networks_are_proportional(steps: list[tuple[str, ...]]) -> None:
    check_proportional(steps)


@pytest.mark.long
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(step, min_size=3, max_size=12))
def test_many_random_networks_are_proportional(steps: list[tuple[str, ...]]) -> None:
    check_proportional(steps)


def check_proportional(steps: list[tuple[str, ...]]) -> None:
    torch.manual_seed(0)
    model = Network(steps).double()
    example = torch.randn(5, WIDTH, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    graph = analyze(model, example, strict=False)
    wishes = {str(block): float((0.5 * torch.randn(())).exp()) for block in graph.plan().wishes}

    def run(training: bool) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.no_grad():
            return copy.deepcopy(model).train(training)(example)

    before = [run(training) for training in (True, False)]
    rescaling = graph.rescale_(wishes)
    for training, outputs in zip((True, False), before, strict=True):
        for old, new, factor in zip(outputs, run(training), rescaling.outputs.values(), strict=True):
            assert (new - factor * old).abs().max() <= 1e-9 * (factor * old).abs().max()
