"""`measure`, and the measurement that it returns: values by measure and layer, and the signs of lost plasticity."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import nn

from pliant._importing import naming_extra
from pliant._validation import check_choice
from pliant.diagnostics import measures as registry
from pliant.diagnostics.batches import LossFn, gather
from pliant.diagnostics.layer_values import Values
from pliant.diagnostics.measures import take
from pliant.diagnostics.probe import (
    Notes,
    Probe,
    Statistics,
    check_initialized,
    learning_alike,
    note_statistics,
    note_weights,
    resting,
    same_parameters,
)
from pliant.diagnostics.signs import Finding, Sign, healthy_limit
from pliant.distributed import whole_model

_LAYERS_ON_A_PAGE = 12
_COLUMNS_ON_A_PAGE = 6


def measure(
    model: nn.Module,
    data: Any = None,
    loss_fn: LossFn | Mapping[str, LossFn] | None = None,
    reference: nn.Module | None = None,
    *,
    measures: Sequence[str] | None = None,
    samples: int = 256,
    statistics: Statistics = "batch",
) -> "Measurement":
    """Take the measures that accompany loss of plasticity.

    `pliant.diagnose` does this and lets the network learn too, which decides.

    The model is measured in eval mode and left as it was: weights, buffers, gradients, modes and random generators. A
    measure without what it needs (labels, a loss, a reference) is skipped, and the result says so. If the model is
    sharded, all ranks call this, with the same data, and get the same values.

    Rare cases, most of which a note in the result names:

    - Layers are linear layers, products with a parameter (`@`, `addmm`) and convolutions. A layer that is written in
      another way, such as with `einsum`, is not seen.
    - An activation that Pliant does not know, such as `x * (x > 0)`, is not seen. The layer before it is then missing
      from the measures of hidden units. Without any activation, the layers' outputs are measured.
    - A parameter of three or more dimensions outside convolutions may hold several matrices. Singular values leave it
      out.
    - If a parametrization computes a weight, the computed weight is measured. If a hook computes it, the stored one is.
    - A parameter that is used under `no_grad` or in a reentrant checkpoint has no gradient to measure.
    - A tensor as long as the batch is taken as indexed by sample. A shared mask of that length is refused.
    - All activations count as hidden except those after the layer that is called last. If a critic is called after its
      actor, the actor's output counts as hidden.
    - Your hooks on the model's modules run during the measurement.

    Args:
        model: The network.
        data: A batch, or a loader whose first samples form one: a tensor, `(inputs, target)`, or a mapping (see
            `pliant.diagnostics.batches`). To ask whether the network can learn new data, pass the new data.
        loss_fn: `loss_fn(output, target)` with any reduction, or several losses by name. With several, values are keyed
            `measure@name`. A loss that weights samples, such as by class, needs reduction `sum` or `none` to keep the
            weights in the samples' gradients.
        reference: The network to compare with: the same network at its start, or a fresh one. Its gradients are taken
            by the parameters that are learnable in `model`.
        measures: Names from `pliant.diagnostics.measures.names()`. By default, all that need neither a full matrix
            of curvature nor an optimizer's step.
        samples: How many samples to take from a loader.
        statistics: What BatchNorm layers normalize with. "batch" uses the statistics of this batch, held constant, as a
            training step would. "running" uses the running statistics, which are meaningless for a fresh reference.

    Returns:
        The values, the signs, and the skipped measures.

    Raises:
        ValueError: If a measure is unknown, a model is not initialized or has a layer without units, or an argument is
            invalid.

    Example:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> found = measure(network, torch.eye(2), measures=["dead_fraction", "hessian_rank"])
        >>> found.skipped
        {'hessian_rank': 'it needs a loss_fn'}
    """
    check_choice("statistics", statistics, get_args(Statistics))
    chosen = registry.select(measures)
    model = check_initialized(model, "model")
    reference = check_initialized(reference, "reference") if reference is not None else None
    batch = gather(data, samples) if data is not None else None
    losses = _by_name(loss_fn)
    keep = reference is not None and any({"batch", "reference"} <= measure.needs for measure in chosen)
    notes: Notes = {}
    found: dict[str, Values] = {}
    beside: dict[str, Values] = {}
    skipped: dict[str, str] = {}
    with torch.inference_mode(False), ExitStack() as stack:
        for each in (model,) if reference is None or reference is model else (model, reference):
            stack.enter_context(whole_model(each))
        ours = stack.enter_context(resting(model, batch, statistics))
        notes |= note_weights(model, "the model") | note_statistics(model, ours, statistics)
        theirs = ours
        if reference is not None:
            # A resting model no longer shows which of its layers are frozen, so it is not put to rest twice.
            if reference is not model:
                theirs = stack.enter_context(resting(reference, batch, statistics))
            stack.enter_context(learning_alike(reference, model))
            notes |= note_weights(reference, "the reference") | note_statistics(reference, theirs, statistics)
        for place, (name, loss) in enumerate(losses.items()):
            run = [measure for measure in chosen if measure.of_loss] if place else chosen
            probe = Probe(model, ours, loss, loss_name=name, keep=keep)
            other = Probe(reference, theirs, loss, loss_name=name, keep=keep) if reference is not None else None
            taken = take(run, probe, other)
            found |= taken.values
            skipped |= taken.skipped
            if other is not None:
                taken = take([measure for measure in run if "reference" not in measure.needs], other)
                beside |= taken.values
                absent = ((m, why) for m, why in taken.skipped.items() if m not in skipped)
                notes |= {f"the reference's {m}": f"the reference has no {m}: {why}" for m, why in absent}
            notes |= probe.notes
    values = flatten(found)
    notes |= note_values(values)
    comparable = reference is None or same_parameters(model, reference)
    if not comparable:
        notes["comparable"] = (
            "the parameters of the reference have other names or shapes than the model's; its values are shown, but no "
            "sign is judged by them"
        )
    return Measurement(values, flatten(beside), skipped, tuple(notes.values()), batch.size if batch else 0, comparable)


def _by_name(loss_fn: LossFn | Mapping[str, LossFn] | None) -> dict[str, LossFn | None]:
    if not isinstance(loss_fn, Mapping):
        return {"": loss_fn}
    if not loss_fn:
        raise ValueError("loss_fn must be a loss, or a mapping with at least one loss, got an empty mapping")
    for name in loss_fn:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"loss_fn must have names without '/', which separates layers, got {name!r}")
    return dict(loss_fn)


class ScalarWriter(Protocol):
    """A writer of scalars, such as `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any:
        """Write one number."""


@dataclass(frozen=True)
class Row:
    """One value.

    Attributes:
        measure: The measure's name, with `@loss` if there are several losses.
        layer: The layer, or "" for the whole network.
        value: The network's value.
        reference: The reference's value, or `None`.
    """

    measure: str
    layer: str
    value: float
    reference: float | None


@dataclass(frozen=True)
class Measurement:
    """The values of a network, and the signs of lost plasticity in them.

    Attributes:
        values: The network's values, keyed `measure` for the whole network and `measure/layer` for a layer.
        reference: The reference's values, with the same keys; empty without a reference.
        skipped: Why each of the other measures could not be taken.
        notes: What else a reader must know.
        samples: The number of samples measured on, or 0.
        comparable: Whether the parameters of the reference have the names and shapes of the network's. If not, no sign
            is judged by the reference.
    """

    values: dict[str, float]
    reference: dict[str, float]
    skipped: dict[str, str]
    notes: tuple[str, ...]
    samples: int
    comparable: bool = True

    def to_dict(self) -> dict[str, float]:
        """Return all values. The reference's keys begin with `reference/`."""
        return {**self.values, **{f"reference/{key}": value for key, value in self.reference.items()}}

    def rows(self) -> list[Row]:
        """Return one row for each value."""
        split = ((key.partition("/"), key) for key in self.values)
        return [Row(name, layer, self.values[key], self.reference.get(key)) for (name, _, layer), key in split]

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows as a Parquet file: measure, layer, value, reference.

        Raises:
            ImportError: If pyarrow is not installed.
        """
        cells = [(row.measure, row.layer, row.value, row.reference) for row in self.rows()]
        write_table(path, {"measure": str, "layer": str, "value": float, "reference": float}, cells)

    def write_scalars(self, writer: ScalarWriter, step: int | None = None, prefix: str = "diagnosis") -> None:
        """Write all values to TensorBoard or the like, under `prefix/` and the keys of `to_dict`."""
        for key, value in self.to_dict().items():
            writer.add_scalar(f"{prefix}/{key}", value, step)

    def findings(self) -> list[Finding]:
        """Return all signs that can be judged, the largest first."""
        found = []
        for row, sign in self._signs():
            if sign.times(row.value, row.reference) is not None:
                sizes = {each.layer: self._size(sign, each) for each in self._judged() if each.measure == row.measure}
                by_layer = {layer: size for layer, size in sizes.items() if layer and size is not None}
                found.append(Finding(row.measure, sign, row.value, row.reference, by_layer))
        return sorted(found, key=lambda finding: -finding.size)

    def unjudged(self) -> dict[str, str]:
        """Return the measures whose sign cannot be judged, and why."""
        found = {}
        for row, sign in self._signs():
            if math.isnan(row.value):
                found[row.measure] = "its value is nan"
            elif sign.times(row.value, row.reference) is None:
                theirs = f"the reference's value is {_text(row.reference)}"
                lack = "the reference has no value" if self.comparable else "the reference has other parameters"
                lack = lack if self.reference else "there is no fresh network to compare with"
                found[row.measure] = theirs if row.reference is not None else lack
        return found

    def _size(self, sign: Sign, row: Row) -> float | None:
        times = sign.times(row.value, row.reference)
        return times / healthy_limit(row.measure) if times is not None else None

    def _judged(self) -> list[Row]:
        """Return one row for each value, without reference values that are not comparable."""
        return [row if self.comparable else replace(row, reference=None) for row in self.rows()]

    def _signs(self) -> list[tuple[Row, Sign]]:
        totals = [(row, registry.info(row.measure.partition("@")[0]).sign) for row in self._judged() if not row.layer]
        return [(row, sign) for row, sign in totals if sign is not None]

    @property
    def summary(self) -> str:
        """How many signs are beyond the range of healthy networks, in one sentence."""
        findings = self.findings()
        if not findings:
            return "No sign of lost plasticity could be judged."
        count = {grade: sum(each.grade == grade for each in findings) for grade in ("severe", "raised")}
        if not any(count.values()):
            judged = f"all {len(findings)} are" if len(findings) > 1 else f"{findings[0].measure} is"
            return f"No sign of lost plasticity was found: {judged} in the range of healthy networks."
        shown = " and ".join(f"{n} {'is' if n == 1 else 'are'} {grade}" for grade, n in count.items() if n)
        signs = "signs" if len(findings) > 1 else "sign"
        return f"Of {len(findings)} {signs} of lost plasticity, {shown}."

    def describe_signs(self) -> list[str]:
        """Return one line for each present sign, then one for the absent signs and one for those not judged."""
        findings = self.findings()
        lines = [f"{each.grade}: {each.sign.says}. {each.evidence}." for each in findings if each.present]
        absent = [each for each in findings if not each.present]
        if absent:
            lines.append(f"fine: {', '.join(each.measure for each in absent)}.")
        local = [f"{each.measure} ({each.written_layers})" for each in absent if each.layers]
        if local:
            lines.append(f"only in single layers: {'; '.join(local)}.")
        if self.unjudged():
            lines.append(f"not judged: {', '.join(f'{m} ({why})' for m, why in self.unjudged().items())}.")
        return lines

    def table(self, layers: bool = True) -> str:
        """Return the values as text: one line for each measure, then one block of lines for the layers."""
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

    def describe_gaps(self) -> list[str]:
        """Return one line for each reason why measures were skipped, and one for each note."""
        reasons = dict.fromkeys(self.skipped.values())
        skipped = [f"{', '.join(name for name, its in self.skipped.items() if its == why)}: {why}" for why in reasons]
        return [f"Skipped: {line}" for line in skipped] + [f"Note: {note}" for note in self.notes]

    def __str__(self) -> str:
        few = len({row.layer for row in self.rows()}) <= _LAYERS_ON_A_PAGE
        return "\n".join([self.table(layers=few), "", *self.describe_gaps(), self.summary, *self.describe_signs()])


def note_values(values: Mapping[str, float]) -> Notes:
    """Return a note that names the values that are NaN or infinite.

    A singular matrix has an infinite condition number, which needs no note.
    """
    bad = [
        f"{key} is {value}"
        for key, value in values.items()
        if not math.isfinite(value) and not (value == math.inf and "condition_number" in key)
    ]
    return {"values": f"not finite: {', '.join(bad)}"} if bad else {}


def flatten(found: Mapping[str, Values]) -> dict[str, float]:
    """Return values by measure and layer under flat keys: `measure` before `measure/layer`."""
    return {
        f"{measure}/{layer}" if layer else measure: value
        for measure, by_layer in found.items()
        for layer, value in sorted(by_layer.items(), key=lambda item: item[0] != "")
    }


def write_table(path: str | Path, columns: Mapping[str, type], cells: Sequence[Sequence[Any]]) -> None:
    """Write rows of cells as a Parquet file.

    Args:
        path: The file.
        columns: The type of each column: int, float or str.
        cells: The rows, each with one cell per column.

    Raises:
        ImportError: If pyarrow is not installed.
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
