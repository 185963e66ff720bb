"""Hooks on modules neither follow a copy nor keep their owner alive."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from pliant.methods._core.module_hooks import ModuleHook


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self, module: nn.Module, args: object) -> None:
        self.calls += 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_hook_stays_with_its_module(duplicate) -> None:
    module, counter = nn.Linear(2, 2), Counter()
    module.register_forward_pre_hook(ModuleHook(module, counter.count))
    twin = duplicate(module)
    twin(torch.zeros(1, 2))
    assert counter.calls == 0
    module(torch.zeros(1, 2))
    assert counter.calls == 1
    duplicate(twin)(torch.zeros(1, 2))


def test_a_hook_does_not_keep_its_owner_alive() -> None:
    module, counter = nn.Linear(2, 2), Counter()
    module.register_forward_pre_hook(ModuleHook(module, counter.count))
    owner = weakref.ref(counter)
    del counter
    gc.collect()
    assert owner() is None
    module(torch.zeros(1, 2))  # The hook that is left behind does no harm.
