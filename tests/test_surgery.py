"""What optimizers forget, they can do without."""

import torch
from torch.optim import SGD

from pliant.methods._core.surgery import forget_state_
from tests import zoo
from tests.loops import train


def test_a_fused_sgd_steps_on_after_part_of_its_memory_is_gone() -> None:
    found = []
    for fused in (False, True):
        model = zoo.build("mlp", dtype=torch.float32)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        train(model, optimizer, "mlp", range(3))
        assert forget_state_([optimizer], model[4].parameters()) == 2
        train(model, optimizer, "mlp", range(3, 6))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)
