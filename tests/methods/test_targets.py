"""`apply(targets=…)` copies a network that was changed into its target network."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Adam

import pliant


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("make", [pliant.FIRE, pliant.FullReset, pliant.HareTortoise])
def test_the_target_becomes_a_copy(make: type[pliant.Method]) -> None:
    online = network()
    target = copy.deepcopy(online).requires_grad_(False)
    tensors = list(target.state_dict(keep_vars=True).values())
    method = make(online)
    with torch.no_grad():
        for tensor in online.parameters():
            tensor.add_(1.0)
    receipt = method.apply(Adam(online.parameters()), targets=[(online, target)])
    for ours, theirs in zip(online.state_dict().values(), target.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(a is b for a, b in zip(tensors, target.state_dict(keep_vars=True).values(), strict=True))
    assert not any(parameter.requires_grad for parameter in target.parameters())
    if method.kind == "reinitializer":
        assert receipt.details["targets_copied"] == len(online.state_dict())


def test_a_target_of_another_shape_changes_nothing() -> None:
    online = network()
    before = copy.deepcopy(online.state_dict())
    with pytest.raises(ValueError, match=r"targets: '0\.weight' is of shape \(6, 4\) .* and of shape \(3, 4\) in its"):
        pliant.FIRE(online).apply(targets=[(online, nn.Sequential(nn.Linear(4, 3)))])
    assert all(torch.equal(online.state_dict()[name], tensor) for name, tensor in before.items())
