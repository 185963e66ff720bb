import copy
import math
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

from pliant import diagnostics
from pliant.diagnostics.balance import balance, balancedness
from pliant.diagnostics.batches import Batch
from tests import zoo


def layers(sizes: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, a, generator=generator, dtype=torch.float64) for a, b in pairwise(sizes)]


def norm(weights: list[Tensor], p: float, q: float) -> Tensor:
    """‖W‖_{p,q} of the whole network, from the formula."""
    rows = torch.cat([w.flatten(1).abs().pow(p).sum(1).pow(q / p) for w in weights])
    return rows.sum().pow(1 / q)


def rescaled(weights: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    out = []
    for layer, w in enumerate(weights):
        if layer < len(scales):
            w = w * scales[layer].reshape(-1, *[1] * (w.ndim - 1))
        if layer > 0:
            before = scales[layer - 1].repeat_interleave(w.shape[1] // len(scales[layer - 1]))
            w = w / before.reshape(1, -1, *[1] * (w.ndim - 2))
        out.append(w)
    return out


def least_by_lbfgs(weights: list[Tensor], p: float, q: float) -> float:
    """The minimum found by a general optimizer on the logarithms of the factors, where the problem is convex."""
    logs = [torch.zeros(len(w), dtype=torch.float64, requires_grad=True) for w in weights[:-1]]
    optimizer = torch.optim.LBFGS(logs, max_iter=2000, tolerance_grad=1e-13, tolerance_change=1e-16, history_size=50,
                                  line_search_fn="strong_wolfe")  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = norm(rescaled(weights, [log.exp() for log in logs]), p, q)
        value.backward()
        return value

    optimizer.step(closure)
    return float(closure().detach())


@pytest.mark.parametrize(("p", "q"), [(2, 2), (1, 1), (1, 2), (2, 1), (3, 1.5), (2, 8)])
def test_minimum_is_the_one_of_an_independent_optimizer(p: float, q: float) -> None:
    weights = layers([5, 8, 6, 3])
    found = balance(weights, p, q)
    assert found.norm == pytest.approx(float(norm(weights, p, q)))
    assert found.least == pytest.approx(least_by_lbfgs(weights, p, q), rel=1e-9)
    assert found.least == pytest.approx(float(norm(rescaled(weights, list(found.scales)), p, q)), rel=1e-12)
    assert found.ratio > 1


def test_convolutions_and_a_flattened_head_reach_the_same_minimum() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(4, 3, 3, 3), (6, 4, 3, 3), (5, 24)]
    ]
    found = balance(weights)
    assert found.least == pytest.approx(least_by_lbfgs(weights, 2, 2), rel=1e-9)


def test_unbalanced_by_hand() -> None:
    """W₁ = 4, W₂ = 1: a = ½ balances them, √(2² + 2²) against √(4² + 1²)."""
    found = balance([torch.tensor([[4.0]]), torch.tensor([[1.0]])])
    assert found.least == pytest.approx(math.sqrt(8))
    assert found.ratio == pytest.approx(math.sqrt(17 / 8))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(1, 3), st.floats(1, 3))
def test_balance_depends_on_the_function_alone_and_stays(seed: int, p: float, q: float) -> None:
    weights = layers([3, 4, 4, 2], seed)
    generator = torch.Generator().manual_seed(seed + 1)
    scales = [torch.rand(4, generator=generator, dtype=torch.float64) * 4 + 0.2 for _ in range(2)]
    ours, theirs = balance(weights, p, q), balance(rescaled(weights, scales), p, q)
    assert ours.least == pytest.approx(theirs.least, rel=1e-9)
    again = balance(rescaled(weights, list(ours.scales)), p, q)
    assert again.ratio == pytest.approx(1, abs=1e-9)


def test_the_papers_algorithm_falls_with_every_update_towards_our_minimum() -> None:
    weights = layers([6, 9, 9, 4])
    values = [float(norm(rescaled(weights, algorithm_1(weights, updates)), 2, 2)) for updates in range(12)]
    assert all(later < earlier for earlier, later in pairwise(values))
    many = algorithm_1(weights, 400)
    for ours, theirs in zip(balance(weights).scales, many, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def algorithm_1(weights: list[Tensor], updates: int) -> list[Tensor]:
    """The factors after some updates of Saul's algorithm 1 for p = q = 2, written from the paper."""
    scales = [torch.ones(len(w), dtype=torch.float64) for w in weights[:-1]]
    for _ in range(updates):
        current = rescaled(weights, scales)
        shares = [w**2 / sum(v.square().sum() for v in current) for w in current]
        scales = [
            scale * (shares[layer + 1].sum(0) / shares[layer].sum(1)) ** (1 / 8) for layer, scale in enumerate(scales)
        ]
    return scales


def test_units_without_incoming_or_outgoing_weights_are_left_out() -> None:
    weights = layers([3, 4, 2])
    weights[0][1] = 0
    weights[1][:, 2] = 0
    kept = [weights[0][[0, 3]], weights[1][:, [0, 3]]]
    assert balance(weights).least == pytest.approx(balance(kept).least, rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_model_keeps_its_function_and_is_left_alone(name: str) -> None:
    model = zoo.build(name)
    before = copy.deepcopy(model.state_dict())
    found = balancedness(model, Batch.of(zoo.batch(name)))
    assert found.ratio > 1
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())


def test_models_that_are_not_homogeneous_chains_are_refused() -> None:
    with pytest.raises(ValueError, match="is a BatchNorm2d"):
        balancedness(zoo.build("cnn_bn"), Batch.of(zoo.batch("cnn_bn")))
    tanh = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
    with pytest.raises(ValueError, match="homogeneous activations"):
        balancedness(tanh, Batch.of(zoo.batch("mlp")))
    shared = nn.Linear(12, 12)
    with pytest.raises(ValueError, match="each layer is called once"):
        balancedness(nn.Sequential(shared, nn.ReLU(), shared), Batch.of(zoo.batch("mlp")))


@pytest.mark.parametrize("inner", [False, True])
def test_a_network_with_shortcuts_is_not_a_chain(inner: bool) -> None:
    """Its layers could be scaled alike without a change of the function, but not each on its own."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return self.c(h + (self.b(h) if inner else torch.relu(self.b(h))))

    with pytest.raises(ValueError, match="homogeneous activations"):
        balancedness(Residual(), Batch.of(zoo.batch("mlp")))


def test_a_balanced_network_must_be_homogeneous_all_the_same() -> None:
    tanh = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    for parameter in tanh.parameters():
        nn.init.ones_(parameter)
    assert balance([tanh[0].weight, tanh[2].weight]).scales[0].equal(torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="homogeneous activations"):
        balancedness(tanh, Batch.of(torch.ones(2, 1)))


class Pixels(nn.Sequential):
    """Takes bytes, and makes them float32 itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 255)


def test_a_network_of_one_precision_is_measured_in_that_precision() -> None:
    model = Pixels(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randint(0, 256, (8, 1, 8, 8), dtype=torch.uint8)
    weights = [model[index].weight for index in (0, 3, 5)]
    assert balancedness(model, Batch.of(x)).ratio == balance(weights).ratio
    model[4] = nn.GELU()
    with pytest.raises(ValueError, match="homogeneous activations"):
        balancedness(model, Batch.of(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision_tells_a_homogeneous_chain(dtype: torch.dtype) -> None:
    x = zoo.batch("mlp")[0].to(dtype)
    assert balancedness(zoo.build("mlp").to(dtype), Batch.of(x)).ratio > 1
    with pytest.raises(ValueError, match="homogeneous activations"):
        balancedness(nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 5)).to(dtype), Batch.of(x))


COMPUTED = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "old weight norm": nn.utils.weight_norm,
    "weight norm": nn.utils.parametrizations.weight_norm,
    "old spectral norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_weights_that_are_computed_are_refused_and_the_diagnosis_goes_on(kind: str) -> None:
    model = zoo.build("mlp")
    COMPUTED[kind](model[0])
    with pytest.raises(ValueError, match="balancedness needs weights that are parameters, but '0' computes its own"):
        balancedness(model, Batch.of(zoo.batch("mlp")))
    found = diagnostics.measure(model, zoo.batch("mlp"), nn.functional.cross_entropy)
    assert "computes its own" in found.skipped["balancedness"]
    assert found.values["hessian_rank"] > 0


def test_transposed_convolutions_are_refused() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(50, 3))
    with pytest.raises(ValueError, match="'0' is a ConvTranspose2d"):
        balancedness(model, Batch.of(torch.rand(3, 1, 4, 4)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["input", "bias"])
def test_outputs_that_are_not_finite_prove_nothing(where: str, bad: float) -> None:
    model, (x, _) = zoo.build("mlp"), zoo.batch("mlp")
    with torch.no_grad():
        (x if where == "input" else model[2].bias).view(-1)[0] = bad
    with pytest.raises(ValueError, match="proved on the outputs, which must be tensors of finite numbers"):
        balancedness(model, Batch.of(x))


def test_outputs_that_cannot_be_seen_prove_nothing() -> None:
    class Hidden(nn.Sequential):
        def forward(self, x: Tensor) -> object:
            return iter([super().forward(x)])

    with pytest.raises(ValueError, match="proved on the outputs"):
        balancedness(Hidden(nn.Linear(12, 5)), Batch.of(zoo.batch("mlp")))


@pytest.mark.parametrize("kept", [threading.Lock(), torch.ones(2, requires_grad=True) * 2], ids=["lock", "graph"])
def test_a_model_that_cannot_be_copied_is_named(kept: object) -> None:
    model = zoo.build("mlp")
    model.kept = [kept]
    found = diagnostics.measure(model, zoo.batch("mlp"), measures=["balancedness", "weight_l2"])
    assert found.skipped["balancedness"].startswith("balancedness is proved on a copy of the model, which cannot be")
    assert "weight_l2" in found.values


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"p: 0\.5 is not allowed; it must be a number that is finite and ≥ 1"):
        balance(layers([2, 2, 2]), p=0.5)
    with pytest.raises(ValueError, match="weights must hold at least one layer, got none"):
        balance([])
    with pytest.raises(ValueError, match="5 inputs cannot follow one with 3 units"):
        balance([torch.ones(3, 2), torch.ones(2, 5)])
    with pytest.raises(ValueError, match="finite"):
        balance([torch.tensor([[math.nan]])])
    with pytest.raises(ValueError, match="connect at least one input with an output"):
        balance([torch.zeros(2, 2), torch.zeros(2, 2)])
    with pytest.raises(ArithmeticError, match="did not reach tolerance"):
        balance(layers([2, 5, 2]), iterations=1)
