"""Recipes with domain = "rl": what they may say, that they run, and what the page says of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pliant.experiments.experiment import rehearse, run_experiment
from pliant.experiments.recipe import Recipe, RecipeError, make_recipe
from pliant.experiments.recipe_files import find_recipe, load_recipe
from pliant.experiments.report.document import make_report
from pliant.experiments.report.figures import Figure
from pliant.experiments.run import execute
from pliant.experiments.store import load_recipe_values, load_runs

ROOT = Path(__file__).parents[2]
VALUES: dict[str, Any] = {
    "title": "small",
    "domain": {"name": "rl"},
    "env": "CartPole-v1",
    "agent": {"name": "dqn", "learning_starts": 20, "train_freq": 1, "target_update_interval": 10},
    "stream": {"name": "intervention", "steps": 120, "at": [60], "evaluate_every": 30, "episodes": 2},
    "methods": ["vanilla", "fire", {"label": "more updates", "name": "vanilla", "agent": {"gradient_steps": 2}}],
    "seeds": 2,
}


def run_here(recipe: Recipe, root: Path) -> None:
    statuses = run_experiment(recipe, root, lambda configs: {c.id: execute(c, root).status for c in configs})
    assert set(statuses.values()) == {"finished"}


def test_environment_and_agent_are_data_and_model_of_every_run(tmp_path: Path) -> None:
    recipe = make_recipe(VALUES)
    assert [config.label for config, _ in rehearse(recipe)] == ["vanilla", "fire", "more updates"]
    config = recipe.config(recipe.methods[2], (), 0, "result")
    assert config.data.name == "CartPole-v1"
    given = {key: value for key, value in VALUES["agent"].items() if key != "name"}
    assert config.model.options == given | {"gradient_steps": 2}
    assert make_recipe(json.loads(recipe.model_dump_json())) == recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domain": "supervised"}, "needs domain = 'rl'"),
        ({"domain": "rlx"}, "domain is 'rlx'"),
        ({"stream": "warm_start"}, "stream is 'warm_start', which domain 'rl' does not have; it must be one of env"),
        ({"training": {"lr": 0.1}}, "write them under agent"),
        ({"data": "digits"}, "env and data are both given"),
        ({"headline": "final_test_accuracy"}, "headline"),
        ({"stream": {"name": "intervention", "tasks": 3}}, "tasks"),
    ],
)
def test_wrong_recipes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        make_recipe(VALUES | changes)


def test_the_page_shows_what_is_usual_for_agents(tmp_path: Path) -> None:
    run_here(make_recipe(VALUES | {"seeds": 3}), tmp_path)
    (section,) = make_report(tmp_path).sections
    assert section.comparison.headline == "final_late_return"
    assert section.setting["environment"] == "CartPole-v1"
    assert "training" not in section.setting
    names = [figure.name for figure in section.figures]
    aggregates = {"interquartile_mean", "probability_of_improvement", "performance_profile", "sample_efficiency"}
    assert {*aggregates, "curve_evaluation_return"} <= {*names}
    assert "task_ends" not in names, "an intervention begins no task"
    for history in section.histories.of["fire"]:
        assert history.x[-1] == 120
    assert section.histories.boundaries == [60.0]
    figures = {figure.name: figure for figure in section.figures}
    for name in ("sample_efficiency", "curve_evaluation_return"):
        assert "dotted lines mark interventions" in figures[name].note
        assert "x\n60\n" in figures[name].spec()["datasets"].values(), "a line at the intervention"
    curve = {
        float(x): [float(value) for value in values]
        for key, _, x, _, _, *values in (row.split(",") for row in drawn_rows(figures["sample_efficiency"]))
        if key == next(each.key for each in section.series if each.name == "fire")
    }
    returns = {history.seed: history.values["evaluation_return"][-1] for history in section.histories.of["fire"]}
    middle, low, high = curve[120.0]
    assert middle == pytest.approx(sum(returns.values()) / 3, rel=1e-4), "a quarter of three seeds is none"
    assert min(returns.values()) == pytest.approx(low, rel=1e-4)
    assert max(returns.values()) == pytest.approx(high, rel=1e-4)
    assert section.histories.x_title == "environment steps"
    assert "environment steps" in make_report(tmp_path).to_html()


def drawn_rows(figure: Figure) -> list[str]:
    """The rows of a chart of curves: key, order, x, task, epoch, mean, low, high."""
    (text,) = (text for text in figure.spec()["datasets"].values() if text.startswith("key,place,x,"))
    return text.splitlines()[1:]


def test_the_demo_is_a_recipe_that_runs(tmp_path: Path) -> None:
    less = ("seeds=1", "stream.first=40", "stream.updates=20", "stream.steps=80", "stream.evaluate_every=40")
    recipe = load_recipe(find_recipe("demo_rl"), [*less, "agent.learning_starts=10"])
    run_here(recipe, tmp_path)
    runs = {run.config.label: run for run in load_runs(tmp_path)}
    assert len(list((tmp_path / "first_tasks" / "runs").iterdir())) == 2, "primed, and never primed"
    assert runs["never primed"].records[0] != runs["vanilla"].records[0]


def test_the_howto_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto-agents.md").read_text()
    code = "".join(re.findall(r"^```python needs=stable_baselines3\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "howto-agents.md", "exec"), namespace)
    assert [step for step, _ in namespace["fire"].receipts] == [300]
    (file, recipe), *_ = re.findall(r"^```toml file=(\S+)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    Path(file).write_text(recipe)
    assert f"$ pliant run {file}" in page
    run_here(load_recipe(Path(file), ["seeds=1", "stream.steps=200", "stream.at=[100]"]), tmp_path / "runs-here")
    assert load_recipe_values(tmp_path / "runs-here")["domain"] == "rl"
