"""The solution of a system of scales that is nearest to the wishes."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pliant.anatomy.linear_forms import Form, System


def project(equations: Iterable[Form], count: int, wishes: Sequence[int], weights: Collection[int]) -> Tensor:
    """Return the matrix from the wished values of some unknowns to the nearest solution of a system.

    "Nearest" minimizes three sums of squares, one after the other: the deviations from the wishes, then the values of
    the other weights, then the values of all other unknowns.

    Where no equation ties wishes to each other, the matrix is exact: each wish has the coefficient 1, and dependent
    unknowns have the coefficients of the equations.

    Args:
        equations: The system.
        count: The number of unknowns.
        wishes: The unknowns that have a wish.
        weights: The unknowns that should stay near zero unless they have a wish.

    Returns:
        float64, a row for each unknown and a column for each wish.

    Example:
        z₀ and z₁ have wishes, and z₂ is their sum:

        >>> from fractions import Fraction
        >>> project([{0: Fraction(1), 1: Fraction(1), 2: Fraction(-1)}], 3, [0, 1], [])
        tensor([[1., 0.],
                [0., 1.],
                [1., 1.]], dtype=torch.float64)
    """
    ranks = [2] * count
    for unknown in weights:
        ranks[unknown] = 1
    for unknown in wishes:
        ranks[unknown] = 0
    system = System(equations, order=lambda unknown: (ranks[unknown], unknown))
    result = torch.zeros(count, len(wishes), dtype=torch.float64)
    tied = {unknown: form for unknown, form in system.solved.items() if ranks[unknown] == 0}
    result[list(wishes)] = _onto_null_space(tied, wishes)
    for rank in (1, 2):
        members = [unknown for unknown in range(count) if ranks[unknown] == rank]
        solved = [unknown for unknown in members if unknown in system.solved]
        free = [unknown for unknown in members if unknown not in system.solved]
        # members = known + slopes · free, where known follows from the unknowns of lower rank.
        forms = torch.zeros(len(solved), count, dtype=torch.float64)
        for row, unknown in enumerate(solved):
            for other, coefficient in system.solved[unknown].items():
                forms[row, other] = float(coefficient)
        known = forms @ result  # the rows of free members are still zero
        slopes = forms[:, free]
        if free and bool(slopes.any()):
            gram = slopes.T @ slopes + torch.eye(len(free), dtype=torch.float64)
            result[free] = -torch.linalg.solve(gram, slopes.T @ known)
        result[solved] = known + slopes @ result[free]
    return result


def _onto_null_space(tied: Mapping[int, Form], unknowns: Sequence[int]) -> Tensor:
    """Return the orthogonal projection onto the solutions of z_u = form_u, block by block of connected unknowns."""
    positions = {unknown: position for position, unknown in enumerate(unknowns)}
    projection = torch.eye(len(unknowns), dtype=torch.float64)
    for group in _groups(tied):
        columns = sorted({positions[u] for u in group} | {positions[o] for u in group for o in tied[u]})
        rows = torch.zeros(len(group), len(columns), dtype=torch.float64)
        for row, unknown in enumerate(group):
            rows[row, columns.index(positions[unknown])] = 1.0
            for other, coefficient in tied[unknown].items():
                rows[row, columns.index(positions[other])] = -float(coefficient)
        where = torch.tensor(columns)
        if len(columns) == len(group):  # as many equations as unknowns: all of them are zero
            block = torch.zeros(len(columns), len(columns), dtype=torch.float64)
        else:
            basis = torch.linalg.qr(rows.T).Q
            block = torch.eye(len(columns), dtype=torch.float64) - basis @ basis.T
        projection[where[:, None], where] = block
    return projection


def _groups(tied: Mapping[int, Form]) -> list[list[int]]:
    """Group the rows of a system that share an unknown."""
    groups: list[tuple[set[int], list[int]]] = []
    for unknown, form in tied.items():
        touched, members = {unknown, *form}, [unknown]
        apart = []
        for other_touched, other_members in groups:
            if touched & other_touched:
                touched |= other_touched
                members = other_members + members
            else:
                apart.append((other_touched, other_members))
        groups = [*apart, (touched, members)]
    return [members for _, members in groups]
