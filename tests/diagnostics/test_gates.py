"""Activations that are written out are taken as a whole; gates of other values are activations of their own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pliant.diagnostics import diagnose
from pliant.diagnostics.activations import capture
from tests.diagnostics.networks import BATCH, IMAGES, Between

SLOPE = nn.Parameter(torch.rand(6, 1, generator=torch.Generator().manual_seed(0)))
WRITTEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda u: 0.5 * u * (1 + torch.tanh(0.7979 * (u + 0.044715 * torch.pow(u, 3)))),
    "scaled last": lambda u: (u * (torch.tanh(0.7979 * (u + 0.044715 * u**3)) + 1)).div_(2),
    "swish": lambda u: u * torch.sigmoid(u),
    "swish in place": lambda u: u.mul_(u.sigmoid()),
    "quick_gelu": lambda u: torch.sigmoid(1.702 * u) * u,
    "slope that is learned": lambda u: u * torch.sigmoid(u * functional.softplus(SLOPE.view(-1))),
    "view of such a slope": lambda u: u * torch.sigmoid(u * functional.softplus(SLOPE).view(-1)),
    "in another precision": lambda u: u * torch.sigmoid(u.double()).type_as(u),
    "mish": lambda u: torch.mul(u, torch.tanh(functional.softplus(u))),
    "mish with names": lambda u: torch.mul(input=u, other=torch.tanh(functional.softplus(input=u))),
    "hardswish": lambda u: u * functional.relu6(u + 3) / 6,
    "hardswish with a clamp": lambda u: u * torch.clamp(u + 3, 0, 6) / 6,
    "of two gates": lambda u: torch.tanh(u) * torch.sigmoid(-u),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_of_an_activation_that_is_written_out_the_product_is_taken(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Between(WRITTEN_OUT[name]))
    model.slope = SLOPE
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["0", "2.a"]
    assert found.layers["2.a"].values.equal(found.representation)


BRANCHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale of a branch": lambda h, alpha: h * alpha,
    "scale of each unit": lambda h, alpha: alpha.expand(6) * h,
    "mask": lambda h, alpha: h * torch.zeros(6),
    "divided by": lambda h, alpha: h / (alpha + 1e9).expand(6),
    "divided": lambda h, alpha: torch.tensor(1.0) / h,
}


@pytest.mark.parametrize("name", BRANCHES)
def test_what_an_activation_is_multiplied_by_later_is_no_part_of_it(name: str) -> None:
    """ReZero begins with all branches at zero: their units are as alive as those of the same network with silu."""
    alpha = nn.Parameter(torch.zeros(()))
    model = Between(lambda u: BRANCHES[name](u * torch.sigmoid(u), alpha))
    model.alpha = alpha
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["a"]
    torch.testing.assert_close(found.layers["a"].values, functional.silu(model.a(BATCH.args[0])))


def test_a_product_belongs_to_the_layer_of_its_gate() -> None:
    class SwiGLU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            u = self.gate(x)
            share, up = torch.sigmoid(u), self.up(x)
            return self.down(u * share * up)

    model = SwiGLU()
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["gate"]
    torch.testing.assert_close(found.layers["gate"].values, functional.silu(model.gate(BATCH.args[0])))


def test_of_an_activation_after_another_only_the_second_can_be_a_gate() -> None:
    def twice(u: Tensor) -> Tensor:
        h = torch.relu(u)
        return h * torch.sigmoid(h)

    model = Between(twice)
    found = capture(model, BATCH, keep=True)
    h = torch.relu(model.a(BATCH.args[0]))
    assert list(found.layers) == ["a", "a:2"]
    assert found.layers["a"].values.equal(h)
    assert found.layers["a:2"].values.equal(h * torch.sigmoid(h))


def _derivative(u: Tensor) -> Tensor:
    h = torch.sigmoid(u)
    return h * (1 - h)


def _overwritten(u: Tensor) -> Tensor:
    h = torch.sigmoid(u)
    return u.copy_(u.flip(1)) * h


GATES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "of another part": (lambda u: u[:, :3] * torch.sigmoid(u[:, 3:]), lambda u: torch.sigmoid(u[:, 3:])),
    "of a constant": (lambda u: torch.tanh(u) * 0.5 * SLOPE.view(-1), torch.tanh),
    "of itself": (_derivative, torch.sigmoid),
    "of other entries": (lambda u: torch.sigmoid(u) * u.flip(1), torch.sigmoid),
    "of what was written over": (_overwritten, torch.sigmoid),
    "of a mean": (lambda u: torch.tanh(u) * u.mean(1, keepdim=True), torch.tanh),
    "computed from a mean too": (
        lambda u: u * torch.sigmoid(u - u.mean(1, keepdim=True)),
        lambda u: torch.sigmoid(u - u.mean(1, keepdim=True)),
    ),
    "of ones": (lambda u: torch.tanh(u) * torch.ones_like(u), torch.tanh),
    "that is added": (lambda u: u + torch.tanh(u), torch.tanh),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_of_other_values_stay_activations(name: str) -> None:
    function, gate = GATES[name]
    model = Between(function, 3 if name == "of another part" else 6)
    model.slope = SLOPE
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["a"]
    torch.testing.assert_close(found.layers["a"].values, gate(model.a(BATCH.args[0])), rtol=0, atol=0)


def test_gates_of_a_recurrent_cell_stay_activations() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.forget, self.new, self.head = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(len(x), 5)
            keep = torch.sigmoid(self.forget(x))
            state = keep * state + (1 - keep) * torch.tanh(self.new(x))
            return self.head(keep * torch.tanh(state))

    model, x = Cell(), BATCH.args[0]
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["forget", "new", "new:2"]
    keep, new = torch.sigmoid(model.forget(x)), torch.tanh(model.new(x))
    assert found.layers["forget"].values.equal(keep)
    assert found.layers["new"].values.equal(new)
    torch.testing.assert_close(found.layers["new:2"].values, torch.tanh((1 - keep) * new))


def test_gates_of_channels_stay_activations() -> None:
    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.down, self.up = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 1), nn.Conv2d(3, 4, 1)
            self.head = nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.conv(x))
            self.share = torch.sigmoid(self.up(torch.relu(self.down(h.mean((2, 3), keepdim=True)))))
            return self.head(h * self.share)

    model = Squeezed()
    found = capture(model, IMAGES, keep=True)
    assert list(found.layers) == ["conv", "down", "up"]
    assert found.layers["up"].values.equal(model.share.flatten(1))


def test_dead_units_of_gpt2_are_found() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.bias[:12] = -20.0
    found = diagnose(
        model, {"input_ids": torch.randint(20, (4, 8))}, measures=["dead_fraction", "dormant_fraction"]
    ).to_dict()
    for measure in ("dead_fraction", "dormant_fraction"):
        for name in ("transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"):
            assert found[f"{measure}/{name}"] == 0.25
        assert found[measure] == 0.25
