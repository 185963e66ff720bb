"""Normalize and project: the norm of every weight, or of every unit, stays."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from pliant import LayerNormInsertion, NormalizeAndProject
from tests import zoo
from tests.loops import steady_adam, train
from tests.methods.trajectories import assert_close
from tests.reference import rules


@pytest.mark.parametrize("per", ["tensor", "unit"])
@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_reference(name: str, per: str) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    norms = {
        key: [float(part.norm()) for part in ([layer.weight.detach()] if per == "tensor" else layer.weight.detach())]
        for key, layer in rules.weight_layers(slow)
    }
    optimizer, other = steady_adam(model), steady_adam(slow)
    method = NormalizeAndProject(model, per=per).attach(optimizer)
    for step in range(6):
        train(model, optimizer, name, [step])
        train(slow, other, name, [step])
        rules.project_weights(slow, norms)
    assert_close(model, slow)
    assert method.receipt is not None
    assert method.receipt.tensors == len(norms)
    assert all(factor != 1 for factor in method.receipt.details["factors"].values())


def test_units_of_a_transposed_convolution_lie_along_its_second_dimension() -> None:
    model = nn.ConvTranspose2d(3, 2, 2).double()
    method = NormalizeAndProject(model, per="unit")
    norms = model.weight.detach().transpose(0, 1).flatten(1).norm(dim=1)
    with torch.no_grad():
        model.weight.mul_(torch.rand(3, 2, 2, 2) + 1)
    method.step()
    torch.testing.assert_close(model.weight.detach().transpose(0, 1).flatten(1).norm(dim=1), norms)


def test_weights_that_start_at_zero_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    nn.init.zeros_(model[0].weight)
    with pytest.warns(UserWarning, match=r"nap leaves these weights alone, they start at zero: 0\.weight"):
        method = NormalizeAndProject(model)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3))
    method.step()
    assert torch.equal(model[0].weight, torch.eye(3))


def test_behind_norm_layers_the_function_does_not_see_the_projection() -> None:
    """Every weight but the last is followed by a norm layer, so its norm does not change the function."""
    model = zoo.build("mlp")
    x = zoo.batch("mlp")[0]
    LayerNormInsertion(model, x)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 0.0
    for layer in (model[0], model[2]):
        nn.init.zeros_(layer.bias)
    method = NormalizeAndProject(model, where=lambda name, _: not name.startswith("4."))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(3)
    expected = model(x)
    method.step()
    torch.testing.assert_close(model(x), expected)
    assert float(method.receipt.details["factors"]["0.weight"]) == pytest.approx(1 / 3)


def test_settings_that_make_no_sense_are_errors() -> None:
    with pytest.raises(ValueError, match="per: 'row' is not allowed; it must be one of 'tensor', 'unit'"):
        NormalizeAndProject(zoo.build("mlp"), per="row")
    with pytest.raises(ValueError, match="every: 0 is not allowed"):
        NormalizeAndProject(zoo.build("mlp"), every=0).attach(SGD([], lr=0.1))
