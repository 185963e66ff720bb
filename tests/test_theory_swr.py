"""The SWR paper's statements as executable checks: theorems 1–3, corollary 2.1, figure 1."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from pliant import SWR
from tests import zoo
from tests.methods.test_swr import tiny_eps
from tests.reference import swr as reference

ACTIVATIONS = {"relu": nn.ReLU, "leaky": lambda: nn.LeakyReLU(0.2), "identity": nn.Identity}


@st.composite
def chains(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor]:
    """A random chain of convolutions and linear layers with homogeneous activations, and inputs for it."""
    bias = st.booleans()
    norm = st.sampled_from([None, None, "batch", "other"])
    layers: list[nn.Module] = []
    channels, size = draw(st.integers(1, 3)), 8
    inputs_shape = (channels, size, size)
    for _ in range(draw(st.integers(0, 3))):
        width = draw(st.integers(1, 5))
        layers.append(nn.Conv2d(channels, width, 3, padding=1, bias=draw(bias)))
        kind = draw(norm)
        if kind is not None:
            layers.append(nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(1, width))
        layers.append(ACTIVATIONS[draw(st.sampled_from(list(ACTIVATIONS)))]())
        if size > 2 and draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))(2))
            size //= 2
        channels = width
    layers.append(nn.Flatten())
    width = channels * size * size
    for _ in range(draw(st.integers(0, 3))):
        out = draw(st.integers(2, 8))
        layers.append(nn.Linear(width, out, bias=draw(bias)))
        kind = draw(norm)
        if kind is not None:
            layers.append(nn.BatchNorm1d(out) if kind == "batch" else nn.LayerNorm(out))
        layers.append(ACTIVATIONS[draw(st.sampled_from(list(ACTIVATIONS)))]())
        width = out
    layers.append(nn.Linear(width, 4, bias=draw(bias)))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    model = tiny_eps(nn.Sequential(*layers).double())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            for parameter in module.parameters(recurse=False):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model, torch.randn(16, *inputs_shape, dtype=torch.float64)


def norms_are_defined(model: nn.Sequential, inputs: Tensor) -> bool:
    """A norm layer without eps that meets a constant computes 0/0 in rounding errors: there is no function to keep."""
    value = inputs
    for layer in copy.deepcopy(model):
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
            groups = value.flatten(1)
        else:
            groups = value.transpose(0, 1).flatten(1)
        is_batch_norm = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
        is_constant = groups.std(dim=1, unbiased=False) <= 1e-5 * groups.abs().amax(dim=1)
        if isinstance(layer, reference.NORMS) and (layer.training or not is_batch_norm) and is_constant.any():
            return False
        value = layer(value).detach()
    return True


@settings(max_examples=60, deadline=None)
@given(chain=chains(), lam=st.floats(0.01, 1.0), training=st.booleans(), factor=st.floats(0.2, 5.0))
def test_theorem_1_outputs_stay_proportional(
    chain: tuple[nn.Sequential, Tensor], lam: float, training: bool, factor: float
) -> None:
    model, inputs = chain
    swr = SWR(model, inputs, lam=lam, plan={"order": "forward"})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= factor * float(torch.rand(1, generator=generator) + 0.5)
    model.train(training)
    before = copy.deepcopy(model)(inputs).detach()
    assume(norms_are_defined(model, inputs))
    swr.step()
    after = copy.deepcopy(model)(inputs).detach()
    assert swr.receipt is not None
    k = swr.receipt.details["output_factors"][0]
    # Relative to each sample's largest output: a single entry may be a difference of large numbers.
    scale = before.abs().amax(dim=1, keepdim=True)
    assert ((after - k * before).abs() <= 1e-9 * k * scale).all()
    gap = before.topk(2, dim=1).values
    decided = gap[:, 0] - gap[:, 1] > 1e-9 * scale[:, 0]
    assert (after.argmax(1) == before.argmax(1))[decided].all()


@pytest.mark.parametrize("lam", [0.5, 0.1, 0.05])
def test_theorem_2_bounds_the_norm_against_an_adversary(lam: float) -> None:
    """Every step pushes each weight outwards so that its squared norm grows by B: nothing grows faster."""
    model = zoo.build("mlp")
    weights = [model[i].weight for i in (0, 2, 4)]
    initial = [float(w.detach().norm()) for w in weights]
    growth, steps = 0.5, 1000
    optimizer = SGD(model.parameters(), lr=1.0)
    SWR(model, zoo.batch("mlp")[0], lam=lam).attach(optimizer)
    largest = list(initial)
    for _ in range(steps):
        for weight in weights:
            norm = float(weight.detach().norm())
            weight.grad = -weight.detach() * ((norm**2 + growth) ** 0.5 / norm - 1)
        optimizer.step()
        largest = [max(a, float(w.norm())) for a, w in zip(largest, weights, strict=True)]
    bound = [n + growth**0.5 / lam for n in initial]
    assert all(a <= b for a, b in zip(largest, bound, strict=True))
    assert all(a > n for a, n in zip(largest, initial, strict=True))
    unbounded = [(n**2 + steps * growth) ** 0.5 for n in initial]
    assert all(b < u for b, u in zip(bound, unbounded, strict=True)), "without SWR the bound would not hold"


def test_corollary_2_1_lipschitz_constant_is_bounded() -> None:
    model = zoo.build("mlp")
    weights = [model[i].weight for i in (0, 2, 4)]
    initial = torch.tensor([float(w.norm()) for w in weights])
    lam, growth = 0.05, 0.0
    optimizer = SGD(model.parameters(), lr=0.5)
    swr = SWR(model, zoo.batch("mlp")[0], lam=lam)
    for step in range(200):
        squares = [float(w.norm()) ** 2 for w in weights]
        inputs, labels = zoo.batch("mlp", seed=step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        growth = max(growth, *(abs(float(w.norm()) ** 2 - s) for w, s in zip(weights, squares, strict=True)))
        swr.step()
        bound = float((initial + growth**0.5 / lam).prod())
        inputs = torch.randn(64, 12, dtype=torch.float64)
        moved = inputs + 1e-3 * torch.randn_like(inputs)
        slope = (model(moved) - model(inputs)).norm(dim=1) / (moved - inputs).norm(dim=1)
        lipschitz = torch.stack([torch.linalg.matrix_norm(w, 2) for w in weights]).prod()
        assert float(slope.max()) <= float(lipschitz) * (1 + 1e-9) <= bound * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    growth=st.lists(st.floats(0.1, 50.0), min_size=2, max_size=6),
    lam=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
def test_theorem_3_balance_never_worsens(growth: list[float], lam: float, seed: int) -> None:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 4).double() for _ in growth]
    model = nn.Sequential(*layers)
    initial = [float(layer.weight.norm()) for layer in layers]
    swr = SWR(model, torch.ones(1, 4, dtype=torch.float64), lam=lam, plan={"order": "forward"})
    with torch.no_grad():
        for layer, factor in zip(layers, growth, strict=True):
            layer.weight *= factor

    def balances() -> list[float]:
        norms = [float(layer.weight.norm()) for layer in layers]
        pairs = [(i, j) for i in range(len(layers)) for j in range(len(layers)) if initial[i] <= initial[j] and i != j]
        return [abs(norms[j] / norms[i] - initial[j] / initial[i]) for i, j in pairs]

    before = balances()
    swr.step()
    assert all(after <= b * (1 + 1e-9) + 1e-12 for after, b in zip(balances(), before, strict=True))


def test_figure_1_naive_scaling_loses_accuracy_and_proportional_scaling_loses_none() -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16.0), torch.tensor(labels)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        for index in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[index]), targets[index]).backward()
            optimizer.step()
    predictions = model(inputs).argmax(1)
    accuracy = float((predictions == targets)[1400:].double().mean())
    assert accuracy > 0.9

    lost = {}
    for factor in (0.9, 0.7, 0.5, 0.3, 0.1):
        naive, proportional = copy.deepcopy(model), copy.deepcopy(model)
        with torch.no_grad():
            for layer in naive[::2]:
                layer.weight *= factor
        hard = SWR(proportional, inputs[:1], lam=1.0)
        hard.initial_norms.mul_(factor)
        hard.step()
        assert torch.equal(proportional(inputs).argmax(1), predictions), factor
        lost[factor] = accuracy - float((naive(inputs).argmax(1) == targets)[1400:].double().mean())
    assert lost[0.1] > 0.2
    assert lost[0.1] >= lost[0.3] >= lost[0.5] >= lost[0.9] - 0.02
