"""Shrink & perturb in its three forms."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Adam

from pliant import FullReset, ShrinkPerturb
from tests import zoo
from tests.loops import assert_same, snapshot, train

# apply() without an optimizer warns that no moments are reset; these tests do so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


def trained(name: str) -> tuple[nn.Module, Adam]:
    model = zoo.build(name)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, name, range(5))
    return model, optimizer


def test_moves_towards_the_initial_values() -> None:
    model = zoo.build("cnn_bn")
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    method = ShrinkPerturb(model, lam=0.3)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, "cnn_bn", range(5))
    before = snapshot(model)
    receipt = method.apply(optimizer)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), 0.7 * before[name] + 0.3 * initial[name], rtol=1e-12, atol=1e-15)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert receipt.tensors == len(initial)
    assert len(optimizer.state) == len(initial)


def test_moves_towards_a_fresh_draw() -> None:
    model, _ = trained("mlp")
    before = snapshot(model)
    ShrinkPerturb(model, lam=0.3, toward="fresh", seed=5).apply()
    drawn = {name: (p.detach() - 0.7 * before[name]) / 0.3 for name, p in model.named_parameters()}
    bound = 12**-0.5  # torch draws a linear layer's weights from U(±1/√fan_in)
    assert drawn["0.weight"].abs().max() <= bound + 1e-12
    assert drawn["0.weight"].abs().max() > 0.8 * bound
    assert not torch.allclose(drawn["0.weight"], zoo.build("mlp")[0].weight)
    again, _ = trained("mlp")
    ShrinkPerturb(again, lam=0.3, toward="fresh", seed=5).apply()
    assert_same(snapshot(model), snapshot(again))


def test_adds_noise() -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 400).double()
    before = model.weight.detach().clone()
    ShrinkPerturb(model, lam=0.7, toward="noise", noise_std=0.5, seed=1).apply()
    noise = model.weight.detach() - 0.3 * before
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert abs(float(noise.mean())) < 0.01


def test_noise_does_not_depend_on_memory_layout() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    other = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    for model in (plain, other):
        ShrinkPerturb(model, toward="noise", seed=0).apply()
    assert torch.equal(plain.weight, other.weight)


def test_apply_without_effect_warns() -> None:
    for lam in (0.2, 0.4, 0.5, 0.7):
        with pytest.warns(UserWarning, match=r"shrink_perturb.apply\(\) changed none of 6 parameters"):
            ShrinkPerturb(zoo.build("mlp"), lam=lam).apply()


def test_invalid_settings_are_errors() -> None:
    model = zoo.build("mlp")
    with pytest.raises(
        ValueError, match="toward: 'zero' is not allowed; it must be one of 'initial', 'fresh', 'noise'"
    ):
        ShrinkPerturb(model, toward="zero")
    with pytest.raises(ValueError, match="optimizer_state: 'drop' is not allowed"):
        FullReset(model, optimizer_state="drop")
    with pytest.raises(TypeError, match=r"shrink_perturb acts when data is new: call apply\(\)"):
        ShrinkPerturb(model).step()
