"""The system of scales as a table for people."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from torch import fx

from pliant.anatomy.export import ModelGraph
from pliant.anatomy.linear_forms import Form, System
from pliant.anatomy.operators import APPROXIMABLE
from pliant.anatomy.scales import Demand, ScaleSystem

_MOST = 4
"""The number of factors of a product that are written out."""


def explain(graph: ModelGraph, system: ScaleSystem, demands: Sequence[Demand]) -> str:
    """Return a table with each parameter, its state, the relation of its factor to others, and the reason.

    States: *free*: any factor is allowed. *tied*: the factor is part of an equation between weights. *follows*: the
    factor is determined by others. *fixed*: the factor is 1.
    """
    weights = system.weights
    # Solve for biases and shifts first, so that the remaining equations are between weights.
    solution = System((demand.form for demand in demands), order=lambda n: (n not in weights, n))
    ties: dict[int, int] = {}
    for unknown, form in solution.solved.items():
        if unknown in weights and form:
            ties[unknown] = unknown
            for other in form:
                ties.setdefault(other, unknown)
    rows = []
    for number, block in enumerate(system.blocks):
        reduced = solution.reduce({number: Fraction(1)})
        if not reduced:
            state, relation = "fixed", "= 1"
        elif number in weights and number in ties:
            state, relation = "tied", _relation(system, ties[number], solution.solved[ties[number]])
        elif number in solution.solved:
            state, relation = "follows", f"= {_product(system, reduced)}"
        else:
            state, relation = "free", ""
        reasons = solution.reasons.get(ties.get(number, number) if state == "tied" else number, frozenset())
        rows.append((str(block), state, relation, _reason(demands, reasons, number)))
    for block, statistic in system.statistics.items():
        reduced = solution.reduce(statistic)
        relation = f"= {_product(system, reduced)}" if reduced else "= 1"
        rows.append((str(block), "follows" if reduced else "fixed", relation, "statistics of its input"))
    for name, output in system.outputs.items():
        reduced = solution.reduce(output)
        relation = f"× {_product(system, reduced)}" if reduced else "unchanged"
        rows.append((f"output {name}", "", relation, ""))
    lines = _table([("parameter", "state", "factor", "because of"), *rows])
    return "\n".join([*lines, *_notes(graph, system, demands)])


def _notes(graph: ModelGraph, system: ScaleSystem, demands: Sequence[Demand]) -> list[str]:
    """Return remarks on epsilons, approximated activations and dropped demands."""
    notes = []
    if system.epsilons:
        values = sorted(set(system.epsilons.values()))
        listed = ", ".join(f"{value:g}" for value in values if value) or "the smallest of its type"
        notes.append(
            f"{len(system.epsilons)} norm layers add an epsilon ({listed}): the function is kept as long as it is "
            "small compared to the variance."
        )
    if system.approximated:
        counts = Counter(_activation(graph, node) for node in system.approximated)
        listed = ", ".join(f"{count} × {name}" for name, count in counts.items())
        notes.append(f"Treated as relu, so the function is kept approximately: {listed}.")
    dropped = [demand for demand in system.demands if demand not in demands]
    if dropped:
        notes.append('Not kept, because of on_conflict="rescale": the scale of the operands of')
        notes += [f"  {demand.reason} ({_product(system, demand.form)})" for demand in dropped]
    return ["", *notes] if notes else []


def _activation(graph: ModelGraph, node: fx.Node) -> str:
    """Name an approximated activation by its operator, or by its module if it is written by hand."""
    name = graph.operator(node)
    return name if name in APPROXIMABLE else graph.module_type(node)


def _reason(demands: Sequence[Demand], reasons: frozenset[int], number: int) -> str:
    """Name the demands behind a row, preferring demands that contain the unknown itself."""
    chosen = [demands[i] for i in sorted(reasons) if number in demands[i].form]
    chosen = chosen or [demands[i] for i in sorted(reasons)]
    names = list(dict.fromkeys(demand.reason for demand in chosen))
    return "; ".join(names[:2]) + (f"; {len(names) - 2} more" if len(names) > 2 else "")


def _relation(system: ScaleSystem, unknown: int, form: Form) -> str:
    return f"{system.blocks[unknown]} = {_product(system, form)}"


def _product(system: ScaleSystem, form: Form) -> str:
    """Write the product of factors whose logarithm is the form."""
    terms = []
    for unknown, coefficient in sorted(form.items()):
        power = "" if coefficient == 1 else f"^{coefficient}"
        terms.append(f"{system.blocks[unknown]}{power}")
    rest = f" · … ({len(terms)} factors)" if len(terms) > _MOST else ""
    return " · ".join(terms[:_MOST]) + rest


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
