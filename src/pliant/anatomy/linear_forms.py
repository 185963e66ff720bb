"""Linear forms with exact coefficients, and systems of linear equations between them.

Scales are logarithms, so each call demands a linear equation with small integer coefficients. The equations are solved
in fractions: whether a parameter is fixed, tied or free does not depend on a tolerance.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

Form = Mapping[int, Fraction]
"""A linear form: the nonzero coefficients by unknown."""


def add(left: Form, right: Form, factor: Fraction = Fraction(1)) -> dict[int, Fraction]:
    """Return `left + factor * right`."""
    result = dict(left)
    for unknown, coefficient in right.items():
        total = result.get(unknown, Fraction(0)) + factor * coefficient
        if total:
            result[unknown] = total
        else:
            result.pop(unknown, None)
    return result


class FormTable:
    """A numbering of forms. Number 0 is the zero form."""

    def __init__(self) -> None:
        self._numbers: dict[frozenset[tuple[int, Fraction]], int] = {}
        self._forms: list[Form] = []
        self.number({})

    def __getitem__(self, number: int) -> Form:
        return self._forms[number]

    def __len__(self) -> int:
        return len(self._forms)

    def number(self, form: Form) -> int:
        """Return the number of a form, adding the form if it is new."""
        key = frozenset(form.items())
        if key not in self._numbers:
            self._numbers[key] = len(self._forms)
            self._forms.append(form)
        return self._numbers[key]


class System:
    """A system of homogeneous linear equations in reduced echelon form.

    Each row is solved for its last unknown in `order`: `solved[u]` is u as a form in unsolved unknowns. Unsolved
    unknowns are free.

    Args:
        equations: Forms that must be zero.
        order: The sort key of the unknowns.
    """

    def __init__(self, equations: Iterable[Form], order: Callable[[int], object] = lambda unknown: unknown) -> None:
        self.solved: dict[int, dict[int, Fraction]] = {}
        self.reasons: dict[int, frozenset[int]] = {}
        for position, equation in enumerate(equations):
            row, reasons = self._substitute(equation, frozenset({position}))
            if not row:
                continue
            unknown = max(row, key=order)  # type: ignore[arg-type]
            pivot = row.pop(unknown)
            solution = {other: -coefficient / pivot for other, coefficient in row.items()}
            for other, form in self.solved.items():
                if unknown in form:
                    factor = form.pop(unknown)
                    self.solved[other] = add(form, solution, factor)
                    self.reasons[other] |= reasons
            self.solved[unknown] = solution
            self.reasons[unknown] = reasons

    def _substitute(self, form: Form, reasons: frozenset[int]) -> tuple[dict[int, Fraction], frozenset[int]]:
        """Write a form in unsolved unknowns; add the equations used to `reasons`."""
        result: dict[int, Fraction] = {}
        for unknown, coefficient in form.items():
            if unknown in self.solved:
                result = add(result, self.solved[unknown], coefficient)
                reasons |= self.reasons[unknown]
            else:
                result = add(result, {unknown: coefficient})
        return result, reasons

    def reduce(self, form: Form) -> dict[int, Fraction]:
        """Write a form in unsolved unknowns. The result is zero if and only if the form is zero on all solutions."""
        return self._substitute(form, frozenset())[0]
