"""θ₀ in bfloat16, or drawn from its seed again: the same run, with less memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from pliant import L2Init, ShrinkPerturb, WassersteinRegularization
from pliant.methods._core.stored import draw_initial

SEED = 7


def build() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def step_(model: nn.Module, optimizer: SGD, step: int) -> None:
    x = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def run(make: Any, steps: int = 5) -> tuple[nn.Module, Any]:
    model = build()
    method = make(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    method.attach(optimizer)
    for step in range(steps):
        step_(model, optimizer, step)
    return model, method


def bytes_of(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(map(bytes_of, state.values())) if isinstance(state, dict) else 0


MAKERS = [
    pytest.param(lambda model, **store: L2Init(model, lam=0.1, **store), id="l2_init"),
    pytest.param(lambda model, **store: ShrinkPerturb(model, lam=0.3, every=2, **store), id="shrink_perturb"),
]


@pytest.mark.parametrize("make", MAKERS)
def test_drawn_from_the_seed_the_run_is_the_same_and_nothing_is_kept(make: Any) -> None:
    full, kept = run(make)
    drawn, method = run(lambda model: make(model, store="seed", seed=SEED))
    for expected, found in zip(full.parameters(), drawn.parameters(), strict=True):
        assert torch.equal(expected, found)
    size = sum(p.numel() * p.element_size() for p in full.parameters())
    assert (bytes_of(kept.state_dict()["state"]), bytes_of(method.state_dict()["state"])) == (size, 0)
    if isinstance(method, L2Init):
        assert float(method.value()) == pytest.approx(float(kept.value()), rel=1e-6)


@pytest.mark.parametrize("make", MAKERS)
def test_rounded_to_bfloat16_half_is_kept(make: Any) -> None:
    full, kept = run(make)
    rounded, method = run(lambda model: make(model, store="bf16"))
    assert 2 * bytes_of(method.state_dict()["state"]) == bytes_of(kept.state_dict()["state"])
    for name, values in kept.initial.items():
        assert torch.equal(method.initial[name], values.bfloat16())
    largest = max(float(p.detach().abs().max()) for p in build().parameters())
    for expected, found in zip(full.parameters(), rounded.parameters(), strict=True):
        assert expected.dtype == found.dtype
        torch.testing.assert_close(expected, found, rtol=0, atol=largest * 2**-8)


def test_the_gradient_is_that_of_the_rounded_values() -> None:
    model = build().double()
    penalty = L2Init(model, lam=0.5, store="bf16")
    rounded = {name: p.detach().bfloat16().double() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.data.add_(1.0)
    penalty.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 0.5 * (parameter.detach() - rounded[name]), rtol=1e-12, atol=0)


def test_wasserstein_matches_the_rounded_values() -> None:
    model = build()
    rounded = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    penalty = WassersteinRegularization(model, lam=0.5, store="bf16")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    penalty.step()
    for name, parameter in model.named_parameters():
        order = parameter.detach().flatten().argsort()
        target = torch.empty(len(order)).scatter_(0, order, rounded[name].flatten().float().sort().values)
        assert penalty.ordered[name].dtype == torch.bfloat16
        torch.testing.assert_close(parameter.grad, parameter.detach() - target.view(parameter.shape))


def test_drawing_leaves_the_generators_and_the_model_alone() -> None:
    model = build()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    drawn: dict[str, Tensor] = {}
    for part in draw_initial(model, dict(model.named_parameters()), SEED + 1):
        drawn |= part
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert drawn.keys() == dict(model.named_parameters()).keys()
    assert not torch.equal(drawn["0.weight"], model[0].weight)


def test_frozen_and_excluded_parameters_are_drawn_over() -> None:
    """The parameters after them must be drawn at their place in the stream."""
    model = build()
    model[0].weight.requires_grad_(False)
    method = L2Init(model, store="seed", seed=SEED, where=lambda name, p: name != "4.weight")
    assert method.value() == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: (model, SEED + 1), "seed 8 does not give the values of '0.bias' again"),
        (lambda model: (model, None), "seed: None is given"),
        (lambda model: (model.double(), SEED), "does not give the values"),
    ],
)
def test_refuses_a_seed_that_does_not_give_the_values(spoil: Any, message: str) -> None:
    model, seed = spoil(build())
    with pytest.raises(ValueError, match=message):
        L2Init(model, store="seed", seed=seed)


def test_refuses_modules_that_initialize_their_children() -> None:
    torch.manual_seed(SEED)
    model = nn.MultiheadAttention(4, 2)
    before = model.out_proj.bias.detach().add_(1.0).clone()
    with pytest.raises(ValueError, match="does not give the values"):
        L2Init(model, store="seed", seed=SEED)
    assert torch.equal(model.out_proj.bias, before)


def test_refuses_another_store() -> None:
    with pytest.raises(ValueError, match="store"):
        L2Init(build(), store="half")
