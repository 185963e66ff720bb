"""What all penalties share: strengths, receipts and line searches."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD

from pliant import L2, L2Init, Method, SpectralRegularization, StreamingEWC, WeightClipping, WeightRescaling
from pliant.methods import create
from tests import zoo
from tests.loops import differs, snapshot, train

LAM = 0.05


def l2_term(model: nn.Module, initial: list[Tensor]) -> Tensor:
    return LAM / 2 * sum((p**2).sum() for p in model.parameters())


def l2_init_term(model: nn.Module, initial: list[Tensor]) -> Tensor:
    return LAM / 2 * sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), initial, strict=True))


CASES = [(L2, l2_term), (L2Init, l2_init_term)]


@pytest.mark.parametrize(("cls", "term"), CASES)
def test_line_search_sees_the_penalty(cls, term) -> None:
    """LBFGS compares the values that its closure returns, so they must include the term."""

    def run(closed: bool) -> nn.Module:
        model = zoo.build("mlp")
        initial = [p.detach().clone() for p in model.parameters()]
        optimizer = LBFGS(model.parameters(), lr=1.0, max_iter=5, line_search_fn="strong_wolfe")
        if closed:
            cls(model, lam=LAM).attach(optimizer)
        inputs, labels = zoo.batch("mlp", size=40)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            if not closed:
                loss = loss + term(model, initial)
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return model

    for left, right in zip(run(True).parameters(), run(False).parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)


def test_add_gradient_before_clipping_equals_the_term_in_the_loss() -> None:
    model, slow = zoo.build("mlp"), zoo.build("mlp")
    penalty = L2(model, lam=LAM)
    inputs, labels = zoo.batch("mlp")
    cross_entropy(model(inputs), labels).backward()
    penalty.add_gradient_()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    (cross_entropy(slow(inputs), labels) + l2_term(slow, [])).backward()
    nn.utils.clip_grad_norm_(slow.parameters(), 0.1)
    for left, right in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-12, atol=1e-15)


def test_strengths_by_pattern() -> None:
    model = zoo.build("mlp")
    inputs, labels = zoo.batch("mlp")
    cross_entropy(model(inputs), labels).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    L2(model, lam={"4.*": 0.5, "*.bias": 0.25}).step()
    added = {name: p.grad - plain[name] for name, p in model.named_parameters()}
    torch.testing.assert_close(added["4.weight"], 0.5 * model[4].weight.detach())
    torch.testing.assert_close(added["4.bias"], 0.5 * model[4].bias.detach())
    torch.testing.assert_close(added["0.bias"], 0.25 * model[0].bias.detach())
    assert (added["0.weight"] == 0).all()


def test_where_leaves_other_parameters_alone() -> None:
    model, control = zoo.build("mlp"), zoo.build("mlp")
    penalty = L2Init(model, lam=0.5, where=lambda name, p: name.startswith("4"))
    optimizer = SGD(model.parameters(), lr=0.1)
    penalty.attach(optimizer)
    train(model, optimizer, "mlp", range(1))
    train(control, SGD(control.parameters(), lr=0.1), "mlp", range(1))
    assert not differs(snapshot(model), snapshot(control))  # the penalty is zero at the initial values
    train(model, optimizer, "mlp", range(1, 2))
    train(control, SGD(control.parameters(), lr=0.1), "mlp", range(1, 2))
    assert torch.equal(model[0].weight, control[0].weight)
    assert not torch.equal(model[4].weight, control[4].weight)


def test_two_penalties_add_up() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    L2(model, lam=0.1).attach(optimizer)
    L2(model, lam=0.2).attach(optimizer)
    together = zoo.build("mlp")
    other = SGD(together.parameters(), lr=0.1)
    L2(together, lam=0.3).attach(other)
    train(model, optimizer, "mlp", range(3))
    train(together, other, "mlp", range(3))
    for left, right in zip(model.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-15)


def test_receipt_holds_value_and_gradient_norm() -> None:
    model = zoo.build("mlp")
    penalty = L2(model, lam=0.1)
    assert penalty.receipt is None
    model.zero_grad()
    penalty.step()
    assert penalty.receipt is not None
    squares = sum(float((p.detach() ** 2).sum()) for p in model.parameters())
    assert penalty.receipt.details["value"] == pytest.approx(0.05 * squares)
    assert penalty.receipt.details["gradient_norm"] == pytest.approx(0.1 * squares**0.5, rel=1e-6)


def test_gradient_norm_of_complex_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([3 + 4j, 1j]))

    model = Model()
    penalty = L2(model, lam=1.0).attach(SGD(model.parameters(), lr=0.0))
    model.weight.grad = torch.zeros_like(model.weight)
    penalty.step()
    assert penalty.receipt is not None
    assert penalty.receipt.details["gradient_norm"] == pytest.approx(26**0.5)


def test_sparse_gradient_is_an_error_that_names_the_parameter() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    L2(model).attach(optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"'0\.weight' has a sparse gradient"):
        optimizer.step()


def test_receipt_counts_parameters_with_a_strength() -> None:
    model = zoo.build("mlp")
    method = L2(model, lam={"4.*": 0.1})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    method.step()
    assert method.receipt is not None
    assert (method.receipt.tensors, method.receipt.entries) == (2, 16 * 5 + 5)


def test_empty_strengths_are_an_error() -> None:
    for make in (L2, StreamingEWC):
        with pytest.raises(ValueError, match=r"lam: \{\} is empty"):
            make(zoo.build("mlp"), lam={})


@pytest.mark.parametrize("lam", [np.float32(0.5), np.float64(0.5), np.int64(1), Fraction(1, 2)])
def test_any_real_number_is_a_strength(lam: Any) -> None:
    strengths = L2(zoo.build("mlp"), lam=lam).strengths
    assert strengths == dict.fromkeys(strengths, float(lam))
    assert WeightRescaling(zoo.build("mlp"), every=np.int64(3)).every == 3


@pytest.mark.parametrize("missing", ["steps", "state"])
def test_incomplete_state_is_an_error(missing: str) -> None:
    method = L2Init(zoo.build("mlp"))
    state = {key: value for key, value in method.state_dict().items() if key != missing}
    with pytest.raises(ValueError, match=f"state_dict: '{missing}' is missing"):
        method.load_state_dict(state)


OF_PARAMETERS = ["l2", "l2_init", "spectral", "spectral_norm", "wasserstein", "parseval", "streaming_ewc"]


@pytest.mark.parametrize("name", [name for name in OF_PARAMETERS if name != "streaming_ewc"])
def test_changed_strength_takes_effect_at_once(name: str) -> None:
    model = zoo.build("mlp")
    penalty = create(name, model, example=zoo.batch("mlp")[0], lam=0.5)
    assert set(penalty.strengths.values()) == {0.5}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    before = penalty.value()
    penalty.strengths.update(dict.fromkeys(penalty.strengths, 1.0))
    assert torch.isclose(penalty.value(), 2 * before)


@pytest.mark.parametrize("name", OF_PARAMETERS)
def test_term_without_parameters_is_zero(name: str) -> None:
    model = zoo.build("mlp")
    penalty = create(name, model, example=zoo.batch("mlp")[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert penalty.value([]) == 0
    assert penalty.value() > 0 or name == "streaming_ewc"


@pytest.mark.parametrize("kind", [L2, L2Init, SpectralRegularization, WeightClipping])
def test_receipts_count_parameters_of_the_attached_optimizers(kind: Callable[[nn.Module], Method]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    method = kind(model).attach(optimizer)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert method.receipt is not None
    assert (method.receipt.tensors, method.receipt.entries) == (2, 12)
