"""The pages can be written as soon as the runs of an experiment with agents or with text are kept."""

import sys
from collections.abc import Iterator

import pytest
from benchmarks.reproduction import kept, language_effects
from benchmarks.reproduction.agent_effects import EXPERIMENTS, agent_block
from benchmarks.reproduction.forest import FORESTS, draw_forest, find_unit, make_forest
from benchmarks.reproduction.kept import Kept, find_recipe
from benchmarks.reproduction.language_effects import LANGUAGE, kept_block, language_block, text_block
from benchmarks.reproduction.result_files import claims_csv
from benchmarks.reproduction.results_tables import coverage_block, main_block, show_claim, statements_block
from benchmarks.reproduction.statements import judge_paper, list_labels, load_statements

from tests.reproduction.helpers import make_kept

COMING = [
    LANGUAGE,
    "p4_fig3_gpt_small",
    "ours_rl_priming",
    "ours_rl_task_sequence",
    "ours_rl_spectral_cartpole_swingup",
    "ours_rl_spectral_finger_spin",
    "ours_rl_spectral_ball_in_cup_catch",
]


def make_up(name: str) -> Kept:
    """Runs of every label with every number that is stated, over three seeds."""
    recipe = find_recipe(name)
    numbers = {one.get("number", recipe.deciding) for one in load_statements() if one["recipe"] == name}
    return make_kept(
        {
            entry.label: {
                seed: dict.fromkeys({*numbers, recipe.deciding}, 0.5 + place + 0.01 * seed * place) for seed in range(3)
            }
            for place, entry in enumerate(recipe.methods)
        },
        recipe.deciding,
    )


@pytest.fixture(params=COMING)
def landed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An experiment whose made-up runs all pages take for kept."""
    made, real = make_up(request.param), kept.load_kept
    for module in [module for name, module in sys.modules.items() if name.startswith("benchmarks.reproduction.")]:
        if hasattr(module, "load_kept"):
            monkeypatch.setattr(module, "load_kept", lambda name: made if name == request.param else real(name))
    judge_paper.cache_clear()
    yield request.param
    judge_paper.cache_clear()


def test_pages_take_the_runs(landed: str) -> None:
    stated = [one for one in load_statements() if one["recipe"] == landed]
    (paper,) = {one["paper"] for one in stated}
    judged = [one for one in judge_paper(paper) if one.statement["recipe"] == landed]
    assert {len(one.samples) for one in judged} == {3}
    assert "untested" not in {one.verdict for one in judged}
    page = statements_block(paper)
    assert all(show_claim(one) in page for one in stated)
    coverage_block("all"), main_block(paper), claims_csv()
    (forest,) = (forest for forest in FORESTS if forest.papers == (paper,) and not forest.main)
    shown = [row for row in make_forest(forest) if row["panel"].startswith(f"{stated[0]['figure']}, ")]
    assert len(shown) >= len(judged)
    draw_forest(shown)
    if landed == LANGUAGE or landed.startswith("p4_fig3"):
        assert {find_unit(one) for one in stated} == {"hundredths"}, "nats are not points"
        assert language_block("fire").count("\n") >= 4 or landed != LANGUAGE
    else:
        labels = {"FIRE"} if landed in EXPERIMENTS else set()
        assert {label for label in labels if f"| {EXPERIMENTS[landed]} | {label} |" in agent_block("fire")} == labels


def test_range_of_some_labels_is_the_best_minus_the_worst(landed: str) -> None:
    ranges = [one for one in load_statements() if one["recipe"] == landed and isinstance(one.get("lower"), list)]
    assert len(ranges) == landed.startswith("ours_rl_spectral")
    for statement in ranges:
        (judged,) = (one for one in judge_paper(statement["paper"]) if one.statement == statement)
        places = [entry.label for entry in find_recipe(landed).methods]
        ends = [[places.index(label) for label in list_labels(statement, key)] for key in ("higher", "lower")]
        (worst, _, best), (least, _, most) = map(sorted, ends)
        expected = [(1 + 0.01 * seed) * ((best - worst) - (most - least)) for seed in range(3)]
        assert judged.samples == pytest.approx(tuple(expected))


def test_table_of_text_has_a_row_for_each_method_and_tells_the_seeds() -> None:
    rows = [row.strip("| ").split(" | ") for row in text_block(LANGUAGE).splitlines()[2:]]
    recipe = find_recipe(LANGUAGE)
    assert len(rows) == len(recipe.methods)
    by_label = {row[0]: row[1:] for row in rows}
    assert set(by_label) == {language_effects.BASELINES.get(entry.label, entry.label) for entry in recipe.methods}
    runs = kept.kept_runs(LANGUAGE)[0] or kept.unfinished_runs(LANGUAGE)
    (first, *more) = [run for run in runs if run.config.label == "FIRE"]
    assert by_label["FIRE"][-1] == str(1 + len(more))
    ends = [record["train_loss"] for record in first.records if "train_loss" in record]
    entropies = [record["measures"]["attention_entropy"] for record in first.records if "measures" in record]
    row = language_effects.write_row("FIRE", [first])
    assert row[1:3] == [f"{sum(part) / 3:.2f}" for part in (ends[7:10], ends[17:20])]
    assert row[4] == f"{entropies[0]:.2f} → {entropies[-1]:.2f}"


def test_kept_runs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept_of = {"p4_fig3_gpt": [None] * 7}
    monkeypatch.setattr(language_effects, "kept_runs", lambda name: (kept_of.get(name, []), {}))
    monkeypatch.setattr(language_effects, "unfinished_runs", lambda name: [None] * 2 * (name == LANGUAGE))
    rows = [line.split(" | ")[-1] for line in kept_block(f"p4_fig3_gpt,{LANGUAGE},p4_fig3_gpt_small").splitlines()]
    assert rows[2:] == ["7 |", "2, not complete (`benchmarks/results/unfinished`) |", "none |"]
