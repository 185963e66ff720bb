"""SWR's arithmetic on the host and on a device: both follow the definition."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pliant.methods.swr import FactorRule

MATRIX = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0.5, -0.5], [0, 0, 0]], dtype=torch.float64)
norms = st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3)
strengths = st.lists(st.floats(0, 1), min_size=3, max_size=3)


def rescale(
    on_host: bool, now: list[float], first: list[float], lam: list[float], **given: Any
) -> tuple[Tensor, Tensor]:
    """Return log c and what the factors make of tensors of [1, -2]."""
    initial, strength = torch.tensor(first, dtype=torch.float64), torch.tensor(lam, dtype=torch.float64)
    rule = FactorRule(initial, strength, MATRIX, on_host=on_host)
    options = {"rates": None, "found_inf": None} | given
    log_c, factors = rule([torch.tensor(n, dtype=torch.float64) for n in now], **options)
    written = torch.as_tensor(factors, dtype=torch.float64)[:, None] * torch.tensor([1.0, -2.0], dtype=torch.float64)
    return torch.as_tensor(log_c, dtype=torch.float64), written


@pytest.mark.parametrize("on_host", [False, True])
@given(norms, norms, strengths, strengths)
def test_every_tensor_is_multiplied_as_the_definition_says(
    on_host: bool, now: list[float], first: list[float], lam: list[float], rates: list[float]
) -> None:
    log_c, written = rescale(on_host, now, first, lam, rates=torch.tensor(rates, dtype=torch.float64))
    each = zip(now, first, lam, rates, strict=True)
    wished = [math.log((s * r * first + (1 - s * r) * now) / now) for now, first, s, r in each]
    torch.testing.assert_close(log_c, torch.tensor(wished, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    factors = (MATRIX @ torch.tensor(wished, dtype=torch.float64)).exp()
    torch.testing.assert_close(written, factors[:, None] * torch.tensor([1.0, -2.0]), rtol=1e-11, atol=0)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_weight_that_became_zero_is_left_alone_and_so_are_its_followers(on_host: bool) -> None:
    log_c, written = rescale(on_host, [0.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.0])
    torch.testing.assert_close(log_c, torch.tensor([0.0, math.log(0.75), 0.0], dtype=torch.float64))
    torch.testing.assert_close(written[:, 0], torch.tensor([1.0, 0.75, 0.75**0.5, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("on_host", [False, True])
def test_no_weight_is_pulled_beyond_its_initial_norm(on_host: bool) -> None:
    log_c, _ = rescale(on_host, [4.0, 2.0, 2.0], [1.0, 1.0, 1.0], [0.5, 0.5, 0.0], rates=torch.tensor([20.0, 1.0, 9.0]))
    torch.testing.assert_close(log_c.exp(), torch.tensor([0.25, 0.75, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_leaves_its_followers_alone(on_host: bool, lam: float, norm: float) -> None:
    log_c, written = rescale(on_host, [norm, 2.0, 1.0], [1.0, 1.0, 1.0], [lam, 0.5, 0.5])
    torch.testing.assert_close(log_c.exp(), torch.tensor([1.0, 0.75, 1.0], dtype=torch.float64))
    torch.testing.assert_close(written[:, 0], torch.tensor([1.0, 0.75, 0.75**0.5, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("on_host", [False, True])
def test_hard_rescaling_comes_back_from_any_distance(on_host: bool) -> None:
    log_c, _ = rescale(on_host, [1e20, 1e-20, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    torch.testing.assert_close(log_c, torch.tensor([-20.0, 20.0, 0.0], dtype=torch.float64) * math.log(10))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("found_inf", "first"), [(1.0, 1.0), (0.0, 0.75)])
def test_a_step_that_was_skipped_is_not_followed_by_a_rescaling(on_host: bool, found_inf: float, first: float) -> None:
    _, written = rescale(on_host, [2.0] * 3, [1.0] * 3, [0.5] * 3, found_inf=torch.tensor([found_inf]))
    torch.testing.assert_close(written[0], first * torch.tensor([1.0, -2.0]).double())
