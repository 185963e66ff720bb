import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from pliant import data, models
from pliant.cli import app
from pliant.diagnostics.checkpoints import load_into, load_weights
from pliant.training import evaluate

FEW = "weight_l2,dormant_fraction,hessian_rank"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    dataset = data.load("digits")
    model = models.create("mlp", dataset.shape, 10, seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["diagnose", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_data_and_network_take_options_and_layers_hide_no_note(tmp_path: Path) -> None:
    small_network = models.create("mlp", data.load("digits").shape, 10, widths=(7,))
    torch.save(small_network.state_dict(), tmp_path / "small.pt")
    result = run(str(tmp_path / "small.pt"), "--model", "mlp", "--data", "digits", "--measures", "weight_l2,update_l1",
                 "--set", "model.widths=[7]", "--set", "data.first=40", "--table", "--no-trial",
                 "--html", str(tmp_path / "page.html"))  # fmt: skip
    assert "Skipped: update_l1" in result.output
    assert result.output.splitlines()[-1] == "next: the same command without --no-trial gives a verdict"
    for wrong in ("seeds=3", "model=cnn"):
        refused = CliRunner().invoke(app, ["diagnose", "x.pt", "--model", "mlp", "--set", wrong])
        assert isinstance(refused.exception, ValueError)
        assert "must begin with 'data.' or 'model.' or 'training.'" in str(refused.exception)


def test_a_checkpoint_gives_a_verdict_signs_and_a_page(weights: Path, tmp_path: Path) -> None:
    page_file, table = tmp_path / "page.html", tmp_path / "values.parquet"
    result = run(str(weights), "--model", "mlp", "--data", "digits", "--samples", "32", "--measures", FEW,
                 "--html", str(page_file), "--parquet", str(table), "--budget", "500", "--steps", "100")  # fmt: skip
    first = result.stdout.splitlines()[0]
    assert first.startswith(("plastic: ", "lost: ", "undecided: "))
    assert "learn for 100 steps each (--steps)" in result.stderr
    assert "Of 3 signs of lost plasticity" in result.output
    text = page_file.read_text()
    assert "weights.pt: mlp on digits" in text
    assert "<polyline" in text
    rows = pyarrow.parquet.read_table(table).to_pylist()
    (total,) = [row for row in rows if row["measure"] == "weight_l2" and not row["layer"]]
    assert total["value"] > 2 * total["reference"], "the fresh network is the reference"


def test_the_optimizer_of_the_trial_can_be_set(weights: Path, tmp_path: Path) -> None:
    settings = ["--model", "mlp", "--data", "digits", "--measures", "weight_l2", "--html", str(tmp_path / "p.html")]
    found = [
        run(str(weights), *settings, "--set", "data.first=200", "--steps", "20", *more).stdout.partition("cost")[0]
        for more in ([], ["--set", "training.optimizer=sgd", "--set", "training.lr=0.5"])
    ]
    assert found[0] != found[1]
    with pytest.raises(ValueError, match="--set training: there is no 'warmup'"):
        run(str(weights), *settings, "--set", "training.warmup=0.1")


def test_the_last_line_says_which_command_comes_next(tmp_path: Path) -> None:
    dead = models.create("mlp", data.load("digits").shape, 10, widths=(7,))
    with torch.no_grad():
        dead.get_submodule("1").bias.fill_(-1e6)  # the first layer after the flattening
    torch.save({"net": dead.state_dict()}, tmp_path / "dead.pt")
    given = [
        str(tmp_path / "dead.pt"),
        "--model",
        "mlp",
        "--key",
        "net",
        "--set",
        "model.widths=[7]",
        "--data",
        "digits",
    ]
    more = ["--measures", "weight_l2", "--html", str(tmp_path / "p.html")]

    def last(*arguments: str) -> str:
        return str(run(*given, *more, *arguments).stdout.splitlines()[-1])

    assert last("--no-trial") == "next: the same command without --no-trial gives a verdict"
    assert "learn for at most 0.001 seconds (--budget)" in run(*given, *more, "--budget", "0.001").stderr
    assert last("--budget", "0.001") == "next: the same command with --budget 0.004, or with more data, may decide"
    found = last("--budget", "1000", "--steps", "100")
    assert (
        found
        == f"next: pliant treat {given[0]} --model mlp --data digits --key net --set 'model.widths=[7]' finds "
        + ("the best remedy")
    )


def test_a_resume_is_checked(tmp_path: Path) -> None:
    dataset = data.load("digits")
    model = models.create("mlp", dataset.shape, 10, seed=3)
    optimizer = torch.optim.Adam(model.parameters())
    for name, steps in (("before.pt", 5), ("after.pt", 2)):
        if name == "after.pt":
            optimizer = torch.optim.Adam(model.parameters())  # its state is not restored
        for _ in range(steps):
            x, y = dataset.train.batch(torch.arange(32))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
    files = ["--before", str(tmp_path / "before.pt"), "--after", str(tmp_path / "after.pt")]
    result = run(*files, "--model", "mlp", "--data", "digits")
    assert result.stdout.startswith("optimizer state: the optimizer's state was lost")
    assert "the optimizer started over: 5 steps before, 2 after" in result.stdout
    for wrong in ([], files[:2], [str(tmp_path / "before.pt"), *files]):
        with pytest.raises(ValueError, match="give a checkpoint, or two checkpoints around a resume"):
            run(*wrong, "--model", "mlp", "--data", "digits")


def test_a_resume_check_names_the_next_command(tmp_path: Path) -> None:
    dataset = data.load("digits")
    model = models.create("mlp", dataset.shape, 10, seed=3)
    with torch.no_grad():
        next(module for module in model.modules() if isinstance(module, torch.nn.Linear)).bias.fill_(-100)
    state = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 0.1}]}
    torch.save({"net": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
    given = ["--before", str(tmp_path / "a.pt"), "--after", str(tmp_path / "a.pt"), "--model", "mlp", "--key", "net"]

    def last(*arguments: str) -> str:
        return str(run(*given, "--data", "digits", *arguments).stdout.splitlines()[-1])

    assert last("--no-trial") == "next: the same command without --no-trial gives a verdict"
    assert last("--steps", "60") == (
        f"next: pliant treat {tmp_path / 'a.pt'} --model mlp --data digits --key net finds the best remedy"
    )


def test_examples_and_labels_are_those_that_are_asked_for(weights: Path, tmp_path: Path) -> None:
    def loss(*arguments: str) -> float:
        table = tmp_path / "values.parquet"
        run(str(weights), "--model", "mlp", "--data", "digits", "--measures", "loss", "--samples", "2000",
            "--html", str(tmp_path / "page.html"), "--parquet", str(table), "--no-trial", *arguments)  # fmt: skip
        (row,) = pyarrow.parquet.read_table(table).to_pylist()
        return row["value"]

    dataset = data.load("digits")
    model = load_into(models.create("mlp", dataset.shape, 10), weights)
    _, expected = evaluate(model, dataset.train)
    assert loss() == pytest.approx(expected, rel=1e-6)
    first, second = (loss("--labels", "random", "--seed", seed) for seed in ("1", "2"))
    assert abs(first - expected) > 1e-3 < abs(second - first)


@pytest.mark.parametrize("asked", [False, True])
def test_the_table_is_printed_if_it_is_asked_for(weights: Path, tmp_path: Path, asked: bool) -> None:
    result = run(
        str(weights), "--model", "mlp", "--data", "digits", "--measures", "weight_growth", "--no-trial",
        "--html", str(tmp_path / "page.html"), *(["--table"] if asked else []),
    )  # fmt: skip
    assert ("weight_growth" in result.stdout) == asked


def test_references_and_safetensors(weights: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({k: v / 3 for k, v in torch.load(weights, weights_only=True).items()}, other)
    settings = [
        "--model",
        "mlp",
        "--data",
        "digits",
        "--measures",
        "weight_growth",
        "--table",
        "--no-trial",
        "--html",
        str(tmp_path / "p.html"),
    ]
    assert "3" in run(str(weights), *settings, "--reference", str(other)).output.split("weight_growth")[1][:40]


def test_a_model_function_of_the_user_works_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(3, 2)\n")
    torch.save({"model": nn.Linear(3, 2).state_dict(), "step": 5}, tmp_path / "saved.pt")
    monkeypatch.chdir(tmp_path)
    result = run("saved.pt", "--model", "mine.py:build", "--measures", "weight_l2,dead_fraction")
    assert "Skipped: dead_fraction: it needs a batch" in result.output
    assert "give the new data, with labels, to get a verdict" in result.output
    assert result.output.splitlines()[-1].startswith("next: the same command with --data")
    assert Path("diagnosis.html").is_file()
    with pytest.raises(ValueError, match="needs --data"):
        run("saved.pt", "--model", "mlp")


def test_a_budget_that_is_too_small_gets_signs_and_a_larger_budget_to_try(weights: Path, tmp_path: Path) -> None:
    result = run(str(weights), "--model", "mlp", "--data", "digits", "--measures", "weight_l2", "--budget", "0.001",
                 "--html", str(tmp_path / "page.html"))  # fmt: skip
    assert "there was no trial (budget: 0.001 seconds are too few; 3 pairs of 50 steps take about" in result.output
    assert "sign of lost plasticity" in result.output
    assert result.output.splitlines()[-1].startswith("next: the same command with --budget 0.004, or with more data")


def test_lazy_layers_get_their_weights_from_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n"
        "def build(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes), nn.Linear(classes, classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    made = [models.create("mine.py:build", (1, 8, 8), 10, seed=seed) for seed in (0, 0, 1)]
    assert made[0][1].weight.equal(made[1][1].weight)
    assert not made[0][1].weight.equal(made[2][1].weight)
    torch.save(made[0].state_dict(), "saved.pt")
    assert (
        "weight_growth"
        in run("saved.pt", "--model", "mine.py:build", "--data", "digits", "--no-trial", "--table").output
    )


def test_one_of_several_state_dicts_is_taken_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online, target = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.Adam(online.parameters())
    online(torch.ones(1, 3)).sum().backward()
    optimizer.step()  # what it remembers of each parameter are tensors by name too
    agent = {"q": online.state_dict(), "nets": {"target": target.state_dict()}, "steps": 7, "args": {"lr": 0.1}}
    agent["optimizer"] = optimizer.state_dict()
    torch.save(agent, tmp_path / "agent.pt")
    with pytest.raises(ValueError, match=r"holds no state dict at the top .*\(--key\): q, nets.target$"):
        load_weights(tmp_path / "agent.pt")
    with pytest.raises(ValueError, match=r"holds no state dict under 'actor'; choose one .*: q, nets.target$"):
        load_weights(tmp_path / "agent.pt", "actor")
    assert load_weights(tmp_path / "agent.pt", "nets.target")["weight"].equal(target.weight)
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(3, 2)\n")
    monkeypatch.chdir(tmp_path)
    result = run("agent.pt", "--model", "mine.py:build", "--key", "q", "--measures", "weight_l2", "--table")
    assert f"{float(torch.cat([p.flatten() for p in online.parameters()]).norm()):.4g}" in result.output


FACTORIES = """
from torch import nn

def plain():
    return nn.Linear(3, 2)

def wanting(shape, classes):
    return nn.Linear(3, 2)

def raising():
    raise KeyError("boom")

def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "mine.py:plain", "--html", "none/p.html"], "--html is 'none/p.html'; there is no folder 'none'"),
        (["--model", "mine.py:plain", "--html", "."], "--html is '.', which is a folder; it must be a file"),
        (["--model", "mine.py:plain", "--parquet", "none/p"], "--parquet is 'none/p'; there is no folder 'none'"),
        (["--model", "mine.py:plain", "--measures", "weight_l2, nope"], "there is no measure 'nope'"),
        (["--model", "mine.py:wanting"], "model 'mine.py:wanting' takes (shape, classes); it is called with ()"),
        (["--model", "mine.py:raising"], "model 'mine.py:raising' cannot be built without --data: KeyError: 'boom'"),
        (["--model", "mine.py:raising", "--data", "digits"], "model 'mine.py:raising' cannot be built: KeyError"),
        (["--model", "mine.py:plain", "--data", "digits", "--measures", "dead_fraction"],
         "model 'mine.py:plain' does not take data 'digits', inputs of shape (1, 8, 8): RuntimeError: mat1 and mat2"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_anything_is_measured(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(FACTORIES)
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "saved.pt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        run("saved.pt", *arguments)
    assert "\n" not in str(error.value)
    assert not Path("diagnosis.html").exists()


def test_outputs_that_are_too_few_for_the_classes_matter_to_labeled_measures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(FACTORIES)
    torch.save({f"1.{k}": v for k, v in nn.Linear(64, 3).state_dict().items()}, tmp_path / "saved.pt")
    monkeypatch.chdir(tmp_path)
    settings = [
        "saved.pt",
        "--model",
        "mine.py:small",
        "--data",
        "digits",
        "--samples",
        "32",
        "--no-trial",
        "--measures",
    ]
    assert "feature_rank" in run(*settings, "weight_l2, feature_rank", "--table").output
    with pytest.raises(
        ValueError, match=r"the outputs of model 'mine.py:small' do not fit the labels of data 'digits'"
    ):
        run(*settings, "weight_l2,loss")
