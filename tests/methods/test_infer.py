"""InFeR: the term in the loss, with a frozen copy of the network and heads in the same optimizer."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from pliant import InFeR
from pliant.methods._core.initial import seeded
from tests import zoo
from tests.loops import train
from tests.reference.modes import in_eval_mode

LAM, BETA = 0.05, 3.0


def features_of(model: nn.Module, classifier: nn.Module, inputs: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with in_eval_mode(model):
        model(inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_same_trajectory_as_the_term_in_the_loss(name: str) -> None:
    model, slow = zoo.build(name), zoo.build(name)
    inputs = zoo.batch(name)[0]
    method = InFeR(model, inputs, lam=LAM, beta=BETA, heads=4, seed=2)
    optimizer = Adam(model.parameters(), lr=1e-2, eps=1e-4)
    method.attach(optimizer)
    frozen = copy.deepcopy(slow)
    last, frozen_last = ([m for m in net.modules() if isinstance(m, nn.Linear)][-1] for net in (slow, frozen))
    with seeded(2, 0):
        heads = nn.Linear(last.in_features, 4).double()
    frozen_heads = copy.deepcopy(heads)
    other = Adam([{"params": slow.parameters(), "eps": 1e-4}, {"params": heads.parameters()}], lr=1e-2)
    for step in range(6):
        train(model, optimizer, name, [step])
        inputs, labels = zoo.batch(name, seed=100 + step)
        other.zero_grad()
        loss = cross_entropy(slow(inputs), labels)
        targets = BETA * frozen_heads(features_of(frozen, frozen_last, inputs)).detach()
        term = (heads(features_of(slow, last, inputs)) - targets).square().mean()
        (loss + LAM * term).backward()
        other.step()
    for mine, theirs in zip(model.state_dict().values(), slow.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(method.heads["weight"], heads.weight.detach(), rtol=1e-6, atol=1e-8)
    assert method.receipt is not None
    assert method.receipt.details["value"] > 0


def test_it_keeps_the_rank_of_the_features() -> None:
    """Learning a single constant target collapses the features; the heads hold them up."""

    def rank_of(lam: float) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=0.05)
        x = torch.randn(64, 12)
        InFeR(model, x, lam=lam, beta=100.0, seed=0).attach(optimizer)
        for _ in range(150):
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        singular = torch.linalg.svdvals(model[:4](x).detach())
        shares = singular / singular.sum().clamp(min=1e-12)
        return float(torch.special.entr(shares).sum().exp())

    assert rank_of(0.1) > 2 * rank_of(0.0)


def test_settings_that_make_no_sense_are_errors() -> None:
    model = zoo.build("cnn")
    with pytest.raises(ValueError, match="example: None, and classifier is not given"):
        InFeR(model)
    with pytest.raises(ValueError, match="classifier: '0' is a Conv2d; it must be a linear layer"):
        InFeR(model, classifier="0")
    with pytest.raises(ValueError, match="heads: 0 is not allowed"):
        InFeR(model, classifier="9", heads=0).attach(SGD(model.parameters(), lr=0.1))
