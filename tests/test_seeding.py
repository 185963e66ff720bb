import torch

from pliant._seeding import undrawn


def test_undrawn_restores_the_given_generators() -> None:
    generator = torch.Generator().manual_seed(0)
    with undrawn(generators=[generator]):
        first = torch.rand(3, generator=generator)
    assert torch.rand(3, generator=generator).equal(first)
