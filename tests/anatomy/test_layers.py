"""The order of calls, and the classifier at its end."""

import torch
from torch import nn

from pliant.anatomy.layers import called_layers, classifier_names


def test_called_layers_leaves_the_model_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x + torch.randn_like(x))

    model = Counting()
    before = torch.get_rng_state()
    assert [layer.name for layer in called_layers(model, torch.zeros(1, 3))] == ["layer"]
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_learned_activation_does_not_end_the_classifier() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.PReLU(), nn.Linear(4, 2))
    assert classifier_names(called_layers(model, torch.zeros(1, 1, 4, 4))) == ("2", "4")
