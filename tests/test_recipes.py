"""The recipes: every one is valid at both scales, and runs to the end."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.reproduction.figures import find_repeats, read_source

from pliant import methods, models, streams
from pliant.data.dataset import Dataset, Examples
from pliant.experiments.experiment import run_experiment
from pliant.experiments.recipe import Recipe, RecipeError, make_recipe
from pliant.experiments.recipe_files import Scale, find_recipe, load_recipe, recipe_folder
from pliant.experiments.run import execute
from pliant.experiments.store import Status, load_runs
from pliant.training import Learner, train

RECIPES = sorted(path for path in recipe_folder().glob("*.toml") if not path.stem.startswith("demo"))
SMALL = {"data": "digits", "model": "mlp", "stream": {"name": "single", "epochs": 1}}


def run_here(recipe: Recipe, root: Path) -> dict[str, Status]:
    def run_all(configs):
        return {config.id: execute(config, root).status for config in configs}

    return run_experiment(recipe, root, run_all)


@pytest.mark.parametrize("scale", ["paper", "quick"])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_says_where_it_comes_from(path: Path, scale: Scale) -> None:
    recipe = load_recipe(path, scale=scale)
    assert recipe.title
    assert recipe.source
    assert recipe.choices


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_quick_scale_asks_the_same_question(path: Path) -> None:
    paper, quick = load_recipe(path), load_recipe(path, scale="quick")
    assert [entry.label for entry in quick.methods] == [entry.label for entry in paper.methods]
    assert quick.stream.name == paper.stream.name
    assert quick.measures == paper.measures
    assert len(quick.seeds) <= len(paper.seeds)


FIGURES = {
    "P0": "figures 1 to 6, tables 1 and 5",
    "P2": "figures 1 to 5, 7, 8 and 10 to 14",
    "P3": "figures 1 to 8, 13 to 20 and 23",
    "P4": "figures 2a, 2b, 2c, 3, 4a, 4b, 5a and 5b",
}
"""What of the papers has a recipe: all results but those that docs/recipes.md names."""


@pytest.mark.parametrize("paper", FIGURES)
def test_every_result_of_a_paper_has_a_recipe(paper: str) -> None:
    assert set(read_source(FIGURES[paper])) <= set(find_repeats(paper))


def test_sources_are_read_as_they_are_written() -> None:
    source = "Curvature, §6.3, C.4 to C.6, figures 6 and 15 to 17, table 2b; settings from B.4, table 9"
    assert read_source(source) == [
        *(("figure", number) for number in ("6", "15", "16", "17")),
        ("table", "2b"),
    ]


def test_quick_changes_only_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'data = "digits"\nmodel = "mlp"\nmethods = ["vanilla"]\nstream = { name = "warm_start", epochs = 9 }\n'
        "[quick]\ndata = { first = 100 }\nstream = { first_epochs = 2 }\nseeds = 1\n"
    )
    paper, quick = load_recipe(path), load_recipe(path, ["stream.fraction=0.25"], "quick")
    assert paper.data.options == {}
    assert paper.stream.options == {"epochs": 9}
    assert len(paper.seeds) == 5
    assert quick.data.name == "digits"
    assert quick.data.options == {"first": 100}
    assert quick.stream.options == {"epochs": 9, "first_epochs": 2, "fraction": 0.25}
    assert quick.seeds == (0,)


def test_quick_changes_single_methods_by_their_labels(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    text = (
        'data = "digits"\nmodel = "mlp"\nstream = "single"\n'
        'methods = ["vanilla", "l2:lam=0.5", { label = "ReDo", name = "redo", tau = 0.1, every = 970 }]\n'
    )
    path.write_text(text + "[quick]\nmethods = { ReDo = { every = 9 }, vanilla = { training = { lr = 0.1 } } }\n")
    paper, quick = load_recipe(path), load_recipe(path, scale="quick")
    assert [entry.label for entry in quick.methods] == ["vanilla", "l2", "ReDo"]
    assert quick.methods[0].training == {"lr": 0.1}
    assert quick.methods[1] == paper.methods[1]
    assert quick.methods[2].parts[0].settings == {"tau": 0.1, "every": 9}
    assert paper.methods[2].parts[0].settings == {"tau": 0.1, "every": 970}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            "{ Redo = { every = 9 } }",
            "quick.methods: there is no 'Redo'; did you mean 'ReDo'? Allowed: vanilla, l2,",
        ),
        ("{ ReDo = 9 }", "quick.methods.ReDo is 9; it must be a table of what changes"),
        ("{ l2 = { lam = 1.0 } }", "quick.methods.l2: 'l2:lam=0.5' must be written as a table too, to change it"),
        ("{ swept = { lam = 0.1 } }", "l2_init.lam has both a value, 0.1, and a grid; drop one"),
    ],
)
def test_wrong_changes_of_methods_are_named(tmp_path: Path, changes: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'data = "digits"\nmodel = "mlp"\nstream = "single"\n'
        'methods = ["vanilla", "l2:lam=0.5", { label = "ReDo", name = "redo" },'
        ' { label = "swept", name = "l2_init", grid = "sweep" }]\n'
        f"[quick]\nmethods = {changes}\n"
    )
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(path, scale="quick")


def test_quick_may_shorten_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'data = "digits"\nmodel = "mlp"\nstream = "single"\nmethods = [{ label = "L2", name = "l2", grid = "sweep" }]\n'
        "[quick]\nmethods = { L2 = { grid = { lam = [0.1] } } }\n"
    )
    assert load_recipe(path, scale="quick").methods[0].parts[0].grid == {"lam": [0.1]}


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p.stem.startswith("p2_") and '"redo"' in p.read_text()], ids=lambda path: path.stem
)
def test_redo_acts_at_quick_scale(path: Path) -> None:
    recipe = load_recipe(path, scale="quick")
    for entry in recipe.methods:
        config = recipe.config(entry, (), 0, "result")
        steps = config.data.options["first"] // config.training.batch_size * config.stream.options["epochs"]
        for settings in [part.settings for part in entry.parts if part.name == "redo"]:
            assert settings.get("first", settings["every"]) <= steps, entry.label


def test_recipe_without_quick_scale_says_so(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('data = "digits"\nmodel = "mlp"\nstream = "single"\nmethods = ["vanilla"]\n')
    with pytest.raises(RecipeError, match="no table 'quick'"):
        load_recipe(path, scale="quick")


def test_entry_may_differ_in_more_than_the_method(tmp_path: Path) -> None:
    entries = [
        "vanilla",
        {"name": "vanilla", "label": "tanh", "model": {"activation": "tanh"}},
        {"name": "l2", "lam": 1e-3, "label": "other", "model": {"name": "mlp_3x256"}, "training": {"lr": 0.1}},
        {"name": "fresh", "label": "short", "stream": {"epochs": 1}, "data": {"first": 100}},
    ]
    recipe = make_recipe(SMALL | {"methods": entries, "seeds": 1, "model": {"name": "mlp", "widths": [8]}})
    run_here(recipe, tmp_path)
    runs = {run.config.label: run for run in load_runs(tmp_path)}
    assert {run.status for run in runs.values()} == {"finished"}
    assert runs["vanilla"].config.model.options == {"widths": [8]}
    assert runs["tanh"].config.model.options == {"widths": [8], "activation": "tanh"}
    assert runs["other"].config.model.name == "mlp_3x256"
    assert runs["other"].config.model.options == {}
    assert runs["other"].config.training.lr == 0.1
    assert runs["vanilla"].config.training.lr == 1e-3
    assert runs["short"].config.data.options == {"first": 100}
    assert runs["short"].config.fresh


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "vanilla", "model": {"activatoin": "tanh"}}, "activation"),
        ({"name": "vanilla", "stream": {"name": "warm_start"}}, "name"),
        ({"name": "vanilla", "training": {"learning_rate": 0.1}}, "learning_rate"),
        ({"name": "vanilla", "data": {"name": "minst"}}, "mnist"),
    ],
)
def test_wrong_difference_of_an_entry_is_named(entry: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe(SMALL | {"methods": [entry]})


def test_published_number_without_an_entry_is_refused() -> None:
    with pytest.raises(RecipeError, match="SWR"):
        make_recipe(SMALL | {"methods": ["vanilla"], "published": {"SWR": [0.9, 0.1]}})


def test_runs_are_ordered_by_seed_so_that_a_part_of_them_compares(tmp_path: Path) -> None:
    recipe = make_recipe(SMALL | {"methods": ["vanilla", "l2"], "seeds": 2})
    asked = []

    def note(configs):
        asked.extend((config.label, config.seed) for config in configs)
        return {}

    run_experiment(recipe, tmp_path, note)
    assert asked == [("vanilla", 0), ("l2", 0), ("vanilla", 1), ("l2", 1)]


def test_runs_with_decay_are_those_without_it_until_the_decay(tmp_path: Path) -> None:
    """What allows the kept runs of table 5 to go on from those of table 1 at epoch 100."""
    curves: dict[str, list] = {}
    for table, decay in (("p0_table1_mnist", "[]"), ("p0_table5_mnist", "[2]")):
        changes = ["data=digits", "stream.epochs=3", "seeds=1", f"training.decay_epochs={decay}"]
        run_here(load_recipe(find_recipe(table), changes), tmp_path / table)
        for run in load_runs(tmp_path / table):
            curves[f"{table} {run.config.label}"] = [(r["loss"], r["test_loss"]) for r in run.records]
    for label in ("vanilla", "L2", "L2 Init", "SWR", "SWR + re-init", "SWR, lr-coupled"):
        with_decay = curves[f"p0_table5_mnist {label}"]
        without = curves[f"p0_table1_mnist {'SWR' if 'SWR' in label else label}"]
        assert with_decay[:2] == without[:2]
        assert with_decay[2] != without[2]


SAMPLE = {
    "p0_table5_mnist": ["stream.epochs=2", "training.decay_epochs=[1]", "data.first=1000", "seeds=1"],
    "p0_warm_start_mnist": ["stream.epochs=1", "stream.first_epochs=1", "data.first=1000", "seeds=1"],
}
"""Recipes whose quick form runs here, smaller still; all of them run with one seed with the marker `long`."""


@pytest.mark.needs_data("mnist")
@pytest.mark.parametrize("name", SAMPLE)
def test_sample_runs_to_the_end(name: str, tmp_path: Path) -> None:
    assert_quick_form_runs(name, SAMPLE[name], tmp_path)


STAND_IN = {"cifar100": "cifar10", "svhn": "cifar10", "emnist": "mnist", "fashion_mnist": "mnist"}
"""Data of the same shape for what continuous integration does not have: all but the download is tested."""


@pytest.mark.long
@pytest.mark.needs_data("mnist", "cifar10")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_quick_form_runs_to_the_end(path: Path, tmp_path: Path) -> None:
    data = load_recipe(path, scale="quick").data.name
    stand_in = [f"data.name={STAND_IN[data]}"] if data in STAND_IN else []
    assert_quick_form_runs(path.stem, ["seeds=1", *stand_in], tmp_path)


def assert_quick_form_runs(name: str, overrides: list[str], root: Path) -> None:
    recipe = load_recipe(find_recipe(name), overrides, "quick")
    statuses = run_here(recipe, root)
    assert set(statuses.values()) == {"finished"}, [run.error for run in load_runs(root) if run.error]
    results = [run for run in load_runs(root) if run.config.purpose == "result"]
    assert {run.config.label for run in results} == {entry.label for entry in recipe.methods}


@pytest.mark.long
def test_first_steps_of_the_gpt_at_paper_scale() -> None:
    """Two steps of two windows each: the recipe's network, settings and FIRE; only the batch is smaller."""
    recipe = load_recipe(find_recipe("p4_fig3_gpt"))
    window, vocabulary = recipe.data.options["window"], recipe.data.options["vocabulary"]
    tokens = torch.randint(vocabulary, (8, window + 1), generator=torch.Generator().manual_seed(0))
    examples = Examples(tokens[:, :-1], tokens[:, 1:], source=torch.arange(8) // 4)
    dataset = Dataset("tokens", examples.select(torch.tensor([0, 1, 4, 5])), examples.select(torch.tensor([2, 6])),
                      classes=tuple(map(str, range(vocabulary))))  # fmt: skip
    stream = streams.create("text_warm_start", dataset, first_epochs=1, epochs=1, share=0.0)
    model = models.create(recipe.model.name, (window,), vocabulary, **recipe.model.options)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.124e9, rel=0.01)
    settings = replace(recipe.training, batch_size=2, accumulate=2)
    fire = next(entry for entry in recipe.methods if entry.label.startswith("FIRE")).variants()[0][0]
    learner = Learner(model, settings, [methods.create(fire.name, model, **fire.options)])
    first, second = train(learner, stream, 0)
    assert first["loss"] == pytest.approx(math.log(vocabulary), rel=0.02)
    assert math.isfinite(second["loss"])
    assert second["receipts"][0]["tensors"] > 4 * 12
