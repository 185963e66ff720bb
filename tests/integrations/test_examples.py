"""The examples run, and what they reset is reset."""

import numpy as np
import pytest
from examples import dqn_reset, sac_reset


def test_dqn(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    apply = dqn_reset.pliant.FIRE.apply

    def noted(self: object, *arguments: object, **settings: object) -> object:
        receipt = apply(self, *arguments, **settings)
        copied.append(receipt.details["targets_copied"])
        return receipt

    monkeypatch.setattr(dqn_reset.pliant.FIRE, "apply", noted)
    assert np.isfinite(dqn_reset.train(steps=1500, reset_every=1200)).all()
    assert copied == [6]


def test_sac() -> None:
    assert np.isfinite(sac_reset.train(steps=450, reset_every=300)).all()
