import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from pliant import data, models
from pliant.cli import app
from pliant.diagnostics import diagnose
from pliant.diagnostics.checkpoints import load_into, load_weights
from pliant.diagnostics.diagnosis_page import render_diagnosis
from pliant.experiments.run import make_learner, make_stream
from pliant.experiments.store import RunFolder
from pliant.training import evaluate
from tests import zoo
from tests.experiments.helpers import small

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
                 "--set", "model.widths=[7]", "--set", "data.first=40", "--layers",
                 "--html", str(tmp_path / "page.html"))  # fmt: skip
    assert "Skipped: update_l1" in result.output
    for wrong in ("seeds=3", "model=cnn"):
        refused = CliRunner().invoke(app, ["diagnose", "x.pt", "--model", "mlp", "--set", wrong])
        assert isinstance(refused.exception, ValueError)
        assert ": only what begins with 'data.' or 'model.'" in str(refused.exception)


def test_a_checkpoint_gives_a_table_a_verdict_and_a_page(weights: Path, tmp_path: Path) -> None:
    page_file, table = tmp_path / "page.html", tmp_path / "values.parquet"
    result = run(str(weights), "--model", "mlp", "--data", "digits", "--labels", "random", "--samples", "32",
                 "--measures", FEW, "--html", str(page_file), "--parquet", str(table))  # fmt: skip
    assert "weight_l2" in result.output
    assert "the weights have grown" in result.output
    assert "the loss is cross-entropy on random labels" in result.output
    assert "No single sign" in result.output
    text = page_file.read_text()
    assert "weights.pt: mlp on digits" in text
    rows = pyarrow.parquet.read_table(table).to_pylist()
    (total,) = [row for row in rows if row["measure"] == "weight_l2" and not row["layer"]]
    assert total["value"] > 2 * total["reference"], "the fresh network is the reference"


@pytest.mark.parametrize("split", ["train", "test"])
def test_examples_and_labels_are_those_that_are_asked_for(weights: Path, tmp_path: Path, split: str) -> None:
    def loss(*arguments: str) -> float:
        table = tmp_path / "values.parquet"
        run(str(weights), "--model", "mlp", "--data", "digits", "--measures", "loss", "--samples", "2000",
            "--html", str(tmp_path / "page.html"), "--parquet", str(table), "--split", split, *arguments)  # fmt: skip
        (row,) = pyarrow.parquet.read_table(table).to_pylist()
        return row["value"]

    dataset = data.load("digits")
    model = load_into(models.create("mlp", dataset.shape, 10), weights)
    _, expected = evaluate(model, dataset.train if split == "train" else dataset.test)
    assert loss() == pytest.approx(expected, rel=1e-6)
    first, second = (loss("--labels", "random", "--seed", seed) for seed in ("1", "2"))
    assert abs(first - expected) > 1e-3 < abs(second - first)


@pytest.mark.parametrize(("flags", "shown"), [((), True), (("--layers",), True), (("--no-layers",), False)])
def test_layers_are_shown_as_asked_for(weights: Path, tmp_path: Path, flags: tuple[str, ...], shown: bool) -> None:
    page_file = str(tmp_path / "page.html")
    result = run(
        str(weights), "--model", "mlp", "--data", "digits", "--measures", "weight_growth", *flags, "--html", page_file
    )
    assert ("\n3 " in result.output) is shown


def test_references_and_safetensors(weights: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    save_file({k: v / 3 for k, v in torch.load(weights, weights_only=True).items()}, other)
    settings = ["--model", "mlp", "--data", "digits", "--measures", "weight_growth", "--html", str(tmp_path / "p.html")]
    assert "3" in run(str(weights), *settings, "--reference", str(other)).output.split("weight_growth")[1][:40]
    assert "it needs a reference" in run(str(other), *settings, "--reference", "none").output


def test_a_factory_of_ones_own_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(3, 2)\n")
    torch.save({"model": nn.Linear(3, 2).state_dict(), "step": 5}, tmp_path / "saved.pt")
    monkeypatch.chdir(tmp_path)
    result = run("saved.pt", "--model", "mine.py:build", "--measures", "weight_l2,dead_fraction")
    assert "Skipped: dead_fraction: it needs a batch" in result.output
    assert Path("diagnosis.html").is_file()
    with pytest.raises(ValueError, match="needs --data"):
        run("saved.pt", "--model", "mlp")


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
    assert "weight_growth" in run("saved.pt", "--model", "mine.py:build", "--data", "digits").output


class Evil:
    """Something that runs code when it is unpickled: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(
        ValueError, match=r"cannot be read as tensors and plain types.*never opened; save model.state_dict"
    ):
        load_weights(tmp_path / "evil.pt")
    assert not (tmp_path / "made").exists()


def test_state_dicts_are_found_where_loops_and_wrappers_put_them(tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    forms: list[Any] = [
        state,
        {"model": state, "epoch": 1},
        {"state_dict": state, "hyper": {"lr": 0.1}},
        {"model": {"module": state}},
        {"model": {"arch": "small"}, "state_dict": state},
        {f"module.{k}": v for k, v in state.items()},
        {f"module.module.{k}": v for k, v in state.items()},
        {f"_orig_mod.module.{k}": v for k, v in state.items()},
        {f"module._orig_mod.{k}": v for k, v in state.items()},
    ]
    for form in forms:
        torch.save(form, tmp_path / "saved.pt")
        assert load_into(nn.Linear(3, 2), tmp_path / "saved.pt").weight.equal(state["weight"])


def test_names_of_the_models_own_are_kept_and_wrappers_on_either_side_do_not_matter(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 2)

    net, path = Net(), tmp_path / "saved.pt"
    for wrapped in (net, torch.compile(net), nn.DataParallel(net)):
        torch.save(wrapped.state_dict(), path)
        assert list(load_weights(path)) == list(wrapped.state_dict())
        assert load_into(Net(), path).module.weight.equal(net.module.weight)
    torch.save(net.state_dict(), path)
    inner = Net()
    load_into(torch.compile(inner), path)
    assert inner.module.weight.equal(net.module.weight)
    inside = nn.Sequential(torch.compile(nn.Linear(3, 2)), nn.ReLU())
    torch.save(inside.state_dict(), path)
    assert load_into(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), path)[0].weight.equal(inside[0].weight)
    with pytest.raises(ValueError, match=r"Missing key.*\"module.weight\".*Unexpected key.*\"0._orig_mod.weight\""):
        load_into(Net(), path)


def test_wrappers_anywhere_in_the_model_do_not_matter(tmp_path: Path) -> None:
    path, plain = tmp_path / "saved.pt", nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    torch.save(plain.state_dict(), path)
    assert (
        load_into(nn.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.ReLU())), path)
        .module[0]
        .weight.equal(plain[0].weight)
    )
    inside = nn.Sequential(nn.DataParallel(nn.Linear(3, 2)), nn.ReLU())
    assert load_into(inside, path)[0].module.weight.equal(plain[0].weight)
    nn.init.zeros_(inside[0].module.weight)
    torch.save(inside.state_dict(), path)
    assert not load_into(plain, path)[0].weight.any()


def test_names_that_only_wrappers_would_tell_apart_are_kept(tmp_path: Path) -> None:
    class Both(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.module = nn.Linear(3, 2)

    saved = Both()
    for wrapped in (saved, nn.DataParallel(saved), torch.compile(saved), nn.DataParallel(torch.compile(saved))):
        torch.save(wrapped.state_dict(), tmp_path / "saved.pt")
        loaded = load_into(Both(), tmp_path / "saved.pt")
        assert loaded.weight.equal(saved.weight)
        assert loaded.module.weight.equal(saved.module.weight)


def test_a_shared_tensor_that_is_stored_once_is_loaded(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.embed.weight

    saved, path = Tied(), tmp_path / "saved.safetensors"
    save_model(saved, str(path))
    assert len(load_weights(path)) == len(saved.state_dict()) - 1
    assert load_into(Tied(), path).head.weight.equal(saved.head.weight)


def test_what_modules_save_beside_tensors_is_loaded(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        steps = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"steps": self.steps}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    saved = Counting(3, 2)
    saved.steps = 7
    torch.save({"model": nn.Sequential(saved).state_dict()}, tmp_path / "saved.pt")
    (loaded,) = load_into(nn.Sequential(Counting(3, 2)), tmp_path / "saved.pt")
    assert loaded.steps == 7
    assert loaded.weight.equal(saved.weight)


def test_a_checkpoint_of_a_run_is_read(tmp_path: Path) -> None:
    config = small()
    learner = make_learner(config, make_stream(config))
    folder = RunFolder(tmp_path, config)
    with folder.open():
        folder.append({"epoch": 0})
        folder.save_checkpoint(learner.state_dict(), 1, {})
    (path,) = folder.path.glob("checkpoint-*.pt")
    found = load_weights(path)
    assert all(tensor.equal(found[name]) for name, tensor in learner.model.state_dict().items())


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
    result = run("agent.pt", "--model", "mine.py:build", "--key", "q", "--measures", "weight_l2", "--reference", "none")
    assert f"{float(torch.cat([p.flatten() for p in online.parameters()]).norm()):.4g}" in result.output


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_weights(tmp_path / "none.pt")
    torch.save({"a": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_weights(tmp_path / "a.pt")
    torch.save([1, 2], tmp_path / "b.pt")
    with pytest.raises(ValueError, match="must hold a state dict, got list"):
        load_weights(tmp_path / "b.pt")
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "d.pt")
    with pytest.raises(ValueError, match=r"does not fit the model: .*\s+size mismatch") as error:
        load_into(nn.Linear(3, 2), tmp_path / "d.pt")
    assert "\n" not in str(error.value)


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(nn.Linear(3, 2).state_dict(), whole)
    content = whole.read_bytes()
    renamed = content.replace(b"_rebuild_tensor_v2", b"\xff" * 18)
    for damaged in (b"not a checkpoint", content[: len(content) // 2], renamed):
        (tmp_path / "c.pt").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"c\.pt' cannot be read as tensors and plain types"):
            load_weights(tmp_path / "c.pt")
    (tmp_path / "c.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"plain types \(it is empty or cut off\)"):
        load_weights(tmp_path / "c.pt")
    (tmp_path / "c.safetensors").write_bytes(b"hello world, not safetensors")
    with pytest.raises(ValueError, match=r"c\.safetensors' cannot be read as a safetensors file .*header"):
        load_weights(tmp_path / "c.safetensors")


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
    settings = ["saved.pt", "--model", "mine.py:small", "--data", "digits", "--samples", "32", "--measures"]
    assert "feature_rank" in run(*settings, "weight_l2, feature_rank").output
    with pytest.raises(
        ValueError, match=r"the outputs of model 'mine.py:small' do not fit the labels of data 'digits'"
    ):
        run(*settings, "weight_l2,loss")


class Tags(HTMLParser):
    """Checks that every tag is closed where it must be, and collects the cells of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "span"):
            self.cells.append(data)


def test_page_is_well_formed_complete_and_escaped() -> None:
    model, initial = zoo.build("mlp"), zoo.build("mlp")
    with torch.no_grad():
        model[0].weight *= 5
    found = diagnose(model, zoo.batch("mlp"), cross_entropy, initial)
    text = render_diagnosis(found, "a <b> & c")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "http" not in text, "it needs no other file"
    for key, value in found.values.items():
        assert f"{value:.4g}" in tags.cells, key
    assert 'class="sign"' in text
    assert 'class="sign absent"' in text
    bare = render_diagnosis(diagnose(nn.Linear(2, 2)), "weights alone")
    assert "without a reference" in bare
    assert "it needs a batch" in bare
