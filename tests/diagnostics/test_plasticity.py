import pytest
import torch

from pliant.diagnostics.plasticity import Plasticity, slope


def test_plasticity_of_a_learner_that_gets_worse() -> None:
    record = Plasticity((0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.5, 0.7), fresh=(0.1,))
    assert record.change == pytest.approx(0.6 - 0.1)
    assert record.trend == pytest.approx(torch.linalg.lstsq(
        torch.stack([torch.arange(8.0), torch.ones(8)], 1).double(), torch.tensor(record.final).double()[:, None]
    ).solution[0].item())  # fmt: skip
    assert record.gap == pytest.approx([0, 0, 0.1, 0.1, 0.2, 0.2, 0.4, 0.6])
    assert Plasticity((0.5,)).trend == 0
    assert Plasticity((0.5,)).gap == ()
    assert slope([3.0, 3.0, 3.0]) == 0


def test_plasticity_wants_one_entry_a_task() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        Plasticity(())
    with pytest.raises(ValueError, match="online must have one of"):
        Plasticity((0.1, 0.2), online=(0.1,))
    with pytest.raises(ValueError, match="fresh must have one of"):
        Plasticity((0.1, 0.2, 0.3), fresh=(0.1, 0.2))
