import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pliant.diagnostics import curvature, spectra
from pliant.diagnostics.per_sample.gradient_gram import gradient_gram
from pliant.diagnostics.spectra import (
    as_matrix,
    condition_number,
    decompose_gram,
    effective_rank,
    singular_values,
    srank,
    stable_rank,
)
from tests.diagnostics.networks import network
from tests.reference.gradients import per_sample_gradients

values = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))


def orthogonal(rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64)).Q[:rows, :columns]


def test_orthogonal_matrix_has_full_rank_by_every_definition() -> None:
    sigma = singular_values(3 * orthogonal(20, 20))
    assert effective_rank(sigma) == pytest.approx(20)
    assert stable_rank(sigma) == pytest.approx(20)
    assert condition_number(sigma) == pytest.approx(1)
    assert srank(sigma) == 20


def test_rank_one_matrix_has_rank_one_by_every_definition() -> None:
    sigma = singular_values(torch.outer(torch.randn(7).double(), torch.randn(5).double()))
    assert effective_rank(sigma) == pytest.approx(1)
    assert stable_rank(sigma) == pytest.approx(1)
    assert srank(sigma) == 1
    assert condition_number(sigma) > 1e14
    single = torch.outer(torch.randn(7), torch.randn(5))
    assert condition_number(singular_values(single)) > 1e6
    assert singular_values(single).dtype == torch.float64


def test_diagonal_matrix_by_hand() -> None:
    sigma = singular_values(torch.diag(torch.tensor([1.0, 4.0, 2.0, 1.0], dtype=torch.float64)))
    assert sigma.tolist() == pytest.approx([4, 2, 1, 1])
    shares = [0.5, 0.25, 0.125, 0.125]
    assert effective_rank(sigma) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert stable_rank(sigma) == pytest.approx(22 / 16)
    assert condition_number(sigma) == pytest.approx(4)
    assert [srank(sigma, delta) for delta in (0.5, 0.49, 0.25, 0.125, 0.1, 0.0)] == [1, 2, 2, 3, 4, 4]


def test_srank_of_many_equal_values_is_the_tie_that_rounding_would_break() -> None:
    for n in (100, 200, 700):
        assert srank(torch.full((n,), 0.1)) == n * 99 // 100


def test_zero_matrix_has_no_rank_and_no_condition() -> None:
    sigma = singular_values(torch.zeros(3, 4))
    assert (effective_rank(sigma), srank(sigma), stable_rank(sigma)) == (0, 0, 0)
    assert condition_number(sigma) == math.inf


@given(values, st.floats(1e-3, 1e3))
def test_ranks_do_not_depend_on_scale_and_lie_between_one_and_all(sigma: Tensor, scale: float) -> None:
    for rank in (effective_rank, stable_rank):
        assert 1 - 1e-9 <= rank(sigma) <= len(sigma) + 1e-9
        assert rank(scale * sigma) == pytest.approx(rank(sigma), rel=1e-9)


@given(values, st.floats(0, 0.9))
def test_srank_is_the_first_that_reaches_the_share(sigma: Tensor, delta: float) -> None:
    k = srank(sigma, delta)
    ordered = sorted(sigma.tolist(), reverse=True)
    assert sum(ordered[:k]) >= (1 - delta) * sum(ordered) * (1 - 1e-9)
    assert k == 1 or sum(ordered[: k - 1]) < (1 - delta) * sum(ordered) * (1 + 1e-9)


def test_convolutions_are_matrices_of_output_channels() -> None:
    weight = torch.randn(4, 3, 5, 5)
    assert as_matrix(weight).shape == (4, 75)
    assert as_matrix(weight.to(memory_format=torch.channels_last)).equal(weight.reshape(4, 75))
    assert as_matrix(weight.bfloat16()).dtype == torch.float32


def test_non_finite_entries_give_non_finite_values_not_a_failed_decomposition() -> None:
    sigma = singular_values(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
    assert sigma.isnan().all()
    with pytest.raises(ValueError, match="sigma must be finite"):
        srank(sigma)


def test_arguments_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match=r"delta: 1 is not allowed; it must be a number that is in \[0, 1\)"):
        srank(torch.ones(2), 1)
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \(3,\)"):
        singular_values(torch.ones(3))


def test_gram_measures_are_those_of_the_gradients_themselves() -> None:
    model, batch, loss_fn = network("mlp")
    gram = gradient_gram(model, batch, loss_fn).total
    g = per_sample_gradients(model, batch, loss_fn)  # [M, d]
    sigma = torch.linalg.svdvals(g)
    assert spectra.gradient_condition_number(decompose_gram(gram)) == pytest.approx(
        float(sigma[0] / sigma[-1]), rel=1e-6
    )
    shares = sigma / sigma.sum()
    entropy = -float((shares * shares.log()).sum())
    assert spectra.gradient_effective_rank(decompose_gram(gram)) == pytest.approx(math.exp(entropy), rel=1e-9)
    assert spectra.hessian_rank(decompose_gram(gram)) == curvature.relative_rank(g.T @ g / len(g), batch.size)


@pytest.mark.parametrize("delta", [0.01, 0.3])
def test_overlap_is_that_of_the_matrices_themselves(delta: float) -> None:
    model, batch, loss_fn = network("mlp")
    gram = gradient_gram(model, batch, loss_fn).total
    g = per_sample_gradients(model, batch, loss_fn)
    left, sigma, _ = torch.linalg.svd(g.T, full_matrices=False)
    values = sigma**2
    top = int((values.cumsum(0) < (1 - delta) * values.sum()).sum()) + 1
    h = left[:, :top] @ torch.diag(values[:top]) @ left[:, :top].T
    mean = g.mean(0)
    expected = float(mean @ h @ mean / (mean.norm() * (h @ mean).norm()))
    assert spectra.gradient_overlap(decompose_gram(gram), delta) == pytest.approx(expected, rel=1e-9)
    assert 0 < expected < 1


def test_overlap_of_equal_gradients_is_one_and_of_zero_gradients_is_nan() -> None:
    assert spectra.gradient_overlap(decompose_gram(torch.ones(5, 5))) == pytest.approx(1)
    assert math.isnan(spectra.gradient_overlap(decompose_gram(torch.zeros(5, 5))))


def test_duplicate_samples_add_no_direction() -> None:
    model, batch, loss_fn = network("mlp")
    doubled = batch.select(torch.arange(batch.size).repeat(2))
    gram = gradient_gram(model, doubled, loss_fn).total
    assert spectra.gradient_condition_number(decompose_gram(gram)) == math.inf
    single = spectra.hessian_rank(decompose_gram(gradient_gram(model, batch, loss_fn).total))
    assert spectra.hessian_rank(decompose_gram(gram)) == pytest.approx(single / 2)


def test_ranks_of_non_finite_gradients_are_nan() -> None:
    gram = torch.full((3, 3), math.nan)
    values = [
        spectra.hessian_rank(decompose_gram(gram)),
        spectra.gradient_condition_number(decompose_gram(gram)),
        spectra.gradient_effective_rank(decompose_gram(gram)),
        spectra.gradient_overlap(decompose_gram(gram)),
    ]
    assert all(math.isnan(value) for value in values)
