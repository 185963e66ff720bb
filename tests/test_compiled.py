"""Methods act on compiled models and under compiled optimizer steps as without compilation."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from pliant import L2, SWR, UPGD, FeatureRankRegularization, Method, ReDo
from tests import zoo

EXAMPLE = zoo.batch("mlp")[0]
MAKERS: dict[str, Any] = {
    "l2": lambda model: L2(model, lam=0.1),
    "swr": lambda model: SWR(model, EXAMPLE, lam=0.1),
    "upgd": lambda model: UPGD(model, seed=0),
    "redo": lambda model: ReDo(model, EXAMPLE, tau=0.8, every=2, seed=0),
    "feature_rank": lambda model: FeatureRankRegularization(model, EXAMPLE, lam=0.1),
}


def train(make: Any, *, compiled_model: bool = False, compiled_step: bool = False) -> tuple[nn.Module, Method]:
    torch._dynamo.reset()
    model = zoo.build("mlp")
    called = torch.compile(model, backend="eager") if compiled_model else model
    method = make(called)
    optimizer = SGD(model.parameters(), lr=0.1)
    method.attach(optimizer)
    step = torch.compile(optimizer.step, backend="eager") if compiled_step else optimizer.step
    for seed in range(4):
        inputs, labels = zoo.batch("mlp", seed=seed)
        optimizer.zero_grad()
        cross_entropy(called(inputs), labels).backward()
        step()
    return model, method


@pytest.mark.parametrize("name", MAKERS)
def test_compilation_changes_nothing(name: str) -> None:
    plain, method = train(MAKERS[name])
    assert method.receipt is not None
    for settings in ({"compiled_model": True}, {"compiled_step": True}):
        model, _ = train(MAKERS[name], **settings)
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
