"""The long tables beside the pages: docs/results/claims.csv, numbers.csv and runs.csv."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from benchmarks.reproduction.kept import estimate, kept_runs, load_kept
from benchmarks.reproduction.results_tables import DIVISIONS, kept_names, scale_of
from benchmarks.reproduction.statements import (
    SECTIONS,
    claimed_range,
    describe_number,
    find_margin,
    has_own_threshold,
    judge_paper,
)
from pliant.experiments.store import Run


def write_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Write rows as CSV, with four digits and empty cells for what is unknown."""

    def cell(value: Any) -> Any:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return ""
        return f"{value:.4g}" if isinstance(value, float) else value

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(value) for value in row] for row in rows)
    return text.getvalue()


def claims_csv() -> str:
    """List every statement with its numbers and verdict."""
    head = [
        "paper",
        "figure",
        "column",
        "division",
        "scale",
        "claim",
        "counted",
        "check",
        "main",
        "number",
        "low",
        "high",
    ]
    head += ["threshold_is_ours", "margin", "published", "mean", "half_interval", "late_mean", "late_half", "seeds"]
    rows: list[Sequence[Any]] = [[*head, "diverged", "p", "q", "verdict", "seeds_needed", "reason", "recipe"]]
    for paper in SECTIONS:
        for one in judge_paper(paper):
            said, found, late = one.statement, one.found, one.late
            tested = one.verdict != "untested"
            low, high = claimed_range(said)
            rows.append(
                [
                    *(SECTIONS[paper], said["figure"], said["column"], DIVISIONS[one.small]),
                    scale_of(said) if tested else "",
                    said["claim"],
                    *(int(one.counts), int(said.get("check", False)), int(said.get("main", False))),
                    *(describe_number(said) if said["recipe"] else "", low, high, int(has_own_threshold(said))),
                    find_margin(said, one.published) if tested else None,
                    one.published,
                    *((found.mean, found.half) if found else (None, None)),
                    *((late.mean, late.half) if late else (None, None)),
                    *(
                        len(one.samples),
                        one.diverged,
                        one.p,
                        one.q,
                        one.verdict,
                        one.needed,
                        one.reason,
                        said["recipe"],
                    ),
                ]
            )
    return write_csv(rows)


def numbers_csv() -> str:
    """List every number of every label of every kept experiment."""
    rows: list[Sequence[Any]] = [["experiment", "label", "number", "published", "mean", "half_interval", "seeds"]]
    for name in kept_names():
        kept = load_kept(name)
        assert kept is not None
        for label in kept.labels:
            known = sorted({number for numbers in kept.numbers[label].values() for number in numbers})
            for number in known:
                found = estimate(kept.values(label, number).values())
                published = kept.published[label][0] if number == kept.headline and label in kept.published else None
                rows.append([name, label, number, published, found.mean, found.half, found.count])
    return write_csv(rows)


@cache
def list_runs() -> list[list[Any]]:
    """Return name, runs, recorded runs, hours, first and last day, commits and versions of each kept experiment."""
    rows = []
    for name in kept_names():
        runs, _ = kept_runs(name)
        made = [run for run in runs if run.events]
        days = sorted(datetime.fromisoformat(run.events[-1]["time"]).date().isoformat() for run in made)
        environments = [run.events[0]["environment"] for run in made]
        commits = sorted({str(each.get("git") or "unknown")[:10] for each in environments})
        versions = sorted({f"pliant {each['pliant']}, torch {each['torch']}" for each in environments})
        hours = sum(count_seconds(run) for run in made) / 3600
        ends = [days[0], days[-1]] if days else ["", ""]
        rows.append([name, len(runs), len(made), hours, *ends, " ".join(commits), "; ".join(versions)])
    return rows


def count_seconds(run: Run) -> float:
    """Return the seconds of a run's last attempt, which is the whole run unless it was interrupted."""
    return float(run.events[-1].get("seconds", 0.0))


def runs_csv() -> str:
    """List the kept experiments with when and by what they were made."""
    head = ["experiment", "runs", "recorded", "cpu_hours", "first_day", "last_day", "commits", "versions"]
    return write_csv([head, *list_runs()])


def provenance_block(_: str) -> str:
    """Say how many runs there are, and what is recorded of their making."""
    rows = list_runs()
    runs, made = sum(row[1] for row in rows), sum(row[2] for row in rows)
    said = f"{runs} runs in {len(rows)} archives."
    if not made:
        return f"{said} They were packed before archives recorded hours, versions and commits."
    hours = sum(row[3] for row in rows)
    commits = sorted({commit for row in rows for commit in row[6].split()})
    versions = sorted({version for row in rows for version in row[7].split("; ") if version})
    days = sorted(day for row in rows for day in row[4:6] if day)
    return (
        f"{said} {made} of them record how they were made: {hours:.1f} CPU hours, {days[0]} to {days[-1]}, commits "
        f"{', '.join(commits)}, {'; '.join(versions)}. Older runs were packed before archives recorded this."
    )


FILES = {"claims.csv": claims_csv, "numbers.csv": numbers_csv, "runs.csv": runs_csv}
