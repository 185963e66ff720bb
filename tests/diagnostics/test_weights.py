import copy
import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from pliant.diagnostics import measure, weights
from pliant.diagnostics.spectra import singular_values


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_norms_are_those_of_all_entries_together() -> None:
    tensors = [matrix(3, 4), matrix(5, 1).squeeze()]
    together = torch.cat([t.flatten() for t in tensors])
    assert weights.l1_norm(tensors) == pytest.approx(float(together.abs().sum()))
    assert weights.l2_norm(tensors) == pytest.approx(float(together.norm()))


def test_norms_of_half_precision_do_not_overflow() -> None:
    assert weights.l2_norm([torch.full((4,), 6e4, dtype=torch.float16)]) == pytest.approx(
        2 * float(torch.tensor(6e4).half())
    )


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)])
def test_isometry_deviation_is_the_matrix_formula_on_every_side(shape: tuple[int, int]) -> None:
    w = matrix(*shape)
    sigma = singular_values(w)
    by_outputs = float((w @ w.T - torch.eye(shape[0])).square().sum())
    by_inputs = float((w.T @ w - torch.eye(shape[1])).square().sum())
    assert weights.isometry_deviation(sigma, shape, side="out") == pytest.approx(by_outputs)
    assert weights.isometry_deviation(sigma, shape, side="in") == pytest.approx(by_inputs)
    assert weights.isometry_deviation(sigma, shape) == pytest.approx(min(by_outputs, by_inputs))


def test_isometries_do_not_deviate() -> None:
    q = torch.linalg.qr(matrix(6, 3)).Q
    assert weights.isometry_deviation(singular_values(q), (6, 3)) == pytest.approx(0, abs=1e-20)


def test_frobenius_error_is_the_squared_distance() -> None:
    w, reference = matrix(3, 4), matrix(3, 4, seed=1)
    assert weights.frobenius_error(w, reference) == pytest.approx(float((w - reference).norm() ** 2))


@given(st.integers(0, 10**6))
def test_wasserstein_is_the_best_pairing_and_never_exceeds_l2(seed: int) -> None:
    w, reference = matrix(2, 2, seed), matrix(2, 2, seed + 1)
    best = min(float((w.flatten()[list(order)] - reference.flatten()).norm()) for order in permutations(range(4)))
    assert weights.wasserstein_distance([w], [reference]) == pytest.approx(best)
    assert best <= weights.distance([w], [reference]) + 1e-12


def test_layer_balance_follows_the_definition() -> None:
    table = weights.layer_balance([2.0, 6.0, 1.0], [1.0, 2.0, 4.0])
    assert table[0][1] == pytest.approx(abs(6 / 2 - 2 / 1))
    assert table[0][2] == pytest.approx(abs(1 / 2 - 4 / 1))
    assert table[1][2] == pytest.approx(abs(1 / 6 - 4 / 2))
    assert table[2][1] == table[1][2]
    alike = weights.layer_balance([2.0, 1.0], [1.0, 1.0])
    assert alike[0][1] == alike[1][0] == 0.5
    assert [table[k][k] for k in range(3)] == [0, 0, 0]
    assert weights.layer_balance([0.0, 1.0], [0.0, 1.0])[0][1] == math.inf


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3), st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
       st.floats(0, 1))  # fmt: skip
def test_soft_rescaling_never_worsens_the_balance(norms: list[float], initial: list[float], lam: float) -> None:
    rescaled = [lam * first + (1 - lam) * now for now, first in zip(norms, initial, strict=True)]
    before, after = weights.layer_balance(norms, initial), weights.layer_balance(rescaled, initial)
    assert all(after[a][b] <= before[a][b] + 1e-9 for a in range(3) for b in range(3))


def test_product_bound_holds_for_a_chain() -> None:
    layers = [matrix(8, 5), matrix(8, 8, 1), matrix(3, 8, 2)]
    bound = weights.product_bound([float(singular_values(w)[0]) for w in layers])

    def network(x: torch.Tensor) -> torch.Tensor:
        for w in layers[:-1]:
            x = torch.relu(w @ x)
        return layers[-1] @ x

    a, b = matrix(5, 1, 3), matrix(5, 1, 4)
    slope = float((network(a) - network(b)).norm() / (a - b).norm())
    assert 0 < slope <= bound <= weights.product_bound([float(w.norm()) for w in layers])


CONVOLUTIONS: list[nn.Module] = [
    nn.Conv1d(2, 3, 5, padding=2),
    nn.Conv2d(2, 3, 3, padding=1),
    nn.Conv2d(2, 4, (3, 2), stride=2, padding=1, groups=2),
    nn.Conv2d(2, 3, 3, padding=2, dilation=2),
    nn.Conv2d(2, 3, 2, stride=2),
    nn.Conv3d(1, 2, 2, padding=1),
    nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1),
]


@pytest.mark.parametrize("places", ["alike", "apart"])
@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=str)
def test_bounds_hold_for_the_operator_of_a_convolution(layer: nn.Module, places: str) -> None:
    size = (2 - isinstance(layer, nn.Conv3d), *(4 if isinstance(layer, nn.Conv3d) else 7,) * (layer.weight.ndim - 2))
    layer = copy.deepcopy(layer).double()
    with torch.no_grad():
        layer.bias.zero_()
        torch.manual_seed(0)
        drawn = torch.randn_like(layer.weight)
        layer.weight.copy_(drawn.mean(tuple(range(2, drawn.ndim)), keepdim=True) if places == "alike" else drawn)
        units = torch.eye(math.prod(size), dtype=torch.float64).unflatten(1, size)
        operator = float(torch.linalg.matrix_norm(layer(units).flatten(1), 2))
    found = measure(layer, measures=["spectral_norm", "lipschitz_bound", "frobenius_bound"]).to_dict()
    assert operator <= found["lipschitz_bound"] * (1 + 1e-9)
    assert found["lipschitz_bound"] <= found["frobenius_bound"] * (1 + 1e-9)
    assert found["lipschitz_bound"] == pytest.approx(found["spectral_norm"] * layer.weight[0, 0].numel() ** 0.5)
    if places == "alike" and layer.stride[0] == 1:
        assert operator > found["spectral_norm"], "σ₁ of the matrix alone does not bound it"


OF_MATRICES = [
    "spectral_norm", "condition_number", "stable_rank", "isometry_deviation", "frobenius_error", "lipschitz_bound",
    "frobenius_bound", "layer_balance",
]  # fmt: skip


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
)
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.Linear(4, 3)], ids=["conv", "linear"])
def test_a_weight_that_is_computed_is_measured_as_it_is_used(
    layer: nn.Module, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    layer = copy.deepcopy(layer).double()  # The balance of orthogonal layers is zero up to rounding.
    model = nn.Sequential(wrap(copy.deepcopy(layer)), nn.Linear(3, 2).double())
    other = copy.deepcopy(model)
    nn.init.normal_(next(other[0].parametrizations.weight.parameters()))
    before = copy.deepcopy(model.state_dict())
    found = measure(model, reference=other, measures=OF_MATRICES)
    plain = []
    for wrapped in (model, other):
        bare = nn.Sequential(copy.deepcopy(layer), copy.deepcopy(wrapped[1]))
        with torch.no_grad():
            bare[0].weight.copy_(wrapped.eval()[0].weight)
        plain.append(bare)
    expected = measure(plain[0], reference=plain[1], measures=OF_MATRICES)
    assert found.values == pytest.approx(expected.values)
    assert found.skipped == {}
    assert all(value.equal(before[name]) for name, value in model.state_dict().items()), "reading it must not change it"


def test_weights_computed_by_hooks_have_no_bound() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)))
    found = measure(model, measures=["spectral_norm", "lipschitz_bound", "frobenius_bound"])
    for name in ("lipschitz_bound", "frobenius_bound"):
        assert found.skipped[name] == "the weight of 0 is computed from other tensors, whose norms do not bound it"
    assert found.values["spectral_norm"] > 0
    assert found.notes[0].startswith("hooks compute the weights of these layers, and the stored tensors are measured")


class Positions(nn.Module):
    """Positions of several rows, which are added and multiply nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layer = nn.Parameter(torch.zeros(5, 4)), nn.Linear(4, 3)


def test_parameters_that_may_not_be_weights_have_no_bound() -> None:
    found = measure(Positions(), measures=["spectral_norm", "lipschitz_bound", "frobenius_bound"])
    for name in ("lipschitz_bound", "frobenius_bound"):
        assert "positions may be a table of positions" in found.skipped[name]
    assert found.values["spectral_norm/positions"] == 0


def test_scales_shifts_and_counters_are_not_weights() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.LayerNorm([4, 6, 6]), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    model[0].register_parameter("place_bias", nn.Parameter(torch.zeros(6, 6)))
    model[0].register_parameter("steps", nn.Parameter(torch.ones(2, 2, dtype=torch.long), requires_grad=False))
    found = measure(model, measures=["spectral_norm", "lipschitz_bound", "isometry_deviation"])
    assert {row.layer for row in found.rows()} == {"", "0", "4"}
    assert found.values["lipschitz_bound"] == pytest.approx(
        3 * found.values["spectral_norm/0"] * found.values["spectral_norm/4"]
    )


def test_a_bilinear_weight_is_not_a_convolution() -> None:
    """Its third dimension is not one of places."""
    found = measure(nn.Bilinear(3, 4, 5), measures=["spectral_norm", "lipschitz_bound"]).to_dict()
    assert found["lipschitz_bound"] == pytest.approx(found["spectral_norm"])


def test_weights_that_may_be_several_matrices_have_no_singular_values() -> None:
    critics = nn.ParameterDict({"weight": torch.randn(5, 4, 3)})
    model = nn.Sequential(critics, nn.Linear(4, 3), nn.Conv1d(3, 2, 3))
    names = ["spectral_norm", "stable_rank", "condition_number", "isometry_deviation", "lipschitz_bound"]
    found = measure(model, reference=model, measures=[*names, "frobenius_error"])
    assert {row.layer for row in found.rows() if row.measure in names} == {"", "1", "2"}
    assert found.values["spectral_norm"] == pytest.approx(
        (found.values["spectral_norm/1"] + found.values["spectral_norm/2"]) / 2
    )
    assert found.skipped == {"lipschitz_bound": "the weight of 0 may hold several matrices, whose norms are unknown"}
    assert "frobenius_error/0" in found.values  # which no matrix is needed for
    assert any("are left out where singular values are measured: 0" in note for note in found.notes)
    alone = measure(critics, measures=names[:1])
    assert alone.skipped["spectral_norm"] == (
        "it needs a weight that is one matrix, and these may hold several each: weight"
    )


def test_mismatches_are_named() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \(2, 2\) and \(3,\)"):
        weights.frobenius_error(torch.ones(2, 2), torch.ones(3))
    with pytest.raises(ValueError, match=r"side: .* is not allowed; it must be one of"):
        weights.isometry_deviation(torch.ones(2), (2, 2), side="left")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same length, got 1 and 2"):
        weights.layer_balance([1.0], [1.0, 2.0])


def test_complex_numbers_count_with_both_parts() -> None:
    w, reference = torch.tensor([3 + 4j, 1j]), torch.tensor([0j, 1 + 1j])
    assert weights.l1_norm([w]) == 6
    assert weights.l2_norm([w]) == pytest.approx(26**0.5)
    assert weights.frobenius_error(w, reference) == pytest.approx(26)
    with pytest.raises(ValueError, match="must be real"):
        weights.wasserstein_distance([w], [reference])
