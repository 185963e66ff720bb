"""The decision between continuing, a remedy and training from scratch, and the words for it."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.experiments.archive import unpack
from pliant.experiments.halving import Tried
from pliant.experiments.report import page
from pliant.experiments.report.comparison import Comparison, Contender
from pliant.experiments.report.grouping import compare_folders
from pliant.experiments.report.treatment import CONTINUE, SCRATCH, Action, TreatmentSection
from pliant.experiments.store import Run
from tests.experiments.helpers import small

NOISE = (0.002, -0.002, 0.001, 0.0, -0.001)
REMEDY = "shrink_perturb(lam=0.4)"


def around(mean: float, noise: Sequence[float] = NOISE) -> dict[int, float]:
    return {seed: mean + each for seed, each in enumerate(noise)}


OTHER = (-0.002, 0.001, 0.002, -0.001, 0.0)
THIRD = (0.001, 0.002, -0.001, -0.002, 0.0)


@pytest.mark.parametrize(
    ("remedy", "continued", "scratch", "time", "action"),
    [
        (0.70, 0.60, 0.70, 1.0, "apply"),  # as good as scratch
        (0.70, 0.60, 0.65, 1.0, "apply"),  # better than scratch
        (0.70, 0.60, 0.75, 1.0, "scratch"),  # scratch is better and costs no more
        (0.70, 0.60, 0.75, 0.4, "apply"),  # scratch is better, but the remedy is much cheaper
        (0.70, 0.60, 0.75, math.nan, "scratch"),
        (0.70, 0.60, 0.705, 1.0, "scratch"),  # by little, but significantly
        (0.60, 0.60, 0.75, 1.0, "scratch"),
        (0.60, 0.60, 0.75, 0.1, "scratch"),  # a cheap remedy that gains nothing does not count
        (0.60, 0.60, 0.55, 1.0, "continue"),
        (0.50, 0.60, 0.55, 1.0, "continue"),
        (0.60, 0.60, 0.60, 1.0, "continue"),
    ],
)
def test_decision(remedy: float, continued: float, scratch: float, time: float, action: Action) -> None:
    results = {CONTINUE: around(continued), REMEDY: around(remedy, OTHER), SCRATCH: around(scratch, THIRD)}
    assert make_section(results, {CONTINUE: time, REMEDY: time, SCRATCH: 1.0}).action == action


def test_a_gain_within_the_noise_is_not_advised() -> None:
    noisy = {0: 0.70, 1: 0.55, 2: 0.71, 3: 0.56, 4: 0.68}
    assert make_section({CONTINUE: around(0.60), REMEDY: noisy, SCRATCH: around(0.60, THIRD)}).action == "continue"


@given(st.lists(st.floats(0, 1), min_size=3, max_size=6), st.lists(st.floats(0, 1), min_size=3, max_size=6))
def test_advice_has_an_interval_that_excludes_zero(remedy: list[float], continued: list[float]) -> None:
    values = {CONTINUE: dict(enumerate(continued)), REMEDY: dict(enumerate(remedy)), SCRATCH: around(0.5, THIRD)}
    verdict = make_section(values).verdict
    assert verdict is not None
    if verdict.action == "apply" and not math.isnan(verdict.gain.interval.low):
        assert verdict.gain.interval.low > 0


def make_section(
    results: dict[str, dict[int, float]],
    times: dict[str, float] | None = None,
    old: dict[str, float] | None = None,
    left_out: Sequence[str] = (),
) -> TreatmentSection:
    """A section of runs that end with these accuracies; curves rise linearly over four epochs."""

    def make_run(label: str, seed: int, accuracy: float) -> Run:
        result = {"final_test_accuracy": accuracy} | ({"final_old_test_accuracy": old[label]} if old else {})
        config = small(label=label, seed=seed, fresh=label == SCRATCH, methods=())
        run = Run(Path("absent") / "runs" / f"{label}-{seed}", config, "finished", result, "")
        curve = [{"epoch": epoch, "step": 10 * epoch, "test_accuracy": accuracy * epoch / 4} for epoch in range(1, 5)]
        curve[0] |= {"entry_test_accuracy": 0.1, "entry_old_test_accuracy": 0.9 if old else math.nan}
        run.__dict__["records"] = curve
        return run

    contenders = tuple(
        Contender(
            label,
            "",
            "fresh" if label == SCRATCH else "vanilla" if label == CONTINUE else "method",
            label,
            tuple(make_run(label, seed, value) for seed, value in values.items()),
        )
        for label, values in results.items()
    )
    comparison = Comparison("worn.pt", "final_test_accuracy", contenders)
    tried = [Tried(REMEDY, (0.7, 0.6)), Tried("fire", (0.5,))]
    code: dict[Action, str] = {"apply": "apply it", "continue": "go on", "scratch": "start anew"}
    known = dict.fromkeys(results, 1.0) if times is None else times
    return TreatmentSection(comparison, REMEDY, tried, known, left_out, code)


def test_the_sentence_names_remedy_gain_and_cost() -> None:
    results = {CONTINUE: around(0.60), REMEDY: around(0.621, OTHER), SCRATCH: around(0.624, THIRD)}
    section = make_section(
        results, {CONTINUE: 0.4, REMEDY: 0.4, SCRATCH: 1.0}, left_out=["The budget left no time for swr."]
    )
    assert section.answer.verdict == (
        "Apply shrink_perturb (lam=0.4) tonight: +2.1 points over continuing, 0.3 points below training from scratch "
        "at 40 % of its cost."
    )
    assert section.answer.certainty == "clear"
    assert section.code == "apply it"
    text = str(section.answer)
    assert "chosen from 2 settings in 2 rounds on held-out data; it was then tested on 5 other seeds" in text
    assert "the remedy against continuing +2.10 points (95 % interval +" in text
    assert "The budget left no time for swr." in text
    assert "does not reach the mean accuracy of training from scratch within 4 epochs" in text


def test_a_difference_that_is_not_significant_is_called_so() -> None:
    noisy = tuple(10 * each for each in THIRD)
    results = {CONTINUE: around(0.60), REMEDY: around(0.70, OTHER), SCRATCH: around(0.704, noisy)}
    assert make_section(results).answer.verdict == (
        "Apply shrink_perturb (lam=0.4) tonight: +10.0 points over continuing, 0.4 points below training from scratch "
        "(not significant) at about the same cost."
    )
    results[SCRATCH] = around(0.72, tuple(3 * each for each in noisy))
    assert make_section(results).answer.verdict == (
        "Train from scratch tonight: +12.0 points over continuing at about the same cost, +2.0 points over the best "
        "remedy, shrink_perturb (lam=0.4) (not significant)."
    )


def test_nothing_to_do_is_a_plain_answer() -> None:
    results = {CONTINUE: around(0.60), REMEDY: around(0.60, OTHER), SCRATCH: around(0.55, THIRD)}
    section = make_section(results)
    assert (section.action, section.code) == ("continue", "go on")
    assert section.answer.verdict == "No remedy beats continuing: go on as you do."
    assert section.answer.certainty == "clear"
    assert "A gain of more than 0." in str(section.answer)
    assert "Continuing reaches the mean accuracy that training from scratch ends with after 4 of 4 epochs." in str(
        section.answer
    )


def test_noise_leaves_the_answer_open() -> None:
    noisy = {0: 0.66, 1: 0.57, 2: 0.65, 3: 0.57, 4: 0.63}
    section = make_section({CONTINUE: around(0.60), REMEDY: noisy, SCRATCH: around(0.55, THIRD)})
    assert section.answer.certainty == "unclear"
    assert section.answer.verdict.startswith("No remedy is shown to beat continuing: go on as you do, or add seeds")
    assert "These seeds cannot exclude a gain of up to" in str(section.answer)


def test_scratch_is_advised_with_its_cost() -> None:
    results = {CONTINUE: around(0.60), REMEDY: around(0.60, OTHER), SCRATCH: around(0.70, THIRD)}
    section = make_section(results, {CONTINUE: 0.4, REMEDY: 0.5, SCRATCH: 1.0})
    assert section.answer.verdict == (
        "Train from scratch tonight: +10.0 points over continuing at 2.5 times its cost, +10.0 points over the best "
        "remedy, shrink_perturb (lam=0.4)."
    )
    assert section.code == "start anew"


def test_what_is_forgotten_is_told_and_tabled() -> None:
    results = {CONTINUE: around(0.60), REMEDY: around(0.70, OTHER), SCRATCH: around(0.60, THIRD)}
    section = make_section(results, old={CONTINUE: 0.8, REMEDY: 0.7, SCRATCH: 0.2})
    assert (
        "Accuracy on the old data: 90.00 % in the checkpoint; afterwards continuing 80.00 %, shrink_perturb (lam=0.4) "
        "70.00 %, training from scratch 20.00 %." in str(section.answer)
    )
    assert section.table.columns == [
        "",
        "new data, %",
        "vs. continuing",
        "vs. scratch",
        "old data, %",
        "time vs. scratch",
    ]
    assert {row["method"]: row["old_accuracy"] for row in section.rows()} == pytest.approx(
        {REMEDY: 0.7, CONTINUE: 0.8, SCRATCH: 0.2}
    )


def test_missing_runs_give_no_answer() -> None:
    section = make_section({CONTINUE: around(0.60), REMEDY: {}, SCRATCH: around(0.60, THIRD)})
    assert (section.action, section.code, section.answer.certainty) == ("none", "", "none")
    assert section.answer.verdict == f"There is no answer: {REMEDY} has no finished run."
    assert [cell.text for cell in section.table.cells[-1]] == ["–", "", "", "×1.00"]


def test_labels_on_the_page_break_between_words() -> None:
    results = {CONTINUE: around(0.6), REMEDY: around(0.7, OTHER), SCRATCH: around(0.7, THIRD)}
    assert "shrink_<wbr>perturb<wbr>(lam=0.4)" in page.render_page([make_section(results)], "")
    assert page._breakable("<b>(x)") == "&lt;b&gt;<wbr>(x)"


KEPT = Path(__file__).parents[3] / "benchmarks" / "results" / "treat"
PAGE = Path(__file__).parents[3] / "docs" / "howto-nightly-retraining.md"


@pytest.mark.parametrize("name", ["worn", "healthy"])
def test_the_kept_answers_and_their_page_say_what_the_kept_runs_give(name: str, tmp_path: Path) -> None:
    unpack(KEPT / f"{name}.jsonl.gz", tmp_path / "runs")
    (found,) = compare_folders([tmp_path / "runs"])
    (remedy,) = {each.label for each in found.contenders} - {CONTINUE, SCRATCH}
    section = TreatmentSection(found, remedy, [], dict.fromkeys((CONTINUE, SCRATCH, remedy), 1.0), [], {})
    printed, page = (KEPT / f"{name}.txt").read_text(), PAGE.read_text()
    assert section.answer.verdict in printed
    assert f"| {section.answer.verdict} |" in page
    for row in section.rows():
        assert f"{100 * float(row['new_accuracy']):.1f} %" in page
