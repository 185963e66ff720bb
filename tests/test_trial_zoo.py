"""The calibration of the trial and of the signs: what the kept zoo says, and a small form of it, made here."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import trial_zoo
from benchmarks.trial_zoo import DOCS, KEPT, learns, rank_correlation, read, separation, summarize, truths, write_limits
from benchmarks.zoo_networks import ARCHITECTURES, HEALTHY, make_network

from pliant.diagnostics import _healthy_limits

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def kept() -> Rows:
    return read(KEPT)


def check(rows: Rows) -> None:
    """Check all that the calibration promises."""
    assert rank_correlation(rows) >= 0.9
    assert separation(rows) >= 0.9
    known = truths(rows)
    trials = [row for row in rows if row["kind"] == "trial"]
    assert [row for row in trials if row["condition"] in HEALTHY and row["verdict"] == "lost"] == []
    worse = [row for row in trials if learns(known[row["network"], row["condition"]]) == "worse"]
    assert worse
    assert [row for row in worse if row["verdict"] != "lost"] == []


def test_the_kept_zoo_keeps_what_the_calibration_promises(kept: Rows) -> None:
    check(kept)
    trials = [row for row in kept if row["kind"] == "trial"]
    seeds = Counter((row["network"], row["condition"]) for row in trials if row["condition"] in HEALTHY)
    assert seeds == {(network, condition): 20 for network in ARCHITECTURES for condition in HEALTHY}


def test_random_labels_alone_would_not_order_the_networks(kept: Rows) -> None:
    assert rank_correlation(kept, "stress_gap") < rank_correlation(kept) - 0.3


def test_limits_and_summary_are_those_of_the_kept_zoo(kept: Rows, tmp_path: Path) -> None:
    write_limits(kept, tmp_path / "limits.py")
    assert (tmp_path / "limits.py").read_text() == Path(_healthy_limits.__file__).read_text()
    assert summarize(kept) in DOCS.read_text()


@pytest.mark.parametrize(
    ("architecture", "condition", "verdict"),
    [("mlp", "trained long", "plastic"), ("mlp tanh", "random labels", "lost"), ("mlp", "95 % of units dead", "lost")],
)
def test_a_trial_finds_the_condition_of_a_network(architecture: str, condition: str, verdict: str) -> None:
    model = make_network(architecture, condition, seed=100)
    found = trial_zoo.hold_trial(architecture, model, seed=100)
    assert found["verdict"] == verdict
    signs = trial_zoo.measure_signs(architecture, model, seed=100)
    assert (trial_zoo.strongest(signs, _healthy_limits.LIMITS) > 1.2) == (verdict == "lost")


@pytest.mark.long
def test_the_whole_zoo_made_again_keeps_what_the_calibration_promises(tmp_path: Path) -> None:
    trial_zoo.run(tmp_path / "zoo.jsonl")
    check(read(tmp_path / "zoo.jsonl"))
