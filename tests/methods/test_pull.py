"""The two ways to compute soft weight rescaling's factors agree with each other and with the definition."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pliant.methods._core.pull import DevicePull, HostPull, rows_that_follow

MATRIX = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0.5, -0.5], [0, 0, 0]], dtype=torch.float64)
norms = st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3)
strengths = st.lists(st.floats(0, 1), min_size=3, max_size=3)


def pull(kind: type, now: list[float], first: list[float], lam: list[float], **given: Any) -> tuple[Tensor, Tensor]:
    written = [torch.tensor([1.0, -2.0], dtype=torch.float64) for _ in MATRIX]
    options = {"rates": None, "found_inf": None} | given
    initial, strength = torch.tensor(first, dtype=torch.float64), torch.tensor(lam, dtype=torch.float64)
    made = kind(initial, strength, MATRIX, rows_that_follow(MATRIX, strength > 0))
    log_c = made([torch.tensor(n, dtype=torch.float64) for n in now], written, **options)
    return torch.as_tensor(log_c, dtype=torch.float64), torch.stack(written)


@pytest.mark.parametrize("kind", [DevicePull, HostPull])
@given(norms, norms, strengths, strengths)
def test_every_tensor_is_multiplied_as_the_definition_says(
    kind: type, now: list[float], first: list[float], lam: list[float], rates: list[float]
) -> None:
    log_c, written = pull(kind, now, first, lam, rates=torch.tensor(rates, dtype=torch.float64))
    each = zip(now, first, lam, rates, strict=True)
    wished = [math.log((s * r * first + (1 - s * r) * now) / now) for now, first, s, r in each]
    torch.testing.assert_close(log_c, torch.tensor(wished, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    factors = (MATRIX @ torch.tensor(wished, dtype=torch.float64)).exp()
    torch.testing.assert_close(written, factors[:, None] * torch.tensor([1.0, -2.0]), rtol=1e-11, atol=0)


@pytest.mark.parametrize("kind", [DevicePull, HostPull])
def test_a_weight_that_became_zero_is_left_alone_and_so_are_its_followers(kind: type) -> None:
    log_c, written = pull(kind, [0.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.0])
    torch.testing.assert_close(log_c, torch.tensor([0.0, math.log(0.75), 0.0], dtype=torch.float64))
    torch.testing.assert_close(written[:, 0], torch.tensor([1.0, 0.75, 0.75**0.5, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [DevicePull, HostPull])
def test_no_weight_is_pulled_beyond_its_initial_norm(kind: type) -> None:
    log_c, _ = pull(kind, [4.0, 2.0, 2.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.0], rates=torch.tensor([20.0, 1.0, 9.0]))
    torch.testing.assert_close(log_c.exp(), torch.tensor([0.25, 0.75, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [DevicePull, HostPull])
@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_leaves_its_followers_alone(kind: type, lam: float, norm: float) -> None:
    log_c, written = pull(kind, [norm, 2.0, 1.0], [1.0, 1.0, 1.0], [lam, 0.5, 0.5])
    torch.testing.assert_close(log_c.exp(), torch.tensor([1.0, 0.75, 1.0], dtype=torch.float64))
    torch.testing.assert_close(written[:, 0], torch.tensor([1.0, 0.75, 0.75**0.5, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [DevicePull, HostPull])
def test_hard_rescaling_comes_back_from_any_distance(kind: type) -> None:
    log_c, _ = pull(kind, [1e20, 1e-20, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    torch.testing.assert_close(log_c, torch.tensor([-20.0, 20.0, 0.0], dtype=torch.float64) * math.log(10))


@pytest.mark.parametrize("kind", [DevicePull, HostPull])
@pytest.mark.parametrize(("found_inf", "first"), [(1.0, 1.0), (0.0, 0.75)])
def test_a_step_that_was_skipped_is_not_followed_by_a_rescaling(kind: type, found_inf: float, first: float) -> None:
    _, written = pull(kind, [2.0] * 3, [1.0] * 3, [0.5] * 3, found_inf=torch.tensor([found_inf]))
    torch.testing.assert_close(written[0], first * torch.tensor([1.0, -2.0]).double())
