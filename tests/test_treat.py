"""`pliant.treat` and `pliant treat`: from a checkpoint and data to an answer, code that runs, and a page."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pliant
from pliant import data, models
from pliant.experiments import halving, timing
from pliant.experiments.remedy_code import write_code
from pliant.experiments.run_config import SELECTION_SEEDS, Part, Start
from pliant.experiments.store import load_runs
from pliant.training import Settings
from tests import test_cli
from tests.data.pictures import write_folder
from tests.experiments.helpers import EngineHere, small, wait_until

command = test_cli.pliant
module = importlib.import_module("pliant.treat")
MODEL = {"name": "mlp", "widths": [16]}
SMALL: dict[str, Any] = {
    "model": MODEL,
    "data": {"name": "digits", "first": 200},
    "methods": "shrink_perturb:lam=0.4|0.8,head_reset",
    "seeds": 3,
    "epochs": 4,
    "training": {"batch_size": 16, "lr": 3e-3},
    "progress": False,
}
ALL = [
    name
    for name in pliant.methods.names()
    if pliant.methods.info(name).kind != "architecture" and name not in module._NOT_TRIED
]
REQUIRED = {"feature_rank": {"lam": 1e-4}}
FLAGS = [
    *("--model", "mlp", "--set", "model.widths=[16]", "--data", "digits", "--set", "data.first=200"),
    *("--methods", "shrink_perturb:lam=0.4|0.8,head_reset", "--seeds", "3", "--epochs", "4"),
    *("--batch-size", "16", "--lr", "3e-3"),
]


def write_checkpoint(path: Path, scale: float) -> Path:
    """An untrained network with larger weights: with 6 it hardly learns, with 1 it can."""
    model = models.create("mlp", (1, 8, 8), 10, seed=9, widths=[16])
    torch.save({name: scale * value for name, value in model.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("treat")


@pytest.fixture(scope="module")
def worn(folder: Path) -> pliant.Treatment:
    path = write_checkpoint(folder / "worn.pt", 6.0)
    return pliant.treat(path, **SMALL, old_data="digits", out=folder / "worn", engine=EngineHere(1))


def test_a_network_that_cannot_learn_is_treated(worn: pliant.Treatment) -> None:
    assert worn.action == "apply"
    assert worn.remedy == "shrink_perturb(lam=0.8)"
    assert worn.answer.startswith("Apply shrink_perturb (lam=0.8) tonight: +")
    table = worn.table
    assert sorted(table.index) == ["continue", "shrink_perturb(lam=0.8)", "train from scratch"]
    assert table["time_to_scratch"].loc[["continue", "train from scratch"]].to_list() == [1.0, 1.0]
    assert table.loc[worn.remedy, "new_accuracy"] > table.loc["continue", "new_accuracy"] + 0.1
    assert table["old_accuracy"].notna().all()
    assert set(table["seeds"]) == {3}
    assert worn.answer in " ".join(str(worn).split())
    assert worn.code.strip() in str(worn)
    assert repr(worn).startswith("Treatment(")


def test_seeds_and_data_that_chose_do_not_test(worn: pliant.Treatment) -> None:
    runs = load_runs(worn.folder)
    choosing = [run for run in runs if run.config.purpose == "selection"]
    results = [run for run in runs if run.config.purpose == "result"]
    assert {run.config.seed for run in choosing} == {SELECTION_SEEDS, SELECTION_SEEDS + 1}
    assert {run.config.seed for run in results} == {0, 1, 2}
    assert {run.config.holdout for run in choosing} == {0.2}
    # Round 1 has all three settings, round 2 the better two; continuing and scratch are in both.
    assert sorted(run.config.seed - SELECTION_SEEDS for run in choosing) == [0] * 5 + [1] * 4
    assert sorted({run.config.label for run in results}) == sorted(worn.table.index)
    assert [len(each.scores) for each in worn.tried] == [2, 2, 1]


def test_the_page_shows_answer_code_table_and_everything_tried(worn: pliant.Treatment, tmp_path: Path) -> None:
    (page,) = worn.save(tmp_path / "page.html")
    text = page.read_text().replace("<wbr>", "")
    for expected in (
        "Apply shrink_perturb (lam=0.8) tonight",
        "def prepare(batches):",
        "Everything tried",
        "head_reset",
    ):
        assert expected in text
    assert worn._repr_html_().startswith("<iframe")
    (markdown,) = worn.save(tmp_path / "page.md")
    assert "time vs. scratch" in markdown.read_text()


def test_the_code_does_to_the_checkpoint_what_the_runs_did(worn: pliant.Treatment, folder: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(worn.code, namespace)
    model, optimizer = namespace["prepare"](some_batches())
    fresh = models.create("mlp", (1, 8, 8), 10, widths=[16])
    old = torch.load(folder / "worn.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), torch.lerp(old[name], fresh.get_parameter(name).detach(), 0.8))
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.defaults["lr"] == 3e-3


def some_batches() -> list[tuple[Tensor, Tensor]]:
    train = data.load("digits").train
    return [train.batch(index) for index in torch.split(torch.arange(64), 32)]


@pytest.mark.parametrize(
    ("methods", "fresh"),
    [
        *(((Part(name, REQUIRED.get(name, {})),), False) for name in ALL),
        ((Part("swr", {"lam": 0.01}), Part("l2", {"lam": 1e-3})), False),
        ((Part("redo", {"tau": 0.1, "every": 5}),), False),
        ((), False),
        ((), True),
    ],
    ids=str,
)
def test_code_of_every_remedy_runs_and_trains(
    methods: tuple[Part, ...], fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = models.create("cnn", (1, 8, 8), 10, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nn.functional.cross_entropy(model(some_batches()[0][0]), some_batches()[0][1]).backward()
    optimizer.step()
    torch.save({"net": model.state_dict(), "optimizer": optimizer.state_dict()}, "both.pt")
    settings = Settings(optimizer="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    start = Start("both.pt", "", key="net", optimizer="optimizer")
    config = small(methods=methods, fresh=fresh, model=Part("cnn"), training=settings, start=start)
    code = write_code(config, (1, 8, 8), 10)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    prepared, optimizer = namespace["prepare"](some_batches())
    name = methods[0].name if methods else ""
    renews = bool(name) and pliant.methods.info(name).kind == "reinitializer" and name != "optimizer_reset"
    equal = all(torch.equal(a, b) for a, b in zip(prepared.parameters(), model.parameters(), strict=True))
    assert equal == (not fresh and not renews)
    assert bool(optimizer.state) == (not fresh and name not in ("optimizer_reset", "layerwise"))
    losses = []
    for x, y in some_batches() * 10:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(prepared(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_healthy_network_goes_on(folder: Path) -> None:
    """A network that has learned these digits already is not to be disturbed."""
    model = models.create("mlp", (1, 8, 8), 10, seed=1, widths=[64])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train = data.load("digits").train
    for epoch in range(10):
        for index in torch.split(torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)), 64):
            x, y = train.batch(index)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    torch.save(model.state_dict(), folder / "healthy.pt")
    found = pliant.treat(
        folder / "healthy.pt",
        **SMALL | {"model": {"name": "mlp", "widths": [64]}, "methods": "head_reset,shrink_perturb:lam=0.8"},
        out=folder / "healthy",
        engine=EngineHere(1),
    )
    assert found.action == "continue"
    assert found.answer.startswith("No remedy ")
    assert "go on as you do" in found.answer
    namespace: dict[str, Any] = {}
    exec(found.code, namespace)
    prepared, _ = namespace["prepare"](some_batches())
    assert all(torch.equal(a, b) for a, b in zip(prepared.parameters(), model.parameters(), strict=True))


def contents(folder: Path) -> dict[str, bytes]:
    """What must not depend on interruptions; the estimated time is not part of it."""
    files = [*folder.glob("runs/*/metrics.jsonl"), *folder.glob("runs/*/result.json"), folder / "recipe.json"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def answer_of(printed: str) -> str:
    """The printed answer up to the cost, which is measured."""
    return printed.partition("tonight: ")[2].partition("at ")[0].strip()


def test_all_tries_every_method_that_a_trained_network_can_get(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    def stop(search: Any, *_: Any) -> None:
        planned.append(search)
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Search, "run", stop)
    path = write_checkpoint(folder / "worn.pt", 6.0)
    with pytest.raises(KeyboardInterrupt):
        pliant.treat(path, **SMALL | {"methods": "all", "budget": None}, out=tmp_path, engine=EngineHere(1))
    (search,) = planned
    firsts = list(dict.fromkeys(label.partition("(")[0] for label in search.labels))
    assert set(firsts) == set(ALL) - {"optimizer_reset"}
    assert firsts[: len(module.AUTO)] == list(module.AUTO)
    assert search.left_out == []
    monkeypatch.setattr(timing, "time_run", lambda config, stream: 8.0)
    search._plan([f"setting {i}" for i in range(30)], 300.0, 1)
    assert re.fullmatch(
        r"The budget left no time for (setting \d+, ){7}setting \d+ and \d+ more settings\.", search.left_out[0]
    )


def test_a_killed_command_resumes_with_the_same_answer(folder: Path, tmp_path: Path, worn: pliant.Treatment) -> None:
    arguments = ["treat", str(folder / "worn.pt"), *FLAGS, "--old-data", "digits", "--workers", "1", "--out", "out"]
    starter = [sys.executable, "-c", "from pliant.cli import main; main()", *arguments]
    environment = os.environ | {"COLUMNS": "300"}

    def kill_after(runs: int) -> None:
        process = subprocess.Popen(
            starter, cwd=tmp_path, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
        )
        results = (tmp_path / "out").glob
        wait_until(lambda: len(list(results("runs/*/result.json"))) >= runs or process.poll() is not None)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    kill_after(11)  # while the winner is tested
    done = subprocess.run(starter, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "runs are done already" in done.stdout
    assert contents(tmp_path / "out") == contents(worn.folder)
    assert answer_of(done.stdout) == answer_of(worn.answer)
    assert (tmp_path / "out" / "treatment.html").is_file()


def test_a_short_budget_tries_fewer_settings_and_says_so(
    folder: Path, worn: pliant.Treatment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "time_run", lambda config, stream: 8.0)  # 12 seconds with a method, 10 from scratch
    few = pliant.treat(folder / "worn.pt", **SMALL | {"budget": "2m"}, out=tmp_path / "few", engine=EngineHere(1))
    assert [each.label for each in few.tried] == ["shrink_perturb(lam=0.4)"]
    assert "The budget left no time for head_reset, shrink_perturb(lam=0.8)." in few.answer
    assert "the only setting that was tried" in few.answer
    plan = json.loads((tmp_path / "few" / "treatment.json").read_bytes())
    monkeypatch.setattr(timing, "time_run", lambda config, stream: pytest.fail("the plan is kept"))
    again = pliant.treat(folder / "worn.pt", **SMALL | {"budget": "2m"}, out=tmp_path / "few", engine=EngineHere(1))
    assert again.answer == few.answer
    assert json.loads((tmp_path / "few" / "treatment.json").read_bytes()) == plan


def test_rounds_stop_when_time_runs_short(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(folder / "worn.pt", 6.0)
    slow = 20.0  # Runs turn out slower than planned.
    monkeypatch.setattr(halving, "seconds_of_runs", lambda folder, _: [slow for _ in (folder / "runs").iterdir()])
    short = pliant.treat(folder / "worn.pt", **SMALL | {"budget": "4m"}, out=tmp_path, engine=EngineHere(1))
    assert [len(each.scores) for each in short.tried] == [1, 1, 1]
    assert "Time was short: the choice was made after 1 round." in short.answer
    slow = 0.0
    again = pliant.treat(folder / "worn.pt", **SMALL | {"budget": "4m"}, out=tmp_path, engine=EngineHere(1))
    assert again.answer == short.answer


def test_auto_leaves_out_what_does_not_fit_the_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.randn(64, 10) / 8)\n"
        "    def forward(self, x):\n"
        "        return x.flatten(1) @ self.weight\n"
        "def build():\n"
        "    return Odd()\n"
    )
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.randn(64, 10)}, "odd.pt")
    monkeypatch.setattr(module, "AUTO", ("shrink_perturb", "head_reset"))
    settings = SMALL | {"model": "mine.py:build", "methods": "auto", "epochs": 1, "budget": None}
    found = pliant.treat("odd.pt", **settings, engine=EngineHere(1))
    assert {each.label.partition("(")[0] for each in found.tried} == {"shrink_perturb"}
    assert "head_reset was not tried, because it does not fit this network: " in found.answer
    assert found.folder == Path("runs/treat-odd-digits")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": "soon"}, r"^budget is 'soon'; it must be a positive duration"),
        (
            {"budget": 1},
            r"^budget is 1 s, but a run takes about .* needs .*; give more time, fewer seeds or fewer epochs",
        ),
        ({"seeds": 2}, r"^seeds is 2; it must be 3 or more"),
        ({"epochs": 0}, r"^epochs"),
        ({"methods": "shrinkperturb"}, "there is no method 'shrinkperturb'"),
        ({"methods": "shrink_perturb:lam=3"}, r"^shrink_perturb: lam"),
        ({"methods": "vanilla,fresh"}, r"^methods names no method to try"),
        ({"methods": "crelu"}, "crelu changes the network"),
        ({"model": {"name": "mlp", "widths": [24]}}, "does not fit the model"),
        ({"model": "nowhere"}, "model is 'nowhere'"),
        ({"data": "nowhere/"}, "is neither a data set nor a path"),
        ({"workers": 2}, "an engine is given"),
        ({"device": "cuda:7"}, r"^device is 'cuda:7', which cannot be used on this machine"),
        ({"optimizer_state": "optimizer"}, "holds no optimizer state under 'optimizer'"),
    ],
)
def test_wrong_arguments_are_told_before_any_training(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "worn.pt", 6.0)
    with pytest.raises(ValueError, match=message):
        pliant.treat(path, **SMALL | changes, out=tmp_path / "out", engine=EngineHere(1))
    assert not (tmp_path / "out").exists()


def test_checkpoints_that_are_none_are_told(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("treat", "absent.pt", *FLAGS) == (2, "error: checkpoint: there is no file 'absent.pt'\n")
    Path("text.pt").write_text("weights, please")
    code, printed = command("treat", "text.pt", *FLAGS)
    assert code == 2
    assert printed.splitlines()[-1].startswith("error: 'text.pt' ")
    write_checkpoint(Path("worn.pt"), 6.0)
    code, printed = command("treat", "worn.pt", *FLAGS, "--methods", "fier")
    assert code == 2
    assert printed.splitlines()[-1].startswith("error: methods: there is no method 'fier'")
    assert not Path("runs").exists()


def test_results_inside_the_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "zoo", per_class=10)
    dataset = data.load(str(root), size=8)
    model = models.create("mlp", dataset.shape, len(dataset.classes), widths=[16])
    torch.save(model.state_dict(), tmp_path / "zoo.pt")
    settings = SMALL | {"data": {"name": str(root), "size": 8}}
    with pytest.raises(ValueError, match="is inside the data"):
        pliant.treat(tmp_path / "zoo.pt", **settings, out=root / "out", engine=EngineHere(1))
    assert not (root / "out").exists()
