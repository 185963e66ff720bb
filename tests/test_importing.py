"""Code of the user's own: the right file, with what lies beside it; what is wrong with it is named."""

import sys
from pathlib import Path

import pytest

from pliant._importing import import_object


def test_a_file_gets_the_modules_beside_it(tmp_path: Path) -> None:
    for version, width in (("v1", 3), ("v2", 7)):
        folder = tmp_path / version
        (folder / "parts").mkdir(parents=True)
        (folder / "layers_.py").write_text(f"WIDTH = {width}\n")
        (folder / "parts" / "__init__.py").write_text("")
        (folder / "parts" / "depth_.py").write_text(f"DEPTH = {10 * width}\n")
        (folder / "net.py").write_text(
            "from layers_ import WIDTH\nfrom parts.depth_ import DEPTH\nSIZE = WIDTH, DEPTH\n"
        )
    for version, size in (("v1", (3, 30)), ("v2", (7, 70)), ("v1", (3, 30))):
        assert import_object(f"{tmp_path / version / 'net.py'}:SIZE") == size


def test_a_file_beside_does_not_replace_what_is_installed(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError\n")
    (tmp_path / "net.py").write_text("import json\nFILE = json.__file__\n")
    assert not import_object(f"{tmp_path / 'net.py'}:FILE").startswith(str(tmp_path))
    assert sys.path[-1] == str(tmp_path)  # of whose json.py a worker knows nothing when it starts


def test_a_missing_dependency_is_not_taken_for_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vision_models_.py").write_text("import vision_\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"'vision_models_:build' cannot be imported: No module named 'vision_'"):
        import_object("vision_models_:build")
    with pytest.raises(ValueError, match=r"there is no module 'visions_.more' in"):
        import_object("visions_.more:build")


def test_what_fails_while_it_is_imported_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("WIDTH = 3\nWIDTH = widht\n")
    with pytest.raises(ValueError, match=r"cannot be imported: NameError: name 'widht' .*\(.*net\.py, line 2\)"):
        import_object(f"{tmp_path / 'net.py'}:WIDTH")


def test_a_name_that_a_file_has_not_is_answered_with_those_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import math\n\ndef build():\n    pass\n\nclass Head:\n    pass\n")
    with pytest.raises(ValueError, match=r"has no 'biuld'; did you mean 'build'\? Allowed: build, Head$"):
        import_object(f"{tmp_path / 'net.py'}:biuld")
