"""Render a diagnosis as one self-contained HTML page, in the look of the report."""

from pliant._html import escape, render_header, render_page, render_table
from pliant._html_charts import Curves, render_bars, render_curves
from pliant._version import __version__
from pliant.diagnosis.diagnose import COMPARE, Diagnosis
from pliant.diagnosis.remedies import Remedy
from pliant.diagnostics import Finding, Measurement, measures
from pliant.trial_result import Trial

_CAUTION = (
    "Signs explain a verdict; they do not replace it. Each is a multiple of what healthy networks reach, which the "
    "vertical line marks."
)


def render_diagnosis(diagnosis: Diagnosis, title: str) -> str:
    """Return a diagnosis as HTML.

    Args:
        diagnosis: The diagnosis.
        title: What was diagnosed.
    """
    signs = diagnosis.signs
    findings = signs.findings()
    certainty = {"plastic": "clear", "lost": "unclear"}.get(diagnosis.verdict or "", "")
    against = "beside a fresh network" if signs.reference else "without a fresh network"
    parts = [
        render_header("diagnosis"),
        "<main>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">measured on {signs.samples} samples, {against}</p>',
        f'<section class="answer {certainty}" aria-label="The answer">',
        f'<p class="verdict">{escape(_capital(diagnosis.answer))}.</p>',
        "<ul>",
        *(f"<li>{escape(_capital(line))}.</li>" for line in (diagnosis.trial.details if diagnosis.trial else [])),
        f"<li>{escape(diagnosis.explanation)}</li>",
        "</ul>",
        "</section>",
        *_render_trial(diagnosis.trial),
        "<h2>Signs</h2>",
        f'<p class="lead">{escape(_CAUTION)}</p>',
        *_render_signs(findings),
        *(f"<p>{escape(f'{name} could not be judged: {why}.')}</p>" for name, why in signs.unjudged().items()),
        *_render_remedies(diagnosis),
        "<h2>All measures</h2>",
        _render_totals(signs, findings),
        '<details class="numbers"><summary>By layer</summary>',
        _render_layers(signs, findings),
        "</details>",
        *_render_list("Skipped measures", [f"{name}: {why}" for name, why in signs.skipped.items()]),
        *_render_list("Notes", signs.notes),
        "</main>",
        f"<footer>Pliant {escape(__version__)}</footer>",
    ]
    return render_page(title, "\n".join(parts))


def _render_trial(trial: Trial | None) -> list[str]:
    if trial is None:
        return []
    sign = -1.0 if trial.value == "loss" else 1.0
    groups = [
        Curves(name, color, [[sign * value for value in curve] for curve in trial.curves(which)], dash)
        for name, color, which, dash in (
            ("this network", "var(--accent)", "aged", "none"),
            ("fresh network", "var(--muted)", "fresh", "5 3"),
        )
    ]
    random = trial.labels == "random"
    label = (
        f"{'Training' if random else 'Held-out'} {trial.value} of {len(trial.pairs)} copies of this network and of as "
        "many fresh networks"
    )
    return [
        f"<h2>Learning {'random labels' if random else 'the new data'}</h2>",
        f'<p class="lead">{escape(label)}, by step. Thick lines are means.</p>',
        render_curves(label, trial.steps, groups, "steps"),
    ]  # fmt: skip


def _render_signs(findings: list[Finding]) -> list[str]:
    """Show the signs that are raised somewhere; fold away those in the range of healthy networks."""
    noted = [_render_sign(each) for each in findings if each.present or each.layers]
    fine = [_render_sign(each) for each in findings if not (each.present or each.layers)]
    if not fine:
        return noted
    title = f"In the range of healthy networks: {len(fine)} of {len(findings)} signs"
    return [*noted, f"<details><summary>{title}</summary>", *fine, "</details>"]


def _render_sign(finding: Finding) -> str:
    says = finding.sign.says
    if not finding.present:
        says = f"no sign that {says}" + (", except in single layers" if finding.layers else "")
    bars = ""
    if finding.layers:
        bars = render_bars(f"{finding.measure} of each layer, as a multiple of healthy networks", finding.by_layer, 1.0)
    return (
        f'<div class="sign{"" if finding.present else " absent"}"><span class="grade {finding.grade}">{finding.grade}'
        f"</span><b>{escape(_capital(says))}</b>: {escape(finding.evidence)}.{bars}"
        f'<p class="quiet">{escape(_capital(finding.sign.explains))}.</p></div>'
    )


def _render_remedies(diagnosis: Diagnosis) -> list[str]:
    if diagnosis.verdict == "plastic":
        return ["<h2>What to try</h2>", "<p>Nothing needs to be done: continue from this network.</p>"]
    if not diagnosis.remedies:
        return []
    lead = f"Methods that act on these signs. {COMPARE}"
    return ["<h2>What to try</h2>", f'<p class="lead">{escape(lead)}</p>', *map(_render_remedy, diagnosis.remedies)]


def _render_remedy(remedy: Remedy) -> str:
    signs = f' <span class="quiet">({escape(", ".join(remedy.measures))})</span>' if remedy.measures else ""
    code = escape("\n".join(remedy.code))
    title = f"<h3>{escape(remedy.method)}{signs}</h3>"
    return f'{title}<p>{escape(_capital(remedy.does))}.</p><pre class="whole" tabindex="0">{code}</pre>'


def _render_totals(signs: Measurement, findings: list[Finding]) -> str:
    marked = {finding.measure for finding in findings if finding.present}
    columns = ["measure", "network", *(["fresh"] if signs.reference else []), "definition", "source"]
    rows = []
    for name in dict.fromkeys(row.measure for row in signs.rows() if row.measure in signs.values):
        record = measures.info(name.partition("@")[0])
        cells = [escape(name).replace("_", "_<wbr>"), _render_number(signs.values[name], name in marked)]
        if signs.reference:
            cells.append(_render_number(signs.reference.get(name)))
        rows.append([*cells, escape(record.definition), escape(record.source)])
    return render_table("Measures of the whole network", columns, rows, texts=("definition", "source"))


def _render_layers(signs: Measurement, findings: list[Finding]) -> str:
    marked = {finding.measure: finding.layers for finding in findings}
    layers = list(dict.fromkeys(row.layer for row in signs.rows() if row.layer))
    columns = list(dict.fromkeys(row.measure for row in signs.rows() if row.layer))
    rows = []
    for layer in layers:
        numbers = (
            _render_number(signs.values.get(f"{name}/{layer}"), layer in marked.get(name, ())) for name in columns
        )
        rows.append([escape(layer), *numbers])
    return render_table("Measures of each layer", ["layer", *columns], rows)


def _render_list(title: str, lines: list[str] | tuple[str, ...]) -> list[str]:
    items = [f"<li>{escape(line)}</li>" for line in lines]
    return [f"<h2>{title}</h2>", "<ul>", *items, "</ul>"] if items else []


def _render_number(value: float | None, mark: bool = False) -> str:
    text = "" if value is None else f"{value:.4g}"
    return f'<span class="mark">{text}</span>' if mark else text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
