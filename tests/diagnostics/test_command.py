import os
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from pliant import data, models
from pliant.cli import app
from pliant.diagnostics import diagnose
from pliant.diagnostics.checkpoint import load_into, load_weights
from pliant.diagnostics.page import page
from tests import zoo

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


def test_a_checkpoint_gives_a_table_a_verdict_and_a_page(weights: Path, tmp_path: Path) -> None:
    page_file, table = tmp_path / "page.html", tmp_path / "values.parquet"
    result = run(str(weights), "--model", "mlp", "--data", "digits", "--labels", "random", "--samples", "32",
                 "--measures", FEW, "--html", str(page_file), "--parquet", str(table))  # fmt: skip
    assert "weight_l2" in result.output
    assert "the weights have grown" in result.output
    assert "No single sign" in result.output
    text = page_file.read_text()
    assert "weights.pt: mlp on digits" in text
    rows = pyarrow.parquet.read_table(table).to_pylist()
    (total,) = [row for row in rows if row["measure"] == "weight_l2" and not row["layer"]]
    assert total["value"] > 2 * total["reference"], "the fresh network is the reference"


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


class Evil:
    """Something that runs code when it is unpickled: it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    torch.save({"model": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(
        ValueError, match=r"cannot be read as tensors and plain types.*never opened: save model.state_dict"
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
        {f"module.{k}": v for k, v in state.items()},
        {f"_orig_mod.module.{k}": v for k, v in state.items()},
    ]
    for form in forms:
        torch.save(form, tmp_path / "saved.pt")
        found = load_weights(tmp_path / "saved.pt")
        assert list(found) == list(state)
        assert load_into(nn.Linear(3, 2), tmp_path / "saved.pt").weight.equal(state["weight"])


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_weights(tmp_path / "none.pt")
    torch.save({"a": 1}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_weights(tmp_path / "a.pt")
    torch.save([1, 2], tmp_path / "b.pt")
    with pytest.raises(ValueError, match="must hold a state dict, got list"):
        load_weights(tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="cannot be read"):
        load_weights(tmp_path / "c.pt")
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "d.pt")
    with pytest.raises(ValueError, match=r"does not fit the model: .*\s+size mismatch"):
        load_into(nn.Linear(3, 2), tmp_path / "d.pt")


class Tags(HTMLParser):
    """Checks that every tag is closed where it must be, and collects the cells of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
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
    text = page(found, "a <b> & c")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "http" not in text, "it needs no other file"
    for key, value in found.values.items():
        assert f"{value:.4g}" in tags.cells, key
    assert 'class="sign"' in text
    assert 'class="sign absent"' in text
    bare = page(diagnose(nn.Linear(2, 2)), "weights alone")
    assert "without a reference" in bare
    assert "it needs a batch" in bare
