"""The leaderboard ranks methods by runs that did not choose their settings."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import defaults, leaderboard
from benchmarks.leaderboard import (
    FRESH,
    PLAIN,
    choose_held_out,
    kept_streams,
    leaderboard_block,
    load_stream,
    rank,
    read_scores,
    stand,
)

import pliant
from pliant import methods
from pliant.experiments import engines
from pliant.experiments.archive import pack
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run_config import Part
from pliant.experiments.store import Run
from tests.experiments.helpers import EngineHere


def test_a_setting_that_is_lucky_on_one_seed_does_not_score_there() -> None:
    lucky = {0: 1.0, 1: 0.0, 2: 0.0}
    steady = {0: 0.4, 1: 0.4, 2: 0.4}
    assert choose_held_out({"lucky": lucky, "steady": steady}) == {0: 0.4, 1: 0.0, 2: 0.0}
    assert choose_held_out({"steady": steady}) == steady


def test_methods_are_ranked_by_the_share_of_the_gap_that_they_close() -> None:
    def scores(**means: float) -> dict[str, dict[int, float]]:
        return {name: {seed: mean + 0.001 * seed for seed in range(5)} for name, mean in means.items()}

    streams = {
        "one": scores(vanilla=0.5, fresh=0.9, l2=0.7, swr=0.8, fire=0.95),
        "two": scores(vanilla=0.2, fresh=0.6, l2=0.1, swr=0.5, redo=0.6),
    }
    first, second = stand(streams)  # fire and redo are each missing on a stream
    assert (first.method, second.method) == ("swr", "l2")
    assert (first.rank, first.low, first.high, second.rank) == (1.0, 1.0, 1.0, 2.0)
    assert first.shares == pytest.approx({"one": 0.75, "two": 0.75})
    assert second.shares == pytest.approx({"one": 0.5, "two": -0.25})


def test_intervals_show_that_seeds_disagree() -> None:
    noisy = {
        PLAIN: dict.fromkeys(range(4), 0.0),
        FRESH: dict.fromkeys(range(4), 1.0),
        "l2": {0: 0.9, 1: 0.1, 2: 0.8, 3: 0.3},
        "swr": dict.fromkeys(range(4), 0.5),
    }
    first, second = stand({"one": noisy})
    assert first.low == 1.0 < 2.0 == first.high
    assert {first.method, second.method} == {"l2", "swr"}


def test_equal_methods_share_a_rank() -> None:
    assert rank({"a": 1.0, "b": 1.0, "c": 0.0, "d": 2.0}) == {"a": 2.5, "b": 2.5, "c": 4.0, "d": 1.0}


def make_runs(label: str, values: list[float | None]) -> list[Run]:
    entry = label if label in (PLAIN, FRESH) else {"label": label, "name": "l2", "lam": 0.1}
    values_of = {"data": "digits", "model": "mlp", "stream": "single", "methods": [entry]}
    recipe = make_recipe(values_of)
    parts = () if isinstance(entry, str) else (Part("l2", {"lam": 0.1}),)
    return [
        Run(
            Path("run"),
            recipe.config(recipe.methods[0], parts, seed, "result"),
            "diverged" if value is None else "finished",
            {} if value is None else {"final_test_accuracy": value, "mean_test_loss": -value},
            "",
        )
        for seed, value in enumerate(values)
    ]


def test_settings_that_diverged_or_lack_seeds_are_left_out() -> None:
    runs = [*make_runs(PLAIN, [0.5] * 3), *make_runs(FRESH, [0.9] * 3), *make_runs("weak", [0.6, 0.61, 0.62])]
    good = read_scores(runs, "final_test_accuracy")
    assert good["l2"] == {0: 0.6, 1: 0.61, 2: 0.62}
    more = [*make_runs("short", [0.99, 0.99]), *make_runs("wild", [0.99, 0.99, 0.99, None])]
    assert read_scores(runs + more, "final_test_accuracy") == good
    assert read_scores(runs, "mean_test_loss") == good


def test_controls_are_not_plain_training() -> None:
    runs = [*make_runs(PLAIN, [0.5] * 3), *make_runs(FRESH, [0.9] * 3)]
    control = [Run(run.path, replace(run.config, label="weight decay"), run.status, {"final_test_accuracy": 0.99}, "")
               for run in make_runs(PLAIN, [0.99] * 3)]  # fmt: skip
    assert read_scores(runs + control, "final_test_accuracy") == read_scores(runs, "final_test_accuracy")


def test_a_stream_counts_once_its_file_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    known = kept_streams()
    assert len(known) >= 4
    monkeypatch.setitem(leaderboard.STREAMS, "not yet", "reproduction/nothing")
    assert kept_streams() == known


def test_stream_with_few_methods_is_listed_and_ranks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {PLAIN: {0: 60.0, 1: 80.0}, FRESH: {0: 160.0, 1: 180.0}, "fire": {0: 110.0, 1: 130.0}}
    monkeypatch.setattr(leaderboard, "RESAMPLES", 40)
    monkeypatch.setattr(leaderboard, "BESIDE", {})
    before = leaderboard_block("all").splitlines()
    kept = {"agents": "agents"}
    load = leaderboard.load_stream
    monkeypatch.setattr(leaderboard, "BESIDE", kept)
    monkeypatch.setattr(
        leaderboard, "kept_streams", lambda streams=leaderboard.STREAMS: kept if streams is kept else kept_streams()
    )
    monkeypatch.setattr(leaderboard, "load_stream", lambda file: agents if file == "agents" else load(file))
    line = "Not ranked, by *agents* (2 seeds): `fire` 0.50."
    assert leaderboard_block("all").splitlines() == [*before, "", line]
    agents[FRESH] = {0: 60.0, 1: 70.0}
    line = "On *agents*, plain training does not end below a fresh network: there is no gap to close."
    assert leaderboard_block("all").splitlines() == [*before, "", line]


def test_fresh_networks_may_have_another_label() -> None:
    runs = make_runs(PLAIN, [0.5] * 3)
    reset = [Run(run.path, replace(run.config, label="full reset"), "finished", {"final_test_accuracy": 0.8}, "")
             for run in make_runs(FRESH, [0.8] * 3)]  # fmt: skip
    assert set(read_scores(runs + reset, "final_test_accuracy")) == {PLAIN, FRESH}


@pytest.mark.parametrize("file", kept_streams().values())
def test_streams_are_kept_with_both_baselines(file: str) -> None:
    scores = load_stream(file)
    assert {PLAIN, FRESH} <= set(scores) <= {PLAIN, FRESH, *methods.names()}
    assert len(scores[PLAIN]) >= 3


def test_command_adds_the_runs_of_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = {
        "data": {"name": "digits", "first": 60},
        "stream": {"name": "random_labels", "tasks": 2, "epochs": 1},
        "training": {"batch_size": 30},
    }
    monkeypatch.setattr(engines, "ProcessEngine", EngineHere)
    (tmp_path / "defaults").mkdir()
    for seed in (0, 100):
        pliant.compare(
            ["vanilla", "fresh"], model="mlp", seeds=[seed], out=tmp_path / str(seed), progress=False, **setup
        )
        pack(tmp_path / str(seed), tmp_path / "defaults" / f"tiny-{seed}.jsonl.gz")
    (tmp_path / "defaults.md").write_text("<!-- defaults -->\n<!-- end defaults -->")
    for name, value in {"STREAMS": {"tiny": setup}, "SEEDS": [0], "CHOOSING_SEEDS": [100]}.items():
        monkeypatch.setattr(defaults, name, value)
    monkeypatch.setattr(defaults, "RESULTS", tmp_path)
    monkeypatch.setattr(defaults, "DOCS", tmp_path / "defaults.md")
    monkeypatch.setattr(leaderboard, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["leaderboard", "full_reset"])
    monkeypatch.chdir(tmp_path)
    leaderboard.run_command()
    assert set(load_stream("defaults/tiny-0")) == {PLAIN, FRESH, "full_reset"}
