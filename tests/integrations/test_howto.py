"""The code of the pages about frameworks and language models runs as it stands there."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto-frameworks.md"
BLOCKS = dict(re.findall(r"^```python needs=(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


LANGUAGE = PAGE.with_name("howto-language.md")
(TRAINER,) = re.findall(r"^```python needs=accelerate\n(.*?)^```", LANGUAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_each_framework_has_its_block() -> None:
    assert list(BLOCKS) == ["accelerate", "lightning", "stable_baselines3", "torchrl"]


@pytest.mark.parametrize("package", BLOCKS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice on workers
def test_code_runs(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    exec(compile(BLOCKS[package], str(PAGE), "exec"), namespace)
    assert namespace["receipt"].entries if package == "torchrl" else namespace["callback"].receipts


def test_code_for_language_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    exec(compile(TRAINER, str(LANGUAGE), "exec"), namespace)
    ((step, receipt),) = namespace["callback"].receipts
    assert step == 1
    assert receipt.details["optimizer_tensors_reset"] > 0
