"""The example method in CONTRIBUTING.md is complete: it runs through the contract like a registered one."""

import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn
from torch.optim import SGD

from pliant.methods import MethodInfo, Tunable, registry
from tests import test_contract as contract
from tests import zoo
from tests.loops import train
from tests.methods.trajectories import STEPS, assert_close, train_with_term

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf8")
FILE, RECORD = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def l1(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    module = ModuleType("pliant.methods.l1")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # pickle looks for the class there
    exec(compile(FILE, "CONTRIBUTING.md", "exec"), vars(module))
    record = eval(RECORD, {"MethodInfo": MethodInfo, "Tunable": Tunable, "L1": module.L1})
    monkeypatch.setitem(registry._BY_NAME, "l1", record)
    return module.L1


def test_example_is_short() -> None:
    assert len(FILE.splitlines()) <= 70


def test_known_answer_of_the_formula(l1: type) -> None:

    module = sys.modules["pliant.methods.l1"]
    examples = doctest.DocTestFinder().find(module.l1_penalty, globs=vars(module))
    assert sum(len(each.examples) for each in examples) == 1
    assert all(doctest.DocTestRunner().run(each).failed == 0 for each in examples)


def test_matches_the_term_in_the_loss(l1: type) -> None:
    def term(model: nn.Module) -> object:
        return 0.01 * sum(p.abs().sum() for p in model.parameters())

    closed, slow = zoo.build("mlp"), zoo.build("mlp")
    optimizer = SGD(closed.parameters(), lr=0.02)
    l1(closed, lam=0.01).attach(optimizer)
    train(closed, optimizer, "mlp", range(STEPS["mlp"]))
    train_with_term(slow, "mlp", SGD(slow.parameters(), lr=0.02), term)
    assert_close(closed, slow)


@pytest.mark.parametrize(
    "check",
    [
        contract.test_changes_training_and_says_so,
        contract.test_resumed_run_is_bit_equal,
        contract.test_strength_zero_is_a_no_op,
    ],
)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn"])
def test_keeps_the_contract_on_models(check, name: str) -> None:
    check("l1", name)


@pytest.mark.parametrize(
    "check",
    [
        contract.test_same_seed_same_run,
        contract.test_detach_leaves_no_hook,
        contract.test_gradient_accumulation,
        contract.test_deepcopy_and_pickle,
        contract.test_a_new_optimizer_for_each_task,
        contract.test_two_optimizers_share_a_method,
        contract.test_loading_into_another_architecture_changes_nothing,
        contract.test_unknown_setting_is_an_error,
    ],
)
def test_keeps_the_contract(check) -> None:
    check("l1")
