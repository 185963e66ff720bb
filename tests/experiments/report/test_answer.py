"""The answer in words: which method, by how much, and whether the evidence is enough."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import pliant
from pliant._files import write_atomically
from pliant._json import seal
from pliant.experiments.report.analysis import Analysis
from pliant.experiments.report.answer import Answer, answer
from pliant.experiments.report.grouping import compare_folders
from pliant.experiments.report.table import result_table
from pliant.experiments.run_config import Part
from tests.experiments.report.stores import config, write_recipe, write_results, write_run


def analyze(root: Path) -> Analysis:
    (comparison,) = compare_folders([root])
    return Analysis(comparison)


def ask(root: Path) -> Answer:
    return answer(analyze(root))


def scattered(mean: float, seeds: int, scatter: float, draw: int) -> list[float]:
    """Values with exactly this mean."""
    noise = np.random.default_rng(draw).standard_normal(seeds)
    return (mean + scatter * (noise - noise.mean())).tolist()


def test_a_clear_winner(tmp_path: Path) -> None:
    write_results(
        tmp_path,
        {
            "vanilla": scattered(0.5, 6, 0.01, 0),
            "fresh": scattered(0.6, 6, 0.01, 1),
            "swr": scattered(0.9, 6, 0.01, 2),
            "l2": scattered(0.7, 6, 0.01, 3),
        },
    )
    found = ask(tmp_path)
    assert found.verdict == (
        "Use swr with lam=0.1: 90.0 % mean test accuracy over tasks, 40.0 points above plain training "
        "and 30.0 points above training from scratch."
    )
    assert found.certainty == "clear"
    assert found.reasons[0] == (
        "The evidence is enough: with 6 seeds, swr differs significantly from every other method, "
        "leaving aside training from scratch."
    )
    assert "+40.00 points against plain training (95 % interval " in found.reasons[1]
    assert "p < 0.001" in found.reasons[1]
    assert "p-values are corrected for 3 and 2 comparisons." in found.reasons[1]


def test_two_tied_methods_get_the_number_of_seeds_needed(tmp_path: Path) -> None:
    swr = scattered(0.9, 3, 0.01, 0)
    l2 = [value - gap for value, gap in zip(swr, [0.010, 0.002, 0.006], strict=True)]
    write_results(tmp_path, {"vanilla": scattered(0.5, 3, 0.01, 1), "swr": swr, "l2": l2})
    found = ask(tmp_path)
    # The gaps have mean 0.006 and deviation 0.004; the comparison with vanilla is of another family.
    assert found.reasons[0] == (
        "With 3 seeds, swr does not differ significantly from l2; about 3 more would separate it from l2 "
        "(80 % power, if the difference is as large as observed)."
    )
    assert found.verdict.startswith("Use swr with lam=0.1: ")
    assert found.certainty == "unclear"


def test_no_method_differs_from_plain_training(tmp_path: Path) -> None:
    vanilla = [0.50, 0.55, 0.45, 0.52]
    write_results(tmp_path, {"vanilla": vanilla, "swr": [0.55, 0.50, 0.52, 0.49]})
    found = ask(tmp_path)
    assert found.verdict.startswith(
        "No method differs significantly from plain training yet. swr with lam=0.1 has the best mean: "
    )
    assert "not significant" in found.reasons[1]
    assert found.certainty == "unclear"


def test_only_the_second_best_is_significantly_better_than_plain_training(tmp_path: Path) -> None:
    seeds = {"vanilla": scattered(0.5, 5, 0.01, 0), "l2": scattered(0.7, 5, 0.01, 1), "swr": [0.9]}
    write_results(tmp_path, seeds)
    found = ask(tmp_path)
    assert found.verdict.startswith("swr with lam=0.1 has the best mean, 90.0 % mean test accuracy over tasks, ")
    assert found.verdict.endswith(" above plain training, but only l2 is significantly better than plain training.")
    assert found.certainty == "unclear"


def test_plain_training_is_best(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.9, 5, 0.01, 0), "swr": scattered(0.5, 5, 0.01, 1)})
    found = ask(tmp_path)
    assert (
        found.verdict
        == "Use plain training: it reaches 90.0 % mean test accuracy over tasks, and every method is worse."
    )
    assert found.certainty == "clear"
    assert "with 5 seeds, vanilla differs significantly from swr" in found.reasons[0]


def test_plain_training_has_the_best_mean_without_significance(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.51, 0.50, 0.55], "swr": [0.50, 0.52, 0.51]})
    found = ask(tmp_path)
    assert found.verdict == (
        "No method has a better mean than plain training, which reaches 52.0 % mean test accuracy over tasks; "
        "the evidence does not show yet whether a method is better."
    )
    assert found.certainty == "unclear"
    assert found.reasons[1].startswith("Paired by seed: +1.00 points against the next best (swr) (95 % interval ")
    assert "not significant" in found.reasons[1]


def test_one_seed_is_not_enough(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "fresh": [0.6], "swr": [0.9]})
    found = ask(tmp_path)
    assert "one seed cannot separate an effect from chance" in found.reasons[0]
    assert found.certainty == "unclear"


def test_a_single_method_has_no_comparison(tmp_path: Path) -> None:
    write_results(tmp_path, {"swr": [0.5, 0.6]})
    assert (
        ask(tmp_path).verdict
        == "swr with lam=0.1 reaches 55.0 % mean test accuracy over tasks; there is no other method to compare it with."
    )


def test_without_plain_training_methods_are_compared_with_each_other(tmp_path: Path) -> None:
    values = {"a": scattered(0.9, 5, 0.01, 0), "b": scattered(0.4, 5, 0.01, 1), "c": scattered(0.5, 5, 0.01, 2)}
    write_results(tmp_path, values)
    found = ask(tmp_path)
    assert found.verdict == (
        "Use a with lam=0.1: 90.0 % mean test accuracy over tasks, better than every other method, "
        "40.0 points above the next best (c)."
    )
    assert found.reasons[1].startswith("Paired by seed: +40.00 points against the next best (c) (95 % interval +3")


@pytest.mark.parametrize(
    ("label", "parts", "name"),
    [
        ("swr", (Part("swr"),), "swr"),
        ("mine", (Part("redo", {"every": 97, "tau": 0.1}),), "mine with every=97, tau=0.1"),
        ("both", (Part("swr"), Part("l2", {"lam": 0.1})), "both with l2(lam=0.1)"),
        ("l2:lam=1e-1", (Part("l2", {"lam": 0.1}),), "l2:lam=1e-1"),
    ],
)
def test_the_best_is_named_with_its_settings(tmp_path: Path, label: str, parts: tuple[Part, ...], name: str) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.5, 5, 0.01, 0)})
    write_results(tmp_path, {label: scattered(0.9, 5, 0.01, 1)}, methods=parts)
    assert ask(tmp_path).verdict.startswith(f"Use {name}: 90.0 % ")


def test_a_chosen_setting_is_named_even_if_the_label_lists_the_choices(tmp_path: Path) -> None:
    label = "l2:lam=0.1|1"
    write_results(tmp_path, {"vanilla": scattered(0.5, 5, 0.01, 0), label: scattered(0.9, 5, 0.01, 1)})
    selection = {
        "on": "validation",
        "labels": {label: {"chosen": "l2(lam=0.1)", "scores": {}, "seeds": 1, "examples": None}},
    }
    write_atomically(tmp_path / "selection.json", seal(selection))
    assert ask(tmp_path).verdict.startswith("Use l2:lam=0.1|1 with lam=0.1: 90.0 % ")


def test_equal_results(tmp_path: Path) -> None:
    write_results(tmp_path, {"a": [0.5, 0.6, 0.7], "b": [0.5, 0.6, 0.7]})
    assert "b has the same mean" in str(ask(tmp_path))


def test_a_difference_too_small_for_any_number_of_seeds(tmp_path: Path) -> None:
    write_results(tmp_path, {"a": [0.9001, 0.70, 0.80], "b": [0.70, 0.80, 0.90]})
    assert "not even 1000 seeds would separate it from b" in str(ask(tmp_path))


def test_nothing_has_finished(tmp_path: Path) -> None:
    write_run(tmp_path, config("vanilla", 0), [0.5, 0.6], status="unfinished")
    write_run(tmp_path, config("swr", 0), [0.5], status="failed", error="boom")
    found = ask(tmp_path)
    assert str(found) == "No run has finished yet. 1 run in progress; the furthest is at 100 %."
    assert found.certainty == "none"


def test_a_finished_diverged_method_does_not_hide_runs_in_progress(tmp_path: Path) -> None:
    write_run(tmp_path, config("fresh", 0), [0.5])
    write_run(tmp_path, config("swr", 0), [0.5])
    write_run(tmp_path, config("swr", 1), [0.5], status="diverged")
    write_run(tmp_path, config("vanilla", 0), [0.5, 0.6], status="unfinished")
    told = "No method can be judged yet. 1 run in progress; the furthest is at 100 %. swr diverged."
    assert str(ask(tmp_path)) == told


@pytest.mark.parametrize(("status", "told"), [("unfinished", "a result yet"), ("failed", "a result")])
def test_a_method_in_progress_is_not_called_missing(tmp_path: Path, status: str, told: str) -> None:
    write_run(tmp_path, config("vanilla", 0), [0.7])
    write_run(tmp_path, config("l2", 0), [0.5], status=status)  # type: ignore[arg-type]
    assert ask(tmp_path).verdict.endswith(f"; no other method has {told}.")


@pytest.mark.parametrize("status", ["unfinished", "failed"])
def test_the_answer_is_unclear_while_a_method_has_no_result(tmp_path: Path, status: str) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.9, 5, 0.01, 0), "l2": scattered(0.5, 5, 0.01, 1)})
    assert ask(tmp_path).certainty == "clear"
    write_run(tmp_path, config("swr", 0), [0.99], status=status)  # type: ignore[arg-type]
    found = ask(tmp_path)
    assert found.verdict.endswith("and every method with a result is worse.")
    assert found.certainty == "unclear"


def test_the_answer_is_unclear_before_all_methods_started(tmp_path: Path) -> None:
    entries = [{"name": "vanilla", "label": "relu"}, {"name": "l2", "label": "L2", "lam": 0.1}]
    entries.append({"name": "vanilla", "label": "tanh", "model": {"activation": "tanh"}})
    write_recipe(tmp_path, methods=entries)
    for seed, (relu, l2) in enumerate(zip(scattered(0.5, 5, 0.01, 0), scattered(0.9, 5, 0.01, 1), strict=True)):
        write_run(tmp_path, config("relu", seed, methods=()), [relu])
        write_run(tmp_path, config("L2", seed), [l2])
    found = ask(tmp_path)
    # Of two networks without a method, neither is plain training, started or not.
    assert "better than every other method with a result, 40.0 points above the next best (relu)" in found.verdict
    assert found.certainty == "unclear"


def test_diverged_methods_are_not_recommended(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.5, 4, 0.01, 0), "swr": scattered(0.7, 4, 0.01, 1)})
    for seed, status in enumerate(("finished", "finished", "diverged")):
        write_run(tmp_path, config("wild", seed), [0.99], status=status)  # type: ignore[arg-type]
    found = ask(tmp_path)
    assert found.verdict.startswith("Use swr")
    assert "wild diverged on 1 of 3 seeds and is excluded." in found.reasons


def test_caveats_for_unfinished_runs_and_choices_on_test_data(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5, 0.6], "l2": [0.7, 0.9]})
    write_run(tmp_path, config("l2", 7), [0.5], status="unfinished")
    selection = {"on": "test", "labels": {"l2": {"chosen": "l2(lam=0.1)", "scores": {}, "seeds": 1, "examples": None}}}
    write_atomically(tmp_path / "selection.json", seal(selection))
    found = ask(tmp_path)
    assert "1 of 5 runs are not finished; the answer may change." in found.reasons
    assert "Settings were chosen on the test data, as in the source: the results are optimistic." in found.reasons


def test_lower_is_better_for_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pliant import streams

    monkeypatch.setattr(streams.stream_class("label_flip"), "headline", "final_loss")
    for label, values in {"vanilla": scattered(2.0, 5, 0.01, 0), "swr": scattered(1.0, 5, 0.01, 1)}.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, config(label, seed), [0.5], extra={"final_loss": value})
    assert ask(tmp_path).verdict == "Use swr with lam=0.1: 1 final loss, 1 below plain training."


def test_marks_for_best_and_tied(tmp_path: Path) -> None:
    a = scattered(0.90, 6, 0.01, 0)
    b = [value - gap for value, gap in zip(a, [0.01, -0.01, 0.02, -0.015, 0.01, 0.0], strict=True)]
    write_results(
        tmp_path, {"vanilla": scattered(0.5, 6, 0.01, 1), "a": a, "b": b, "fresh": scattered(0.95, 6, 0.01, 2)}
    )
    marks = {row.contender.name: row.marks.get("mean_test_accuracy", "") for row in analyze(tmp_path).rows}
    assert marks == {"fresh": "", "a": "tied", "b": "tied", "vanilla": ""}


def test_a_single_best_is_marked(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.5, 6, 0.01, 0), "a": scattered(0.9, 6, 0.01, 1)}, 1)
    assert [row.marks for row in analyze(tmp_path).rows] == [{"mean_test_accuracy": "best"}, {}]


def test_equal_metrics_appear_once(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5], "a": [0.6]})
    assert analyze(tmp_path).metrics == ["mean_test_accuracy"]


def test_failed_seeds_are_reported(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.5, 5, 0.01, 0), "swr": scattered(0.7, 4, 0.01, 1)})
    write_run(tmp_path, config("swr", 4), [0.1], status="failed", error="boom")
    found = ask(tmp_path)
    assert found.verdict.startswith("Use swr")
    assert "swr failed on 1 of 5 seeds: excluded." in found.reasons


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_results_that_are_not_finite_are_excluded(tmp_path: Path, value: float) -> None:
    write_results(tmp_path, {"vanilla": scattered(0.5, 4, 0.01, 0), "swr": scattered(0.7, 4, 0.01, 1)})
    for seed in range(5):
        path = write_run(tmp_path, config("l2", seed), [0.1 + 0.01 * seed]) / "result.json"
    end = json.loads(path.read_bytes())
    path.write_text(json.dumps(end | {"result": dict.fromkeys(end["result"], value)}))
    analysis = analyze(tmp_path)
    found = answer(analysis)
    assert found.verdict.startswith("Use swr with lam=0.1: 70.0 %")
    assert [broken.path for broken in analysis.comparison.broken] == [path.parent]
    assert all(math.isfinite(estimate.mean) for row in analysis.rows for estimate in row.numbers.values())


def test_a_missing_headline_is_reported(tmp_path: Path) -> None:
    write_recipe(tmp_path, headline="mean_train_accuracy")
    write_results(tmp_path, {"vanilla": [0.5, 0.6]})
    assert str(ask(tmp_path)) == (
        "The methods cannot be compared. 2 runs finished without a finite mean training accuracy over tasks."
    )


def test_selection_in_progress_is_reported(tmp_path: Path) -> None:
    for lam, status in ((0.1, "finished"), (0.01, "finished"), (0.001, "unfinished")):
        methods = (Part("l2", {"lam": lam}),)
        write_run(tmp_path, config("l2", 10**6, methods=methods, purpose="selection"), [lam], status=status)  # type: ignore[arg-type]
    assert str(ask(tmp_path)) == (
        "Settings are still being chosen; no final run has started. 2 of 3 runs started to choose them have ended."
    )
    assert "Settings are still being chosen" in pliant.report(tmp_path).to_html()


def test_costs_are_relative_to_plain_training(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for seed in range(3):
        write_run(tmp_path, config("vanilla", seed), [0.5], seconds=10 + seed)
        write_run(tmp_path, config("L2", seed), [0.5], seconds=22 + seed)
    cost = {row.contender.name: row.cost for row in analyze(tmp_path).rows}["L2"]
    assert cost is not None
    assert cost.seconds == pytest.approx(0.23)
    assert cost.memory == pytest.approx(330 / 300)


def test_of_sixty_methods_only_some_are_named(tmp_path: Path) -> None:
    # The scatter is so large that no difference is significant.
    draw = np.random.default_rng(0)
    write_results(tmp_path, {f"m{i}": draw.uniform(0.3, 0.7, 3).tolist() for i in range(60)})
    assert " and 56 others" in ask(tmp_path).reasons[0]


def write_seeds(root: Path, results: dict[str, dict[int, float]]) -> None:
    """Write runs of contenders that do not all have the same seeds."""
    for label, values in results.items():
        for seed, value in values.items():
            write_run(root, config(label, seed), [value] * 3)


def test_methods_are_ranked_on_shared_seeds(tmp_path: Path) -> None:
    # Over its own seeds vanilla's mean is lower, for no other reason than two seeds that swr never ran.
    write_seeds(
        tmp_path,
        {
            "vanilla": {0: 0.95, 1: 0.94, 2: 0.955, 3: 0.50, 4: 0.49},
            "swr": {0: 0.93, 1: 0.9201, 2: 0.9349},
        },
    )
    found = ask(tmp_path)
    assert found.verdict == (
        "Use plain training: it reaches 94.8 % mean test accuracy over tasks, and every method is worse."
    )
    assert found.reasons[0] == "The evidence is enough: with 3 seeds, vanilla differs significantly from swr."
    assert found.reasons[1] == (
        "Methods are ranked on the 3 seeds that all of them have; the table's means are over all seeds of each."
    )
    assert "Marks use the seeds that all methods have" in " ".join(result_table(analyze(tmp_path)).notes)
    marks = {row.contender.name: set(row.marks.values()) for row in analyze(tmp_path).rows}
    assert marks == {"vanilla": {"best"}, "swr": set()}


def test_a_significantly_worse_method_does_not_win(tmp_path: Path) -> None:
    # On the two seeds that all share swr leads, on the ten that it has in common with vanilla it clearly does not.
    few, many = range(2), range(2, 10)
    write_seeds(
        tmp_path,
        {
            "vanilla": dict.fromkeys(few, 0.94) | {seed: 0.90 + 0.001 * seed for seed in many},
            "swr": dict.fromkeys(few, 0.95) | dict.fromkeys(many, 0.5),
            "l2": {seed: 0.90 + 0.01 * seed for seed in few},
        },
    )
    analysis = analyze(tmp_path)
    found = answer(analysis)
    assert analysis.best is not None
    assert analysis.best.name == "swr"
    assert found.verdict.startswith("No method is significantly better than plain training. swr with lam=0.1: 95.0 %")
    assert "points below plain training" in found.verdict
    assert "vanilla is better than swr on the seeds that both have" in found.reasons[0]
    assert found.certainty == "unclear"
    assert all(row.marks.get("mean_test_accuracy") != "best" for row in analysis.rows)


def test_without_shared_seeds_each_method_is_ranked_by_its_own(tmp_path: Path) -> None:
    write_seeds(tmp_path, {"vanilla": {0: 0.50, 1: 0.51, 2: 0.49}, "swr": {5: 0.70, 6: 0.71, 7: 0.69}})
    found = ask(tmp_path)
    assert found.verdict.startswith("Use swr with lam=0.1: 70.0 %")
    assert found.reasons[1] == "No seed is common to all methods: each is ranked by its own seeds."
    assert found.reasons[2].startswith("Differences: +20.00 points against plain training (95 % interval ")
    assert found.reasons[2].endswith(", over different seeds).")
    notes = " ".join(pliant.report(tmp_path).sections[0].table.notes)
    assert "seed by seed" not in notes
    assert "Welch" in notes


@pytest.mark.parametrize("best", ["swr", "vanilla"])
def test_a_pair_is_tested_once(tmp_path: Path, best: str) -> None:
    # Alone the difference has p = 0.035; corrected for the comparison with fresh it is 0.07.
    low, high = [0.900, 0.910, 0.895, 0.905, 0.902], [0.912, 0.919, 0.898, 0.925, 0.906]
    results = {"vanilla": low, "swr": high} if best == "swr" else {"vanilla": high, "swr": low}
    write_results(tmp_path, {**results, "fresh": [0.901, 0.905, 0.90, 0.901, 0.907]})
    analysis = analyze(tmp_path)
    other = next(name for name in results if name != best)
    p = {row.contender.name: row.against_vanilla and row.against_vanilla.p for row in analysis.rows}["swr"]
    assert p == pytest.approx(0.07, abs=0.005)
    assert analysis.rivals[other].p == p
    found = answer(analysis)
    assert found.certainty == "unclear"
    assert found.reasons[0].startswith(f"With 5 seeds, {best} does not differ significantly from {other}; ")
    assert not any(analysis.headline in row.marks for row in analysis.rows)


def test_vanilla_and_fresh_have_one_p_value(tmp_path: Path) -> None:
    write_results(
        tmp_path,
        {"vanilla": [0.50, 0.52, 0.51, 0.55], "fresh": [0.53, 0.54, 0.52, 0.56], "swr": scattered(0.9, 4, 0.01, 0)},
    )
    rows = {row.contender.name: row for row in analyze(tmp_path).rows}
    one, other = rows["vanilla"].against_fresh, rows["fresh"].against_vanilla
    assert one is not None
    assert other is not None
    assert one.p == other.p
    assert one.interval.mean == -other.interval.mean
    assert (one.interval.low, one.interval.high) == (-other.interval.high, -other.interval.low)


def test_intervals_exclude_zero_exactly_where_a_difference_is_significant(tmp_path: Path) -> None:
    # Six seeds whose plain intervals exclude zero; of these tests only some survive the correction.
    seeds, draw = 6, np.random.default_rng(0)
    vanilla = draw.normal(0.5, 0.02, seeds)
    means = {"a": 0.010, "b": 0.014, "c": 0.018, "d": 0.026, "e": 0.05, "f": 0.0}
    gaps = {name: np.array(scattered(mean, seeds, 0.011, place)) for place, (name, mean) in enumerate(means.items())}
    write_results(
        tmp_path, {"vanilla": vanilla.tolist()} | {name: (vanilla + gap).tolist() for name, gap in gaps.items()}
    )
    analysis = analyze(tmp_path)
    contrasts = [row.against_vanilla for row in analysis.rows if row.against_vanilla]
    contrasts += analysis.rivals.values()
    for contrast in contrasts:
        ends = contrast.interval
        assert (ends.low > 0 or ends.high < 0) == contrast.significant
    disputed = [each for each in contrasts if not each.significant and each.difference.p < 0.05]
    assert disputed
    for each in disputed:
        plain = each.difference.interval()
        assert plain.low > 0 or plain.high < 0


def write_courses(root: Path, courses: dict[str, tuple[float, float]]) -> None:
    """Write runs of five seeds that go from one accuracy to another over three tasks."""
    for place, (label, (first, last)) in enumerate(courses.items()):
        for seed, noise in enumerate(scattered(0.0, 5, 0.003, place)):
            write_run(root, config(label, seed), [first + noise, (first + last) / 2 + noise, last - noise])


def test_the_best_on_average_may_still_decline(tmp_path: Path) -> None:
    write_courses(tmp_path, {"vanilla": (0.9, 0.3), "swr": (0.99, 0.88), "l2": (0.9, 0.9)})
    found = ask(tmp_path)
    assert found.verdict.startswith("Use swr with lam=0.1: 93.5 % mean test accuracy over tasks, ")
    assert found.verdict.endswith(
        ". swr is best on average, but still declining: 99.0 % → 88.0 % from the first to the last task."
    )
    assert "On the last task l2 is better: 90.0 % against 88.0 %." in found.reasons
    table = result_table(analyze(tmp_path))
    assert table.columns[1:3] == ["mean test accuracy over tasks, %", "final test accuracy, %"]
    assert [cells[1].text for cells in table.cells] == ["88.00", "90.00", "30.00"]


def test_a_course_is_told_only_if_it_declines_and_tasks_are_alike(tmp_path: Path) -> None:
    write_courses(tmp_path / "level", {"vanilla": (0.9, 0.3), "swr": (0.93, 0.93)})
    assert "declining" not in ask(tmp_path / "level").verdict
    harder = Part("class_incremental", {"tasks": 3, "epochs": 2})
    for seed, noise in enumerate(scattered(0.0, 5, 0.003, 0)):
        write_run(tmp_path / "harder", config("swr", seed, stream=harder), [0.99 + noise, 0.9, 0.5 - noise])
    assert "declining" not in ask(tmp_path / "harder").verdict


def test_equal_differences_are_judged_by_a_sign_test(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.90] * 5, "swr": [0.92] * 5})
    assert ask(tmp_path).reasons[0] == (
        "With 5 seeds, swr does not differ significantly from vanilla; about 1 more would separate it from vanilla "
        "(by a sign test, if all differences stay equal)."
    )


def test_plain_training_is_compared_with_training_from_scratch(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.50, 0.52, 0.51], "fresh": [0.60, 0.63, 0.61]})
    assert ask(tmp_path).verdict == (
        "vanilla reaches 51.0 % mean test accuracy over tasks, 10.3 points below training from scratch; "
        "there is no other method to compare it with."
    )


@pytest.mark.parametrize(("fitted", "told"), [((0.39, 0.41), True), ((0.39, 0.95), False)])
def test_low_training_accuracy_is_reported(tmp_path: Path, fitted: tuple[float, float], told: bool) -> None:
    for label, value in zip(("vanilla", "swr"), fitted, strict=True):
        write_run(tmp_path, config(label, 0), [0.4], extra={"final_train_accuracy": value})
    reasons = ask(tmp_path).reasons
    assert any("even the best method fits only 41 % of its training examples" in reason for reason in reasons) == told
