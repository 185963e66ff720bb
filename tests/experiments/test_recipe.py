"""Recipes: what they say, and what they answer when something is wrong."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from pliant.experiments.recipe import Recipe, RecipeError, make_recipe, parse_method
from pliant.experiments.recipe_files import Scale, find_recipe, load_recipe, recipe_folder
from pliant.experiments.run_config import Part, RunConfig

GOOD: dict[str, Any] = {"data": "digits", "model": "mlp", "stream": "warm_start", "methods": ["vanilla", "swr"]}


def make(**changes: Any) -> Recipe:
    return make_recipe(GOOD | changes)


def test_names_tables_and_defaults() -> None:
    recipe = make(model={"name": "cnn", "width": 7}, seeds=2)
    assert recipe.data == Part("digits")
    assert recipe.model == Part("cnn", {"width": 7})
    assert recipe.seeds == (0, 1)
    assert make(seeds=[4, 9]).seeds == (4, 9)
    assert recipe.selection.on == "validation"


def test_every_recipe_that_comes_along_is_right() -> None:
    recipes = sorted(recipe_folder().glob("*.toml"))
    assert [path.stem for path in recipes if path.stem == "demo"] == ["demo"]
    for path in recipes:
        assert load_recipe(path).methods


def test_methods_as_text() -> None:
    recipe = make(methods=["vanilla", "fresh", "swr:lam=1e-3", "swr+l2:lam=0.1", "l2_init:lam=1e-2|1e-3"])
    assert [entry.label for entry in recipe.methods] == ["vanilla", "fresh", "swr", "swr+l2", "l2_init"]
    assert [entry.fresh for entry in recipe.methods] == [False, True, False, False, False]
    assert recipe.methods[0].variants() == [()]
    assert recipe.methods[2].variants() == [(Part("swr", {"lam": 1e-3}),)]
    assert recipe.methods[3].variants() == [(Part("swr"), Part("l2", {"lam": 0.1}))]
    assert recipe.methods[4].variants() == [(Part("l2_init", {"lam": 1e-2}),), (Part("l2_init", {"lam": 1e-3}),)]


def test_methods_as_tables() -> None:
    recipe = make(
        methods=[
            {"name": "vanilla", "label": "nothing"},
            {"name": "swr", "label": "SWR", "lam": 0.1, "grid": {"lam_classifier": [1, 2]}},
            {"label": "both", "parts": [{"name": "l2", "lam": 1}, "swr:lam=2|3"]},
            {"name": "shrink_perturb", "grid": "sweep"},
            {"parts": ["swr:lam=1", {"name": "l2"}]},
        ]
    )
    nothing, swr, both, swept, unnamed = recipe.methods
    assert unnamed.label == "swr+l2"
    assert (nothing.label, nothing.variants()) == ("nothing", [()])
    assert swr.variants() == [
        (Part("swr", {"lam": 0.1, "lam_classifier": 1}),),
        (Part("swr", {"lam": 0.1, "lam_classifier": 2}),),
    ]
    assert both.variants() == [
        (Part("l2", {"lam": 1}), Part("swr", {"lam": 2})),
        (Part("l2", {"lam": 1}), Part("swr", {"lam": 3})),
    ]
    assert [parts[0].options["lam"] for parts in swept.variants()] == [0.2, 0.4, 0.6, 0.8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": "warmstart"}, "stream is 'warmstart'; did you mean 'warm_start'? Allowed: single, warm_start"),
        ({"stream": {"name": "single", "epoch": 3}}, "stream: there is no 'epoch'; did you mean 'epochs'?"),
        ({"stream": {"name": "single", "epochs": "many"}}, "stream.epochs is 'many': Input should be a valid integer"),
        ({"model": "resnet"}, "model is 'resnet'; did you mean 'resnet18'?"),
        ({"model": {"name": "cnn", "widht": 3}}, "model: there is no 'widht'; did you mean 'width'?"),
        ({"model": "mine.py"}, "model is 'mine.py'; name a function in that file too: mine.py:function"),
        ({"data": "mine.py"}, "data is 'mine.py'; it must name a function in the file: mine.py:function"),
        ({"data": "minst"}, "did you mean 'mnist'?"),
        ({"data": {"name": "digits", "frist": 3}}, "data: there is no 'frist'; did you mean 'first'?"),
        ({"training": {"lr": "fast"}}, "training.lr is 'fast': input should be a valid number"),
        ({"training": {"optimiser": "adam"}}, "training: there is no 'optimiser'; did you mean 'optimizer'?"),
        ({"training": {"optimizer": "adm"}}, "training.optimizer is 'adm': input should be 'adam', 'adamw' or 'sgd'"),
        ({"training": {"lr": -1}}, "training: lr: -1.0 is not allowed; it must be a number that is finite and > 0"),
        (
            {"methods": ["swt"]},
            "methods.0.parts.0: there is no method 'swt'; did you mean 'swr'? Allowed: vanilla, fresh",
        ),
        ({"methods": ["l2", "vanila"]}, "methods.1.parts.0: there is no method 'vanila'; did you mean 'vanilla'?"),
        ({"methods": [{"name": "frsh", "grid": "sweep"}]}, "there is no method 'frsh'; did you mean 'fresh'?"),
        ({"methods": ["every=97"]}, "'every=97'; write a colon before every setting: redo:tau=0.1:every=97"),
        ({"methods": ["vanilla+l2"]}, "vanilla is a baseline, not a method: it stands alone and has no settings"),
        ({"methods": ["swr:lamb=1"]}, "swr: there is no 'lamb'; did you mean 'lam'?"),
        ({"methods": ["swr:lam"]}, "'lam' must be of the form setting=value"),
        ({"methods": ["swr", "swr"]}, "methods: 'swr' occurs 2 times; give each entry its own label"),
        ({"methods": []}, "methods: is empty"),
        ({"methods": [{"name": "swr", "grid": {"lam": []}}]}, "grid of swr.lam is empty"),
        ({"measures": ["wait_l2"]}, "measures: there is no 'wait_l2'; did you mean 'weight_l2'?"),
        ({"headline": "mean_train_acuracy"}, "headline: there is no 'mean_train_acuracy'; did you mean"),
        ({"reference": "start"}, "reference is 'start': input should be 'initial', 'boundary' or 'previous_task'"),
        ({"seeds": []}, "seeds: is empty; give at least one"),
        ({"seeds": 0}, "seeds: is 0; their number must be 1 … 10000"),
        ({"seeds": -3}, "seeds: is -3; their number must be 1 … 10000"),
        ({"seeds": 10**12}, "seeds: is 1000000000000; their number must be 1 … 10000"),
        ({"methods": ["l2:lam=abc"]}, "l2.lam is 'abc': Input should be a valid number"),
        ({"methods": ["l2:lam=1|abc"]}, "l2.lam is 'abc': Input should be a valid number"),
        ({"methods": ["fire:layers=attention"]}, "fire.layers is 'attention': Input should be 'auto', 'all' or 'qk'"),
        ({"methods": [{"name": "vanilla", "trainnig": {}}]}, "methods.0.trainnig: there is no such key; did you mean"),
        ({"methods": [{"name": "vanilla", "lam": 3}]}, "methods.0.lam: there is no such key; "),
        ({"methods": [{"name": "fresh", "grid": {"lam": [1]}}]}, "methods.0.grid: there is no such key"),
        ({"methods": [{"label": "x", "parts": [{"grid": "sweep"}]}]}, "methods.0.parts.0.name: is missing"),
        ({"methods": [{"label": "x", "parts": ["crelu"], "fresh": True}]}, "x: crelu changes the network, but fresh"),
        ({"methods": [{"name": "l2_init", "fresh": True}]}, "l2_init: l2_init remembers the network, but fresh"),
        (
            {"methods": [{"label": "x", "parts": [{"name": "l2", "settings": {}, "gird": {}}]}]},
            "there is no such key; did you mean 'grid'",
        ),
        (
            {"methods": [{"name": "vanilla", "training": {"batch_size": "x"}}]},
            "training.batch_size is 'x': Input should be a valid integer",
        ),
        ({"data": {"name": "digits", "first": "abc"}}, "data.first is 'abc': Input should be a valid integer"),
        ({"data": {"name": "digits", "pixels": "raw"}}, "data.pixels is 'raw': Input should be 'standard' or 'unit'"),
        ({"device": "foo"}, "device is 'foo'; it must be a device of torch: cpu, cuda, cuda:1, …"),
        ({"seeds": [1, 1]}, "seeds: [1, 1] holds a seed twice"),
        ({"seeds": "many"}, "seeds is 'many'; it must be how many, or a list of them"),
        ({"measures": "loss"}, "measures is 'loss': input should be a valid list"),
        (
            {"methods": [{"name": ["swr", "l2"]}]},
            "name is ['swr', 'l2']; it must be one method; write several as parts",
        ),
        ({"methods": [{"name": "vanilla", "fresh": True}]}, "fresh is True for the baseline 'vanilla'; drop one of"),
        ({"methods": [{"name": "fresh", "fresh": False}]}, "fresh is False for the baseline 'fresh'; drop one of"),
        (
            {"methods": [{"name": "head_reset", "grid": "sweep"}]},
            "grid of head_reset is 'sweep', but no sweep is published",
        ),
        ({"methods": ["l2:lam=1e-2:lam=1e-4"]}, "lam has two values; put | between values to choose from"),
        ({"methods": ["l2:lam=1|2:lam=3"]}, "lam has two values; put | between values to choose from"),
        ({"sedes": 3}, "sedes: there is no such key; did you mean 'seeds'?"),
        ({"selection": {"on": "tset"}}, "selection.on is 'tset': input should be 'validation' or 'test'"),
        ({"selection": {"fraction": 2}}, "selection.fraction is 2: input should be less than 1"),
        ({"selection": {"seed": 2}}, "selection.seed: there is no such key; did you mean 'seeds'?"),
        ({"data": {"name": "digits", "first": math.inf}}, "data.first: inf is not allowed; it must be finite"),
        ({"training": {"lr": math.nan}}, "training.lr: nan is not allowed; it must be finite"),
        (
            {"data": {"name": "digits", "until": date(2024, 3, 1)}},
            "data.until: 2024-03-01 is a date or a time;",
        ),
        ({"data": {"name": "digits", "options": 5}}, "data.options is 5"),
        ({"methods": [{"name": "vanilla", "data": {"name": 3}}]}, "name is 3 instead of 'digits'; it must be a"),
        ({"methods": ["l2:lam=0.1|1e-1"]}, "grid of l2 has the same settings twice: {'lam': 0.1}"),
        ({"model": {"name": "math:sqrt", "seed": 3}}, "model.seed: the seed of the run draws the initial weights"),
    ],
)
def test_mistakes_are_answered(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make(**changes)
    assert message in str(caught.value)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        make(seeds="x", methods=["swt"])
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(RecipeError, match="data: is missing"):
        make_recipe({key: value for key, value in GOOD.items() if key != "data"})


def test_parts() -> None:
    assert parse_method("fire") == {"name": "fire", "settings": {}, "grid": {}}
    assert parse_method("redo:tau=0.1:every=97")["settings"] == {"tau": 0.1, "every": 97}


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('data = "digits"\nmodel = "mlp"\nstream = "single"\nmethods = ["swr"]\n')
    assert find_recipe(str(path)) == path
    assert load_recipe(path, ["stream.epochs=9"]).stream == Part("single", {"epochs": 9})
    written = tmp_path / "recipe.json"
    written.write_text(load_recipe(path).model_dump_json())
    again = load_recipe(written, ["stream.epochs=9", "data.first=50"])
    assert (again.stream, again.data.options["first"]) == (Part("single", {"epochs": 9}), 50)
    path.write_text("data = ")
    with pytest.raises(RecipeError, match="is not TOML"):
        load_recipe(path)
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path / "other.toml")
    with pytest.raises(RecipeError, match="did you mean 'demo'"):
        find_recipe("demos")


def test_a_result_does_not_depend_on_how_settings_are_chosen() -> None:
    one, other = make(), make(selection={"fraction": 0.3})
    entry = one.methods[0]
    assert one.config(entry, (), 0, "result") == other.config(entry, (), 0, "result")
    assert one.config(entry, (), 0, "selection") != other.config(entry, (), 0, "selection")


def test_the_stream_decides_by_its_own_number_unless_the_recipe_names_one() -> None:
    assert make(stream={"name": "label_flip", "tasks": 2, "epochs": 1}).deciding == "mean_test_accuracy"
    assert make(headline="mean_train_accuracy").deciding == "mean_train_accuracy"


def test_a_run_with_the_initial_reference_has_the_name_it_always_had() -> None:
    recipe = make(reference="boundary")
    config = recipe.config(recipe.methods[0], (), 0, "result")
    initial = replace(config, reference="initial")
    assert "reference" not in json.loads(initial.to_json())
    assert RunConfig.from_dict(json.loads(initial.to_json())) == initial
    assert RunConfig.from_dict(json.loads(config.to_json())) == config
    assert config.id != initial.id


def test_values_of_another_type_are_converted_where_they_can_be() -> None:
    """They would have failed in every run; what was right before must stay as it was written: it names the run."""
    wrong = make(
        stream={"name": "label_flip", "tasks": 2.0, "epochs": "1"},
        data={"name": "digits", "first": 100.0},
        model={"name": "mlp", "widths": ["8"]},
        methods=[{"name": "redo", "every": "10", "training": {"batch_size": 16.0}}],
    )
    right = make(
        stream={"name": "label_flip", "tasks": 2, "epochs": 1},
        data={"name": "digits", "first": 100},
        model={"name": "mlp", "widths": [8]},
        methods=[{"name": "redo", "every": 10, "training": {"batch_size": 16}}],
    )
    one, other = (
        recipe.config(recipe.methods[0], recipe.methods[0].variants()[0], 0, "result") for recipe in (wrong, right)
    )
    assert one.to_json() == other.to_json()


def test_numbers_stay_as_they_are_written() -> None:
    recipe = make(
        stream={"name": "warm_start", "fraction": 1},
        methods=[{"name": "l2", "lam": 1, "training": {"lr": 1, "decay_epochs": [3]}}],
    )
    config = recipe.config(recipe.methods[0], recipe.methods[0].variants()[0], 0, "result")
    values = json.loads(config.to_json())
    written = values["stream"]["options"]["fraction"], values["methods"][0]["options"]["lam"], values["training"]["lr"]
    assert [type(value) for value in written] == [int, int, int]
    assert values["training"]["decay_epochs"] == [3]
    assert RunConfig.from_dict(values) == config  # what is read from a run's folder is what the recipe asks for


def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def build(:\n")
    with pytest.raises(RecipeError, match=r"own\.py:build' is not valid Python: .*\(own\.py, line 1\)"):
        make(model=f"{tmp_path / 'own.py'}:build")


def test_a_recipe_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(RecipeError, match=r"list.json holds a list; a recipe is a table of keys and values"):
        load_recipe(tmp_path / "list.json")
    (tmp_path / "own.toml").write_text("quick = 3")
    with pytest.raises(RecipeError, match=r"quick is 3; it must be a table of what changes"):
        load_recipe(tmp_path / "own.toml", scale="quick")


@pytest.mark.parametrize(
    ("wanted", "labels", "lam"),
    [
        ("vanilla", ["vanilla"], None),
        ("vanilla,SWR", ["vanilla", "SWR"], 1e-4),
        ("SWR, lr-coupled, vanilla", ["SWR, lr-coupled", "vanilla"], 1e-4),
        ('["SWR, lr-coupled"]', ["SWR, lr-coupled"], 1e-4),
        ("swr:lam=0.5,L2", ["swr", "L2"], 0.5),
    ],
)
def test_methods_of_a_recipe_are_picked_by_their_labels(wanted: str, labels: list[str], lam: float | None) -> None:
    recipe = load_recipe(find_recipe("p0_table5_mnist"), [f"methods={wanted}"])
    assert [entry.label for entry in recipe.methods] == labels
    if lam is not None:
        (strength,) = [p.settings["lam"] for entry in recipe.methods for p in entry.parts if p.name == "swr"]
        assert strength == lam


def test_an_unknown_method_or_label_is_an_error() -> None:
    with pytest.raises(RecipeError, match="swrr"):
        load_recipe(find_recipe("p0_table5_mnist"), ["methods=vanilla,swrr"])


@pytest.mark.parametrize(
    ("overrides", "scale", "told"),
    [
        ([], "quick", " (quick scale)"),
        (["stream.epochs=2"], "paper", " (stream.epochs=2)"),
        (["stream.epochs=2", "seeds=1", "data.first=9"], "quick", " (quick scale, stream.epochs=2, data.first=9)"),
    ],
)
def test_a_changed_recipe_says_so_and_shows_no_published_numbers(overrides: list[str], scale: Scale, told: str) -> None:
    path = find_recipe("p0_table1_mnist")
    whole, recipe = load_recipe(path, ["seeds=1", "device=cpu"]), load_recipe(path, overrides, scale)
    assert whole.published
    assert not recipe.published
    assert recipe.title == whole.title + told


def test_published_numbers_of_methods_that_are_left_out_are_left_out() -> None:
    recipe = load_recipe(find_recipe("p0_table1_mnist"), ['methods=["vanilla", "swr"]'])
    assert [entry.label for entry in recipe.methods] == ["vanilla", "swr"]
    assert list(recipe.published) == ["vanilla"]
    with pytest.raises(RecipeError, match=r"methods\.0\.label is \['a'\]: input should be a valid string"):
        load_recipe(find_recipe("p0_table1_mnist"), ['methods=[{label=["a"], name="l2"}]'])


@pytest.mark.parametrize(("text", "message"), [
    ("import no_such_thing", "own.py:build' cannot be imported: No module named 'no_such_thing'"),
    ("from .layers import x", "own.py:build' cannot be imported: attempted relative import .*; write .*own:build"),
])  # fmt: skip
def test_a_failing_import_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ImportError, match=message):
        make(model=f"{tmp_path / 'own.py'}:build")


def test_an_override_that_reaches_no_run_is_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"stream.epochs=1 would change nothing: every method has its own stream.epochs"
    ):
        load_recipe(find_recipe("p3_fig23_epochs"), ["stream.epochs=1"])
    assert load_recipe(find_recipe("p3_fig23_epochs"), ["stream.tasks=2"]).stream.options["tasks"] == 2
