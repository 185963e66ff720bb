"""What is said where runs diverged, and of differences that are none."""

from pathlib import Path

import pytest

import pliant
from pliant.experiments.report.answer import Answer
from pliant.experiments.report.formatting import change, probability
from pliant.experiments.report.statistics import difference
from tests.experiments.report.stores import config, write_results, write_run


def diverge(root: Path, label: str, seeds: range) -> None:
    for seed in seeds:
        write_run(root, config(label, seed), [0.5], status="diverged", error="the loss is nan")


def ask(root: Path) -> Answer:
    (section,) = pliant.report(root).sections
    found = section.answer
    assert isinstance(found, Answer)
    return found


def test_diverged_plain_training_is_not_a_reference(tmp_path: Path) -> None:
    write_results(tmp_path, {"swr": [0.80, 0.82, 0.81, 0.79, 0.80]})
    write_run(tmp_path, config("vanilla", 0), [0.81] * 3)
    diverge(tmp_path, "vanilla", range(1, 5))
    found = ask(tmp_path)
    assert found.verdict == (
        "swr with lam=0.1 reaches 80.4 % mean test accuracy over tasks; plain training diverged on 4 of 5 seeds."
    )
    assert "against plain training" not in str(found)


def test_methods_are_compared_with_each_other_if_plain_training_diverged(tmp_path: Path) -> None:
    write_results(tmp_path, {"swr": [0.80, 0.82, 0.81], "l2": [0.60, 0.63, 0.61], "vanilla": [0.79, 0.81]})
    diverge(tmp_path, "vanilla", range(2, 3))
    found = ask(tmp_path)
    assert found.verdict.startswith("Use swr with lam=0.1: 81.0 % mean test accuracy over tasks, better than every ")
    assert "against the next best (l2)" in str(found)
    assert "vanilla diverged on 1 of 3 seeds and is excluded." in found.reasons


def test_diverged_training_from_scratch_is_not_a_reference(tmp_path: Path) -> None:
    write_results(tmp_path, {"swr": [0.80, 0.82, 0.81], "vanilla": [0.60, 0.63, 0.61], "fresh": [0.79, 0.81]})
    diverge(tmp_path, "fresh", range(2, 3))
    assert "training from scratch" not in str(ask(tmp_path))


@pytest.mark.parametrize(
    ("left", "lost", "told"),
    [("vanilla", ("swr", "l2"), "every method diverged."), ("swr", ("wild", "l2"), "every other method diverged.")],
)
def test_all_other_methods_diverged(tmp_path: Path, left: str, lost: tuple[str, ...], told: str) -> None:
    write_results(tmp_path, {left: [0.80, 0.82, 0.81]})
    for label in lost:
        diverge(tmp_path, label, range(3))
    assert ask(tmp_path).verdict.endswith(f"81.0 % mean test accuracy over tasks; {told}")


def test_the_note_on_best_excludes_diverged_methods(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.50, 0.51, 0.53], "swr": [0.80, 0.82, 0.81]})
    (section,) = pliant.report(tmp_path).sections
    assert "Best: significantly better than every other method." in section.table.notes
    write_results(tmp_path, {"wild": [0.99, 0.98]})
    diverge(tmp_path, "wild", range(2, 3))
    report = pliant.report(tmp_path)
    notes = (
        "Best: significantly better than every other method that finished all seeds. "
        "Methods that diverged on a seed are not marked; their means and differences are over the other seeds."
    )
    assert notes in " ".join(report.sections[0].table.notes)
    assert notes in report.save(tmp_path / "table.tex")[0].read_text()


def test_equal_means_are_as_good_as(tmp_path: Path) -> None:
    write_results(tmp_path, {"swr": [0.75, 0.25, 0.5], "vanilla": [0.25, 0.125, 0.25], "fresh": [0.5, 0.5, 0.5]})
    found = str(ask(tmp_path))
    assert "as good as training from scratch" in found
    assert "0.00 points below" not in found


def test_a_zero_difference_has_no_negative_sign() -> None:
    gap = difference({0: 0.5, 1: 0.25}, {0: 0.25, 1: 0.5}).reversed
    assert change(gap.mean, "test_accuracy") == "+0.00 points"


@pytest.mark.parametrize(
    ("p", "text"), [(0.0496, "p = 0.0496"), (0.049996, "p = 0.049996"), (0.05, "p = 0.05"), (0.0504, "p = 0.05")]
)
def test_p_values_have_enough_digits_to_show_significance(p: float, text: str) -> None:
    assert probability(p) == text
