"""Imports inside the package point one way, and every module has one name."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import pliant
from tests.conftest import can_import

ROOT = Path(pliant.__file__).parent

_PLAIN = {"running", "distributed", "anatomy", "diagnostics", "data", "streams", "models"}
_ATTACHED = {*_PLAIN, "methods", "training", "trial", "trial_result"}
ALLOWED: dict[str, set[str]] = {
    "running": set(),
    "distributed": set(),
    "anatomy": {"running", "distributed"},
    "diagnostics": {"running", "distributed", "anatomy"},
    "data": {"running", "distributed"},
    "streams": {"running", "distributed", "data"},
    "models": {"running", "distributed"},
    "methods": {"running", "distributed", "anatomy"},
    "training": {*_PLAIN, "methods"},
    "trial_result": set(),
    "trial": {*_PLAIN, "methods", "trial_result"},
    "language": _ATTACHED,
    "rl": {*_ATTACHED, "integrations"},
    "experiments": {*_ATTACHED, "language", "rl"},
    "compare": {*_ATTACHED, "language", "rl", "experiments"},
    "integrations": {*_ATTACHED, "language", "diagnosis"},
    "treat": {*_ATTACHED, "language", "rl", "experiments", "compare"},
    "diagnosis": _ATTACHED,
    "__init__": {*_ATTACHED, "diagnosis", "experiments", "compare", "treat"},
    "_diagnose_command": {*_ATTACHED, "diagnosis"},
    "_treat_command": {"treat"},
    "_listings": {*_ATTACHED, "experiments"},
    "cli": {*_ATTACHED, "language", "rl", "experiments", "compare", "_listings"},
    "__main__": {"cli"},
}
"""The files and folders of the package, and the others that each may import.

All of them may import the private helpers, the `_*.py` files that are not listed. Those import each other only.
"""

FILES = sorted(ROOT.rglob("*.py"))


def part_of(file: Path) -> str:
    """Return the file or folder of the package that a file belongs to."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules of the package that a file imports, each with the name taken from it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            for alias in node.names:
                is_part = node.module == "pliant" and alias.name in PARTS
                yield (f"pliant.{alias.name}", "") if is_part else (node.module or "", alias.name)


PARTS = {part_of(file) for file in FILES}


@pytest.mark.parametrize("part", sorted(PARTS))
def test_imports_point_one_way(part: str) -> None:
    helpers = {each for each in PARTS - ALLOWED.keys() if each.startswith("_")}
    assert part in helpers | ALLOWED.keys(), f"{part}: new here; say in ALLOWED what it may import"
    allowed = {part, *helpers, *ALLOWED.get(part, ())}
    for file in (each for each in FILES if part_of(each) == part):
        for module, _ in imported(file):
            if module.split(".")[0] == "pliant":
                target = module.split(".")[1] if "." in module else "__init__"
                assert target in allowed, f"{file.relative_to(ROOT)} imports {module}"


def test_the_training_loop_sees_only_the_interface_of_methods() -> None:
    names = {name for module, name in imported(ROOT / "training.py") if module.startswith("pliant.methods")}
    assert names == {"Method"}


_NAMES = """
import sys
import pliant
assert "torch" not in sys.modules
import pliant.trial, pliant.compare
assert {name for name in pliant.__all__ if not hasattr(pliant, name)} == set()
assert set(pliant.__all__) <= set(dir(pliant))
assert pliant.trial.__name__ == "trial" and pliant.compare.__name__ == "compare"
assert pliant.streams.names()
try:
    pliant.nothing
except AttributeError as error:
    print(error)
"""


def test_names_are_imported_when_they_are_used() -> None:
    done = subprocess.run([sys.executable, "-c", _NAMES], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "module 'pliant' has no attribute 'nothing'\n"), done.stderr


def test_no_two_files_share_a_name() -> None:
    names = Counter(file.stem for file in FILES if file.stem != "__init__")
    names += Counter(file.parent.name for file in FILES if file.stem == "__init__")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_is_importable_by_two_names() -> None:
    for module in pkgutil.walk_packages(pliant.__path__, "pliant."):
        if can_import(module.name):
            importlib.import_module(module.name)
    found = {name: module for name, module in sys.modules.items() if name == "pliant" or name.startswith("pliant.")}
    assert {name: module.__name__ for name, module in found.items()} == {name: name for name in found}
    files = Counter(module.__file__ for module in found.values())
    assert [file for file, count in files.items() if count > 1] == []
