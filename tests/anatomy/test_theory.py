"""The statements of docs/proportionality-proofs.md, one test each."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pliant import SWR
from pliant.anatomy import Block, analyze
from pliant.anatomy.labels import single
from pliant.anatomy.linear_forms import System
from pliant.anatomy.solve import project
from pliant.anatomy.verify import run_graph
from pliant.methods.swr import rescaling_factor
from tests.anatomy.architectures import ALL
from tests.anatomy.test_architectures import prepared

# Systems of equations.

UNKNOWNS = 7


@st.composite
def systems(draw: st.DrawFn) -> list[dict[int, Fraction]]:
    """Equations with small whole coefficients, as scales have."""
    equations = []
    for _ in range(draw(st.integers(0, 6))):
        form = draw(
            st.dictionaries(st.integers(0, UNKNOWNS - 1), st.sampled_from([-2, -1, 1, 2]), min_size=1, max_size=4)
        )
        equations.append({unknown: Fraction(coefficient) for unknown, coefficient in form.items()})
    return equations


def as_matrix(equations: list[dict[int, Fraction]]) -> Tensor:
    matrix = torch.zeros(max(len(equations), 1), UNKNOWNS, dtype=torch.float64)
    for row, equation in enumerate(equations):
        for unknown, coefficient in equation.items():
            matrix[row, unknown] = float(coefficient)
    return matrix


def null_space(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of what a matrix takes to zero, as columns."""
    _, values, right = torch.linalg.svd(matrix, full_matrices=True)
    rank = int((values > 1e-9).sum())
    return right[rank:].T


@settings(max_examples=200, deadline=None)
@given(systems())
def test_elimination_finds_the_null_space(equations: list[dict[int, Fraction]]) -> None:
    system, basis = System(equations), null_space(as_matrix(equations))
    assert UNKNOWNS - len(system.solved) == basis.shape[1]
    for unknown in range(UNKNOWNS):
        # An unknown is zero in all solutions, or not, exactly as elimination says.
        assert (not system.reduce({unknown: Fraction(1)})) == bool((basis[unknown].abs() < 1e-9).all())
        for other, coefficient in system.solved.get(unknown, {}).items():
            assert other not in system.solved
            assert coefficient != 0
    for unknown, form in system.solved.items():
        expected = sum((float(c) * basis[o] for o, c in form.items()), torch.zeros(basis.shape[1], dtype=torch.float64))
        torch.testing.assert_close(basis[unknown], expected)


def nearest(equations: list[dict[int, Fraction]], levels: list[list[int]], wish: Tensor) -> Tensor:
    """The projection as it is defined, one least-squares problem after the other, in floating point."""
    basis = null_space(as_matrix(equations))
    point = torch.zeros(UNKNOWNS, dtype=torch.float64)
    for level, members in enumerate(levels):
        if not members or not basis.shape[1]:
            continue
        target = wish if level == 0 else torch.zeros(len(members), dtype=torch.float64)
        move = torch.linalg.pinv(basis[members], atol=1e-9, rtol=0.0) @ (target - point[members])
        point = point + basis @ move
        basis = basis @ null_space(basis[members])  # what can still be chosen without undoing it
    return point


@settings(max_examples=200, deadline=None)
@given(
    systems(), st.permutations(range(UNKNOWNS)), st.integers(1, UNKNOWNS), st.integers(0, UNKNOWNS), st.integers(0, 999)
)
def test_the_projection_is_the_nearest_solution(
    equations: list[dict[int, Fraction]], order: list[int], wishing: int, weighing: int, seed: int
) -> None:
    wishes, weights = order[:wishing], order[wishing : wishing + weighing]
    matrix = project(equations, UNKNOWNS, wishes, weights)
    wish = torch.randn(len(wishes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = nearest(equations, [wishes, weights, order[wishing + weighing :]], wish)
    torch.testing.assert_close(matrix @ wish, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(as_matrix(equations) @ matrix, torch.zeros(max(len(equations), 1), len(wishes)).double())


@settings(max_examples=100, deadline=None)
@given(systems(), st.integers(1, UNKNOWNS))
def test_untied_wishes_are_granted_exactly(equations: list[dict[int, Fraction]], wishing: int) -> None:
    wishes = list(range(wishing))
    matrix = project(equations, UNKNOWNS, wishes, [])
    between = System(equations, order=lambda unknown: (unknown not in wishes, unknown))
    tied = {u for u, form in between.solved.items() if u in wishes}
    tied |= {o for u, form in between.solved.items() if u in wishes for o in form}
    for unknown in set(wishes) - tied:
        assert matrix[unknown].tolist() == [float(unknown == other) for other in wishes]


# Proposition 1, both ways: a rescaling multiplies every tensor of the graph by a number if and only if it solves the
# system.


def is_multiple(after: Tensor, before: Tensor) -> bool:
    size = (before * before).sum()
    if size == 0:
        return bool((after == 0).all())
    factor = (after * before).sum() / size
    return bool((after - factor * before).abs().max() <= 1e-9 * (factor * before).abs().max())


@pytest.mark.parametrize("name", ["preact_resnet", "mixer", "shared", "squeeze_excite", "two_heads", "densenet_plain"])
def test_solutions_and_only_they_multiply_every_tensor(name: str) -> None:
    model, example = prepared(name)
    graph = analyze(model.eval(), example)
    before = run_graph(graph.graph, {})
    watched = [
        node
        for node, labels in graph.system.labels.items()
        if isinstance(labels, Tensor) and single(labels) is not None and node.meta["val"].is_floating_point()
    ]
    equations = [demand.form for demand in graph.demands]
    count = len(graph.blocks)

    def multiplies_all(logarithms: Tensor) -> bool:
        state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
        for block, factor in zip(graph.blocks, logarithms.exp().tolist(), strict=True):
            block.of(state[block.name]).mul_(factor)
        after = run_graph(graph.graph, state)
        return all(is_multiple(after[node], before[node]) for node in watched)

    wish = torch.randn(count, dtype=torch.float64)
    solution = project(equations, count, range(count), []) @ wish
    assert solution.norm() > 0.1
    assert multiplies_all(solution)
    assert not multiplies_all(wish)
    for number, alone in enumerate(torch.eye(count, dtype=torch.float64)):
        assert multiplies_all(alone) == all(number not in form for form in equations), graph.blocks[number]


# Proposition 3: rescaling alone descends a convex function, so that nothing oscillates.


def potential(ratios: Tensor, lam: float) -> Tensor:
    """Σ G(r), with G' = g and g(r) = −log(1 + λ(e^{−r} − 1)), by quadrature."""
    grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
    inside = -torch.log1p(lam * (torch.exp(-ratios[:, None] * grid) - 1)) * ratios[:, None]
    return torch.trapezoid(inside, grid, dim=1).sum()


@pytest.mark.parametrize(("name", "lam"), [("vit_relu", 0.3), ("vit_relu", 1.0), ("resnet18", 0.5), ("hf_llama", 1.0)])
def test_rescaling_alone_descends_the_potential(name: str, lam: float) -> None:
    model, example = prepared(name)
    swr = SWR(model, example, lam=lam)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(float(torch.empty(()).uniform_(-1, 1).exp()))
    rows = [swr.plan.targets.index(block) for block in swr.plan.wishes]
    height, moved = torch.tensor(torch.inf), torch.tensor(0.0)
    for _ in range(60):
        norms = swr._norms()
        lower = potential((norms / swr.initial_norms).log(), lam)
        assert lower <= height - 0.5 * moved + 1e-6
        step = swr.plan.matrix[rows] @ rescaling_factor(norms, swr.initial_norms, torch.tensor(lam).double()).log()
        height, moved = lower, (step**2).sum()
        swr.step()
    assert moved < 1e-12  # at the minimum, where the wishes that are left cannot be granted


# Proposition 4: the bound for free weights, whatever the network around them.


@pytest.mark.parametrize("lam", [0.02, 0.2])
def test_free_weights_stay_below_the_bound(lam: float) -> None:
    torch.manual_seed(0)
    model, example = ALL["resnet18"]()
    swr = SWR(model, example, lam=lam)
    free = model.stages[0].conv1.weight
    initial, push = float(free.detach().norm()), 0.5
    with torch.no_grad():
        for _ in range(300):
            free.mul_(1 + push / free.norm())  # no step of this size grows the norm faster
            swr.step()
            assert free.norm() <= initial + (1 - lam) * push / lam + 1e-4
    assert free.norm() > initial + 0.9 * (1 - lam) * push / lam


def test_tied_weights_are_balanced_and_keep_the_function() -> None:
    """Queries and keys cannot shrink together: SWR leaves the product that makes the scores, and evens it out."""
    torch.manual_seed(0)
    model, example = ALL["cross_attention"]()
    weights = model.attention.in_proj_weight
    swr = SWR(model, example, lam=0.5)
    with torch.no_grad():
        weights[:8] *= 4.0
        weights[8:16] *= 9.0
        before = model(*example)
        for _ in range(100):
            swr.step()
        after = model(*example)
    growth = dict(zip(swr.plan.wishes, (swr._norms() / swr.initial_norms).tolist(), strict=True))
    name = "attention.in_proj_weight"
    tied = [
        growth[block] for block in (Block("x.weight"), Block("y.weight"), Block(name, 0, 0, 8), Block(name, 0, 8, 16))
    ]
    assert tied == pytest.approx([36**0.25] * 4)
    torch.testing.assert_close(after / after.norm(), before / before.norm())
