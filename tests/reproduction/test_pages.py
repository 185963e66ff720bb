"""The pages of results, the method cards, the figures and the report pages show what the kept runs say."""

import re
from pathlib import Path

import pytest
from benchmarks.reproduction import effect_overview, effects, explanations, result_files
from benchmarks.reproduction.documents import BLOCK, DOCS, PAGES, render
from benchmarks.reproduction.drawings import PLAIN, Drawing, digest, known_drawings, make_rows
from benchmarks.reproduction.effect_overview import is_at_edge
from benchmarks.reproduction.effects import EFFECT, MEAN, effect_block, is_told, judge_effects, name_effect, sum_up
from benchmarks.reproduction.explanations import explanations_block
from benchmarks.reproduction.figures import PAPERS
from benchmarks.reproduction.forest import FORESTS, Forest, make_forest
from benchmarks.reproduction.kept import (
    KEPT,
    Estimate,
    asks_for,
    find_recipe,
    kept_runs,
)
from benchmarks.reproduction.pages import make_page
from benchmarks.reproduction.result_files import FILES
from benchmarks.reproduction.results_tables import PAGES as RESULT_PAGES
from benchmarks.reproduction.statements import SECTIONS, load_statements

from pliant import methods
from pliant._json import read_seal, seal
from pliant.experiments.recipe import Entry
from pliant.experiments.store import Run, load_runs
from tests.reproduction.helpers import make_kept

STATEMENTS = load_statements()
KEPT_NAMES = sorted(file.name.removesuffix(".jsonl.gz") for file in KEPT.glob("*.gz"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_is_what_the_command_writes(page: Path) -> None:
    text = page.read_text()
    assert render(text) == text, "python -m benchmarks.reproduction writes it anew"


@pytest.mark.parametrize("name", FILES)
def test_table_beside_the_pages_is_what_the_command_writes(name: str) -> None:
    assert (DOCS / "results" / name).read_text() == FILES[name](), "python -m benchmarks.reproduction writes it anew"


RESULTS = [DOCS / "results.md", DOCS / "leaderboard.md", *sorted((DOCS / "results").glob("*.md"))]


@pytest.mark.parametrize("page", RESULTS, ids=lambda page: page.name)
def test_page_can_be_read(page: Path) -> None:
    assert len(page.read_text().split()) < 2000


def test_recorded_runs_tell_hours_days_commits_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = find_recipe("p0_table1_mnist")
    run = config.config(config.methods[0], (), 0, "result")
    made = {"pliant": "0.1.0", "torch": "2.13", "git": "0123456789abcdef"}
    start = {"time": "2026-01-02T10:00:00+00:00", "event": "start", "environment": made}
    end = {"time": "2026-01-02T11:00:00+00:00", "event": "end", "seconds": 5400.0}
    first = seal(start)
    (tmp_path / "events.jsonl").write_bytes(first + b"\n" + seal(end, read_seal(first)) + b"\n")
    runs = [Run(tmp_path, run, "finished", {}, ""), Run(tmp_path / "old", run, "finished", {}, "")]
    monkeypatch.setattr(result_files, "kept_names", lambda: ["one"])
    monkeypatch.setattr(result_files, "kept_runs", lambda name: (runs, {}))
    found = ["one", 2, 1, 1.5, "2026-01-02", "2026-01-02", "0123456789", "pliant 0.1.0, torch 2.13"]
    assert result_files.list_runs.__wrapped__() == [found]


def test_pages_show_every_statement_and_every_kept_experiment() -> None:
    for paper in SECTIONS:
        page = (DOCS / "results" / f"{RESULT_PAGES[paper]}.md").read_text()
        assert ("statements", paper) in BLOCK.findall(page)
        assert f"(../images/forest_{paper.lower()}.svg)" in page
    assert {statement["paper"] for statement in STATEMENTS} == set(SECTIONS)
    said = {statement.get(key) for statement in STATEMENTS for key in ("recipe", "lower_recipe", "minus")}
    assert set(KEPT_NAMES) <= said | {EFFECT}


@pytest.mark.parametrize("forest", FORESTS, ids=lambda forest: forest.name)
def test_forest_plot_shows_the_kept_runs(forest: Forest) -> None:
    rows = make_forest(forest)
    assert rows
    text = (DOCS / "images" / f"{forest.name}.svg").read_text()
    assert text.startswith(f"<!-- numbers: {digest(rows)} -->"), "python -m benchmarks.reproduction draws it"


@pytest.mark.parametrize("drawing", known_drawings(), ids=lambda drawing: drawing.name)
def test_figure_shows_the_kept_runs(drawing: Drawing) -> None:
    path = DOCS / "images" / f"{drawing.name}.svg"
    rows = make_rows(drawing)
    assert path.read_text().startswith(f"<!-- numbers: {digest(rows)} -->"), (
        "python -m benchmarks.reproduction draws it"
    )
    assert any(f"(../images/{path.name})" in page.read_text() for page in RESULTS)
    assert {row["label"] for row in rows} == {
        entry.label for entry in find_recipe(drawing.name).methods if not drawing.settings or len(entry.variants()) > 1
    }
    lines = {*drawing.settings, PLAIN} if drawing.settings else set(drawing.quantities.values())
    assert {row["quantity"] for row in rows} == lines


SHARES = {
    "error", "dormant_fraction", "dead_fraction", "feature_rank", "hessian_rank", "hessian_exact_rank", "fisher_rank",
    "gauss_newton_rank", "gradient_overlap",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in KEPT_NAMES if find_recipe(name).measures])
def test_kept_measures_are_in_their_range(name: str) -> None:
    """Norms, ranks and shares are not negative, nor is the sharpness of cross-entropy; dormancy is minus an entropy."""
    seen = set()
    runs, _ = kept_runs(name)
    for run in runs:
        for record in run.records:
            for key, value in record.get("measures", {}).items():
                measure, where = key.partition("/")[0], (run.id, record["task"], record["epoch"], key)
                if value is not None:
                    seen.add(measure)
                    assert value <= 0 if measure == "dormancy" else value >= 0, where
                    assert value <= 1 or measure not in SHARES, where
    assert seen >= set(find_recipe(name).measures)


def test_list_of_recipes_shows_every_paper() -> None:
    assert BLOCK.findall((DOCS / "recipes.md").read_text()) == [("figures", paper) for paper in PAPERS]


@pytest.mark.parametrize("name", methods.names())
def test_card_shows_the_effect_of_its_method(name: str) -> None:
    assert BLOCK.findall((DOCS / "methods" / f"{name}.md").read_text()) == [("effect", name)]
    assert any(name in {part.name for part in entry.parts} for entry in find_recipe(EFFECT).methods)


@pytest.mark.parametrize("name", methods.names())
def test_text_of_a_card_does_not_count_seeds(name: str) -> None:
    """The generated tables count them; what is written by hand must hold with more seeds too."""
    written = re.sub(r"<!-- .*?<!-- end -->", "", (DOCS / "methods" / f"{name}.md").read_text(), flags=re.DOTALL)
    assert not re.search(r"\b(no|one|two|three|four|five|\d+)( of the \w+)? seeds?\b", written)


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.gz")), ids=lambda file: file.name)
def test_kept_runs_are_those_of_the_recipe(file: Path) -> None:
    name = file.name.removesuffix(".jsonl.gz")
    recipe = find_recipe(name)
    runs, _ = kept_runs(name)
    assert runs
    seeds: dict[object, set[int]] = {}
    for run in runs:
        assert asks_for(recipe, run)
        seeds.setdefault((run.config.label, str(run.config.methods)), set()).add(run.config.seed)
    assert all(own == set(range(len(own))) for own in seeds.values()), "more seeds are welcome, but none is left out"


def test_explanations_sort_measures_by_what_they_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "lost": {"hessian_rank_change": -0.9, "weight_l1_change": 0.5, "dormancy_change": 0.4, "sharpness_change": 2.0},
        "kept": {"hessian_rank_change": -0.1, "weight_l1_change": 0.5, "dormancy_change": -0.1},
    }
    changes["lost"]["train_error_growth"], changes["kept"]["train_error_growth"] = 0.4, 0.0
    noise = (-0.01, 0.0, 0.01)
    numbers = {
        label: {seed: {name: value + noise[seed] for name, value in values.items()} for seed in range(3)}
        for label, values in changes.items()
    }
    monkeypatch.setattr(explanations, "load_kept", lambda name: make_kept(numbers | {"not run": {}}))
    assert explanations_block("any").splitlines() == [
        "- (the runs do not show whether not run kept it)",
        "- falls more, or rises less, in networks that lost it (lost) than in networks that kept it (kept): "
        "`hessian_rank`",
        "- rises more, or falls less, in networks that lost it: `dormancy`",
        "- does not separate them: `weight_l1`",
        "- is not defined for all of them, or starts from zero: `sharpness`",
    ]


def test_effect_is_named_by_the_difference_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_effect(Estimate(-0.2, 0.1, 3)) == "helps"
    assert name_effect(Estimate(0.2, 0.1, 3)) == "hurts"
    assert name_effect(Estimate(0.2, 0.3, 3)) == "no difference seen"
    assert name_effect(Estimate(-0.2, 0.1, 2)) == name_effect(None) == "too few seeds"

    def runs(*accuracies: float) -> dict[int, dict[str, float]]:
        return {seed: {"mean_train_accuracy": a, "final_train_accuracy": a / 2} for seed, a in enumerate(accuracies)}

    numbers = {"vanilla": runs(0.5, 0.52, 0.51), "fresh": runs(0.99), "FIRE": runs(0.9, 0.92, 0.91), "L2 1e-3": runs()}
    monkeypatch.setattr(effects, "load_kept", lambda name: make_kept(numbers, "mean_train_accuracy"))
    rows = effect_block("fire").splitlines()[4:]
    assert rows == [
        "| *plain training* |  | 49.0 ± 2.5 | 74.5 ± 1.2 |  |  | 3 |",
        "| *a fresh network for every task* | yes | 1.0 | 50.5 |  |  | 1 |",
        "| FIRE | yes | 9.0 ± 2.5 | 54.5 ± 1.2 | -40.0 ± 0.0 | helps | 3 |",
        "",
        "It helps here with `FIRE`.",
    ]
    assert "| L2 1e-3 |  | – | – | – | too few seeds | 0 |" in effect_block("l2")


def test_verdicts_on_effects_count_how_many_settings_were_tried() -> None:
    """A p-value of 0.03 decides alone, and no longer among nine settings without an effect."""
    plain = {seed: {MEAN: 0.5} for seed in range(5)}
    weak = {seed: {MEAN: 0.5 + gap} for seed, gap in enumerate([0.01, 0.02, 0.03, 0.05, 0.01])}
    none = {seed: {MEAN: 0.5 + gap} for seed, gap in enumerate([0.01, -0.01, 0.02, -0.02, 0.001])}
    worse = {seed: {MEAN: 0.3 + seed / 1000} for seed in range(5)}
    assert judge_effects(make_kept({"vanilla": plain, "L2": weak}, MEAN), MEAN)["L2"] == "helps"
    many = make_kept({"vanilla": plain, "L2": weak, "worse": worse} | {f"none {n}": none for n in range(8)}, MEAN)
    found = judge_effects(many, MEAN)
    assert (found["L2"], found["none 0"], found["worse"]) == ("no difference seen", "no difference seen", "hurts")
    few = make_kept({"vanilla": plain, "L2": {seed: weak[seed] for seed in range(2)}}, MEAN)
    assert judge_effects(few, MEAN)["L2"] == "too few seeds"
    assert judge_effects(make_kept({"vanilla": plain, "L2": weak}, MEAN, bad=1), MEAN)["L2"] == "diverges"


def test_edges_of_a_sweep() -> None:
    def sweep(name: str, *settings: dict[str, int]) -> list[bool]:
        entries = [Entry.model_validate({"label": str(own), "name": name, **own}) for own in settings]
        return [is_at_edge(entry, entries) for entry in entries]

    rescaling = sweep("weight_rescaling", *({"every": n, "first": n // 2} for n in (2, 10, 100)), {"every": 400})
    assert rescaling == [True, False, False, True], "`first` is a phase, not a size"
    assert sweep("plasticity_injection", {"layers": 3}, {"layers": 4}) == [True, False], "there are four weight layers"


def test_methods_that_act_by_themselves_are_not_marked_as_told() -> None:
    told = {"fresh": True, "fire": True, "layer_norm+shrink_perturb": True, "fire:every=100": False}
    told |= {"vanilla": False, "swr": False, "redo:every=100": False}
    assert {text: is_told(Entry.model_validate(text)) for text in told} == told


def test_summary_sentence_of_all_settings() -> None:
    assert sum_up({"hurts": ["c"], "helps": ["a", "b"]}) == "It helps here with a and b; it hurts with c."
    assert sum_up({"no difference seen": ["a"], "diverges": ["b"]}) == (
        "**No help was seen here**: it diverges with b; it shows no significant difference with a."
    )
    assert sum_up({"too few seeds": ["a", "b", "c"], "helps": ["d"]}) == (
        "It helps here with d. Too few seeds to say what it does here with a, b and c."
    )
    assert sum_up({"too few seeds": ["a"], "hurts": ["d"]}) == (  # not "no help was seen": a may help
        "It hurts with d. Too few seeds to say what it does here with a."
    )
    assert sum_up({"too few seeds": ["a"]}) == "Too few seeds to say what it does here with a."


def test_overview_shows_the_best_setting_and_the_cost_of_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(*errors: float) -> dict[int, dict[str, float]]:
        return {seed: {MEAN: 1 - error} for seed, error in enumerate(errors)}

    numbers = {label: runs() for label in [entry.label for entry in find_recipe(EFFECT).methods]}
    numbers |= {"vanilla": runs(0.5, 0.6, 0.7), "L2 1e-2": runs(0.4, 0.5, 0.6), "L2 1e-3": runs(0.1, 0.2, 0.3)}
    numbers |= {"L2 1e-4": runs(0.2, 0.3, 0.4), "FIRE": runs(0.0, 0.1, 0.2), "clipping 1": runs(0.3, 0.3, 0.3)}
    numbers |= {"clipping 2": runs(0.4, 0.4, 0.4), "L2 1e-1": runs(0.0, 0.0), "LayerNorm + NaP": runs(0.0, 0.0, 0.0)}
    monkeypatch.setattr(effect_overview, "load_kept", lambda name: make_kept(numbers, MEAN))
    rows = [row.strip("| ").split(" | ") for row in effect_overview.effects_block("all").splitlines()[4:]]
    assert rows[:3] == [
        ["[`fire`](fire.md)", "FIRE", "yes", "10.0 ± 24.8", "-50.0 ± 0.0", "helps", "1 of 5", "3", "2.84 steps"],
        ["[`l2`](l2.md)", "L2 1e-3", "", "20.0 ± 24.8", "-40.0 ± 0.0", "helps", "3 of 5", "3", "1.02"],
        ["[`weight_clipping`](weight_clipping.md)", "clipping 1 †", "", "30.0 ± 0.0", "-30.0 ± 24.8", "helps", "2 of 7",
         "3", "1.02"],
    ]  # fmt: skip
    assert {row[5] for row in rows[3:]} == {"too few seeds"}
    assert sorted(row[0] for row in rows) == sorted(f"[`{name}`]({name}.md)" for name in methods.names())


def test_kept_experiment_becomes_a_report_with_the_published_numbers(tmp_path: Path) -> None:
    page = make_page("p0_table1_mnist", tmp_path / "page").read_text()
    recipe = find_recipe("p0_table1_mnist")
    mean, spread = recipe.published["SWR"]
    assert f"{100 * mean:.2f} ± {100 * spread:.2f}" in page
    assert recipe.title in page
    assert "unreadable" not in page
    assert len(load_runs(tmp_path / "page")) > 0
