"""Render a diagnosis as one self-contained HTML page."""

from pathlib import Path

from pliant._html import escape, render_page, render_table
from pliant.diagnostics import measures
from pliant.diagnostics.diagnosis import CAUTION, Diagnosis, Finding


def render_diagnosis(diagnosis: Diagnosis, title: str) -> str:
    """Return a diagnosis as HTML.

    Args:
        diagnosis: The diagnosis.
        title: What was diagnosed.
    """
    findings = diagnosis.findings()
    marked = {finding.measure: finding for finding in findings if finding.present}
    named = list(dict.fromkeys(row.measure for row in diagnosis.rows()))
    against = "against a reference" if diagnosis.reference else "without a reference"
    parts = [
        '<header class="bar"><span class="brand">Pliant <span class="quiet">diagnosis</span></span></header>',
        "<main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">{diagnosis.samples} samples, {against}</p>',
        f'<section class="answer {"unclear" if marked else "clear"}">',
        f'<p class="verdict">{escape(diagnosis.summary)}</p>',
        f"<p>{escape(CAUTION)}</p>",
        "</section>",
        "<h2>Signs</h2>",
        *(_render_sign(finding) for finding in sorted(findings, key=lambda finding: not finding.present)),
        *(f"<p>{escape(f'{name} could not be judged: {why}.')}</p>" for name, why in diagnosis.unjudged().items()),
        "<h2>The network</h2>",
        _render_totals(diagnosis, named, set(marked)),
        "<h2>By layer</h2>",
        _render_layers(diagnosis, named, marked),
    ]
    if diagnosis.skipped:
        parts += ["<h2>Skipped measures</h2>", "<ul>"]
        parts += [f"<li>{escape(name)}: {escape(why)}</li>" for name, why in diagnosis.skipped.items()] + ["</ul>"]
    if diagnosis.notes:
        parts += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in diagnosis.notes), "</ul>"]
    return render_page(title, "\n".join([*parts, "</main>"]))


def write_diagnosis(diagnosis: Diagnosis, path: str | Path, title: str) -> None:
    """Write a diagnosis as an HTML file."""
    Path(path).write_text(render_diagnosis(diagnosis, title), encoding="utf-8")


def _render_sign(finding: Finding) -> str:
    kind, says = "sign", finding.sign.says
    if not finding.present:
        kind = "sign absent"
        says = f"{says} only in single layers" if finding.layers else f"no sign that {says}"
    return (
        f'<div class="{kind}"><b>{escape(says)}</b>: {escape(finding.evidence)}.'
        f'<br><span class="quiet">{escape(finding.sign.explains)}.</span></div>'
    )


def _render_totals(diagnosis: Diagnosis, named: list[str], marked: set[str]) -> str:
    columns = ["measure", "network", *(["reference"] if diagnosis.reference else []), "definition", "source"]
    rows = []
    for name in named:
        if name not in diagnosis.values:
            continue
        record = measures.info(name.partition("@")[0])
        cells = [escape(name), _render_number(diagnosis.values[name], name in marked)]
        if diagnosis.reference:
            cells.append(_render_number(diagnosis.reference.get(name)))
        rows.append([*cells, escape(record.definition), escape(record.source)])
    return render_table("Measures of the whole network", columns, rows, texts=("definition", "source"))


def _render_layers(diagnosis: Diagnosis, named: list[str], marked: dict[str, Finding]) -> str:
    layers = list(dict.fromkeys(row.layer for row in diagnosis.rows() if row.layer))
    columns = [name for name in named if any(f"{name}/{layer}" in diagnosis.values for layer in layers)]
    rows = []
    for layer in layers:
        cells = [escape(layer)]
        for name in columns:
            value = diagnosis.values.get(f"{name}/{layer}")
            cells.append(_render_number(value, name in marked and layer in marked[name].layers))
        rows.append(cells)
    return render_table("Measures of each layer", ["layer", *columns], rows)


def _render_number(value: float | None, mark: bool = False) -> str:
    text = "" if value is None else f"{value:.4g}"
    return f'<span class="mark">{text}</span>' if mark else text
