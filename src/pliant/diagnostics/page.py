"""A diagnosis as one self-contained page."""

import html
import math
from pathlib import Path

from pliant.diagnostics import measures
from pliant.diagnostics.diagnosis import CAUTION, Diagnosis, Finding

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #d4573b; --good: #3b8f5a; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.quiet { opacity: .7; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; }
.sign { border-left: .3rem solid var(--bad); padding: .1rem 1rem; margin: .8rem 0; }
.sign.absent { border-color: var(--good); }
.mark { color: var(--bad); font-weight: 600; }
"""


def page(diagnosis: Diagnosis, title: str) -> str:
    """Return a diagnosis as HTML that needs no other file.

    Args:
        diagnosis: What was found.
        title: What was looked at.
    """
    findings = diagnosis.findings()
    marked = {finding.measure: finding for finding in findings if finding.present}
    named = list(dict.fromkeys(row.measure for row in diagnosis.rows()))
    against = "against a reference" if diagnosis.reference else "without a reference"
    parts = [
        f"<h1>{_escape(title)}</h1>",
        f'<p class="quiet">{diagnosis.samples} samples, {against}.</p>',
        "<h2>Verdict</h2>",
        f"<p>{_escape(diagnosis.summary)}</p>",
        *(_sign(finding) for finding in sorted(findings, key=lambda finding: not finding.present)),
        *(f"<p>{_escape(f'{name} could not be judged: {why}.')}</p>" for name, why in diagnosis.unjudged().items()),
        f"<p>{_escape(CAUTION)}</p>",
        "<h2>The network</h2>",
        '<div class="wide">' + _totals(diagnosis, named, set(marked)) + "</div>",
        "<h2>By layer</h2>",
        '<div class="wide">' + _by_layer(diagnosis, named, marked) + "</div>",
    ]
    if diagnosis.skipped or diagnosis.notes:
        parts += ["<h2>Not measured, and notes</h2>", "<ul>"]
        parts += [f"<li>{_escape(name)}: {_escape(why)}</li>" for name, why in diagnosis.skipped.items()]
        parts += [f"<li>{_escape(note)}</li>" for note in diagnosis.notes] + ["</ul>"]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def write_page(diagnosis: Diagnosis, path: str | Path, title: str) -> None:
    """Write a diagnosis as an HTML file."""
    Path(path).write_text(page(diagnosis, title), encoding="utf-8")


def _sign(finding: Finding) -> str:
    kind = "sign" if finding.present else "sign absent"
    most = "Most in" if finding.present else "But in single layers:"
    where = f" {most} {_escape(', '.join(finding.layers[:3]))}." if finding.layers else ""
    against = f", reference {_number(finding.reference)}" if finding.reference is not None else ""
    bound = "above" if finding.sign.worse == "higher" else "below"
    says = f"<b>{_escape(finding.measure)}</b>: " + (
        _escape(finding.sign.says) if finding.present else f"no sign that {_escape(finding.sign.says)}"
    )
    return (
        f'<div class="{kind}">{says}: {_number(finding.value)}{against}; a sign {bound} {_number(finding.limit)}.'
        f'{where}<br><span class="quiet">{_escape(finding.sign.explains)}.</span></div>'
    )


def _totals(diagnosis: Diagnosis, named: list[str], marked: set[str]) -> str:
    head = ["measure", "network"] + (["reference"] if diagnosis.reference else []) + ["what it is", "from"]
    kinds = ["", "number"] + (["number"] if diagnosis.reference else []) + ["", ""]
    rows = []
    for name in named:
        if name not in diagnosis.values:
            continue
        record = measures.info(name.partition("@")[0])
        value = _number(diagnosis.values[name])
        cells = [_escape(name), f'<span class="mark">{value}</span>' if name in marked else value]
        if diagnosis.reference:
            cells.append(_number(diagnosis.reference.get(name)))
        rows.append([*cells, _escape(record.definition), _escape(record.source)])
    return _table(head, kinds, rows)


def _by_layer(diagnosis: Diagnosis, named: list[str], marked: dict[str, Finding]) -> str:
    layers = list(dict.fromkeys(row.layer for row in diagnosis.rows() if row.layer))
    columns = [name for name in named if any(f"{name}/{layer}" in diagnosis.values for layer in layers)]
    rows = []
    for layer in layers:
        cells = [_escape(layer)]
        for name in columns:
            value = _number(diagnosis.values.get(f"{name}/{layer}"))
            shown = name in marked and layer in marked[name].layers
            cells.append(f'<span class="mark">{value}</span>' if shown else value)
        rows.append(cells)
    return _table(["layer", *columns], ["", *["number"] * len(columns)], rows)


def _table(head: list[str], kinds: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        pairs = zip(cells, kinds, strict=True)
        return "<tr>" + "".join(f'<{tag} class="{kind}">{cell}</{tag}>' for cell, kind in pairs) + "</tr>"

    return "<table>\n" + "\n".join([line(head, "th"), *(line(row, "td") for row in rows)]) + "\n</table>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _escape(text: str) -> str:
    return html.escape(text)
