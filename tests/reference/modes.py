"""Eval mode for a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    yield
    model.train(training)
