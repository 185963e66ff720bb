"""What a diagnosis found: values by measure and layer, how they compare with a reference, and a verdict in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pliant._importing import naming_extra
from pliant.diagnostics import measures
from pliant.diagnostics.measure import Sign

CAUTION = (
    "No single sign explains loss of plasticity in every setting (Curvature §3), and the limits are conventions. "
    "Whether it is lost shows in learning: train this network and a fresh one on new data and compare."
)
"""What a reader of any verdict must know."""

_LAYERS_ON_A_PAGE = 12
_COLUMNS_ON_A_PAGE = 6


class ScalarWriter(Protocol):
    """What takes scalars by name and step: `torch.utils.tensorboard.SummaryWriter` and its likes."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Take one number."""


@dataclass(frozen=True)
class Row:
    """One value.

    Attributes:
        measure: The measure's name, with `@loss` if there are several losses.
        layer: The layer; empty for the whole network.
        value: The value.
        reference: The reference's value; `None` without one.
    """

    measure: str
    layer: str
    value: float
    reference: float | None


@dataclass(frozen=True)
class Finding:
    """A sign that was looked for.

    Attributes:
        measure: The measure's name.
        sign: What it is a sign of.
        value: The network's value.
        reference: The reference's; `None` without one.
        limit: The value beyond which it is a sign.
        layers: The layers that show it, the worst first.
    """

    measure: str
    sign: Sign
    value: float
    reference: float | None
    limit: float
    layers: tuple[str, ...]

    @property
    def present(self) -> bool:
        """Whether the network shows the sign."""
        return self.sign.present(self.value, self.reference)

    def __str__(self) -> str:
        against = f", reference {_text(self.reference)}" if self.reference is not None else ""
        where = f"; most in {', '.join(self.layers[:3])}" if self.layers else ""
        bound = "above" if self.sign.worse == "higher" else "below"
        return (
            f"{self.measure}: {self.sign.says} ({_text(self.value)}{against}; a sign {bound} {_text(self.limit)}"
            f"{where}). What is known: {self.sign.explains}."
        )


@dataclass(frozen=True)
class Diagnosis:
    """All that was measured of a network.

    Attributes:
        values: Values by `measure` for the whole network and `measure/layer` for a layer.
        reference: The same of the reference; empty without one.
        skipped: Measures that could not be taken, and why.
        notes: What else a reader must know.
        samples: The number of samples that were looked at; 0 without any.
        comparable: Whether the reference has parameters of the network's names and shapes; signs are not judged by one
            that has others.
    """

    values: dict[str, float]
    reference: dict[str, float]
    skipped: dict[str, str]
    notes: tuple[str, ...]
    samples: int
    comparable: bool = True

    def to_dict(self) -> dict[str, float]:
        """Return the values, flat: `measure` and `measure/layer`, the reference's under `reference/` and the same."""
        return {**self.values, **{f"reference/{key}": value for key, value in self.reference.items()}}

    def rows(self) -> list[Row]:
        """Return the values one by one."""
        split = ((key.partition("/"), key) for key in self.values)
        return [Row(name, layer, self.values[key], self.reference.get(key)) for (name, _, layer), key in split]

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows as a Parquet file: measure, layer, value, reference.

        Raises:
            ImportError: If pyarrow is missing; names the extra that has it.
        """
        cells = [(row.measure, row.layer, row.value, row.reference) for row in self.rows()]
        write_table(path, {"measure": str, "layer": str, "value": float, "reference": float}, cells)

    def write_scalars(self, writer: ScalarWriter, step: int | None = None, prefix: str = "diagnosis") -> None:
        """Give all values to a writer of scalars, such as TensorBoard's, under `prefix/` and the keys of `to_dict`."""
        for key, value in self.to_dict().items():
            writer.add_scalar(f"{prefix}/{key}", value, step)

    def findings(self) -> list[Finding]:
        """Return every sign that can be judged, present or not."""
        found = []
        for row, sign in self._signs():
            limit = sign.limit(row.reference)
            if limit is not None and not math.isnan(row.value):
                where = self._where(row.measure, sign)
                found.append(Finding(row.measure, sign, row.value, row.reference, limit, where))
        return found

    def unjudged(self) -> dict[str, str]:
        """Return the measures that are NaN, or whose reference allows no judgment, and why."""
        found = {}
        for row, sign in self._signs():
            if math.isnan(row.value):
                found[row.measure] = "it is nan"
            elif self.reference and sign.limit(row.reference) is None:
                theirs = f"the reference's is {_text(row.reference)}"
                lack = "the reference has none" if self.comparable else "the reference has other parameters"
                found[row.measure] = theirs if row.reference is not None else lack
        return found

    def _judged(self) -> list[Row]:
        """Return the values one by one, beside a reference only if it can be compared with."""
        return [row if self.comparable else replace(row, reference=None) for row in self.rows()]

    def _signs(self) -> list[tuple[Row, Sign]]:
        totals = [(row, measures.info(row.measure.partition("@")[0]).sign) for row in self._judged() if not row.layer]
        return [(row, sign) for row, sign in totals if sign is not None]

    def _where(self, measure: str, sign: Sign) -> tuple[str, ...]:
        rows = [row for row in self._judged() if row.measure == measure and row.layer]
        shown = [row for row in rows if sign.present(row.value, row.reference)]

        def excess(row: Row) -> float:
            if sign.factor is None:
                return row.value - (row.reference or 0.0)
            return row.value / (row.reference or 1.0)

        shown.sort(key=excess, reverse=sign.worse == "higher")
        return tuple(row.layer for row in shown)

    @property
    def verdict(self) -> str:
        """Which signs of lost plasticity there are, where, against which values, and what each is known to explain."""
        findings = self.findings()
        lines = [self.summary, *(f"- {finding}" for finding in findings if finding.present)]
        absent = [finding for finding in findings if not finding.present]
        local = [f"{finding.measure} ({', '.join(finding.layers[:3])})" for finding in absent if finding.layers]
        nowhere = [finding.measure for finding in absent if not finding.layers]
        if local:
            lines.append(f"Not present in the whole, but in single layers: {'; '.join(local)}.")
        if nowhere:
            lines.append(f"Not present: {', '.join(nowhere)}.")
        if self.unjudged():
            lines.append(f"Could not be judged: {', '.join(f'{m} ({why})' for m, why in self.unjudged().items())}.")
        return "\n".join([*lines, CAUTION])

    @property
    def summary(self) -> str:
        """How many signs of lost plasticity there are, in a sentence."""
        findings = self.findings()
        present = sum(finding.present for finding in findings)
        found = f"{present} of {len(findings)} signs of lost plasticity are present." if findings else ""
        lack = "Without a reference (the network as it was, or a fresh one) few signs can be judged."
        if not self.reference:
            return f"{lack} {found}".rstrip()
        return found or "No sign of lost plasticity could be judged."

    def table(self, layers: bool = True) -> str:
        """Return the values as text: one line a measure, then one block of lines for the layers."""
        named = dict.fromkeys(row.measure for row in self.rows())
        totals = [m for m in named if m in self.values]
        width = max([30, *map(len, totals)])
        lines = [" " * width + _cells("network", "reference" if self.reference else "")]
        lines += [m.ljust(width) + _cells(_text(self.values[m]), _text(self.reference.get(m))) for m in totals]
        if layers:
            per_layer = [m for m in named if any(key.startswith(f"{m}/") for key in self.values)]
            for start in range(0, len(per_layer), _COLUMNS_ON_A_PAGE):
                lines += ["", *self._block(per_layer[start : start + _COLUMNS_ON_A_PAGE])]
        return "\n".join(line.rstrip() for line in lines)

    def _block(self, chosen: list[str]) -> list[str]:
        rows = dict.fromkeys(row.layer for row in self.rows() if row.layer and row.measure in chosen)
        width = max(len(layer) for layer in rows)
        sizes = [max(len(measure), 10) for measure in chosen]
        lines = [" " * width + "  " + "  ".join(m.rjust(size) for m, size in zip(chosen, sizes, strict=True))]
        for layer in rows:
            cells = (_text(self.values.get(f"{measure}/{layer}")) for measure in chosen)
            line = "  ".join(cell.rjust(size) for cell, size in zip(cells, sizes, strict=True))
            lines.append(f"{layer.ljust(width)}  {line}")
        return lines

    def __str__(self) -> str:
        return self.show()

    def show(self, layers: bool | None = None) -> str:
        """Return all that there is to read: the table, what was skipped, notes, and the verdict.

        Args:
            layers: Whether the table has every layer; only if they are few if None.
        """
        few = len({row.layer for row in self.rows()}) <= _LAYERS_ON_A_PAGE
        parts = [self.table(layers=few if layers is None else layers), ""]
        if layers is None and not few:
            parts += ["By layer: table() in Python, --layers on the command line", ""]
        reasons = dict.fromkeys(self.skipped.values())
        for why in reasons:
            parts.append(f"Skipped: {', '.join(name for name, its in self.skipped.items() if its == why)}: {why}")
        parts += [f"Note: {note}" for note in self.notes]
        return "\n".join([*parts, "", self.verdict] if parts[2:] else [*parts, self.verdict])


def combine(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return values by measure and layer under flat keys."""
    return {
        f"{measure}/{layer}" if layer else measure: value
        for measure, by_layer in found.items()
        for layer, value in sorted(by_layer.items(), key=lambda item: item[0] != "")
    }


def write_table(path: str | Path, columns: Mapping[str, type], cells: Sequence[Sequence[Any]]) -> None:
    """Write rows of cells as a Parquet file.

    Args:
        path: Where to.
        columns: The type of each column: int, float or str.
        cells: The rows, each with as many cells as there are columns.

    Raises:
        ImportError: If pyarrow is missing; names the extra that has it.
    """
    with naming_extra("a Parquet file", "data"):
        import pyarrow
        from pyarrow import parquet
    kinds = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    by_column = list(zip(*cells, strict=True)) or [()] * len(columns)
    arrays = {name: list(values) for name, values in zip(columns, by_column, strict=True)}
    parquet.write_table(pyarrow.table(arrays, schema=schema), path)


def _cells(value: str, reference: str) -> str:
    return f"{value:>12}{reference:>12}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
