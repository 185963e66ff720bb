"""The examples of docstrings give what they say."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import benchmarks
import pytest

import pliant
from tests.conftest import can_import


def modules(package: ModuleType) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [package.__name__, *(module.name for module in found if not module.name.endswith("__main__"))]


@pytest.mark.parametrize("name", filter(can_import, [*modules(pliant), *modules(benchmarks)]))
def test_examples_give_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert not result.failed
