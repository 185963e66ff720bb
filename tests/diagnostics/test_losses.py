"""Losses whose value of a batch is not the mean of its samples': class weights, ignored targets, contrasts."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pliant.diagnostics import curvature, diagnose
from pliant.diagnostics.batches import Batch, LossFn, mean_loss, sample_losses, summed_loss
from tests import zoo

X, Y = zoo.batch("mlp")
WEIGHTS = torch.tensor([1.0, 50.0, 1.0, 0.2, 3.0], dtype=torch.float64)
OF_THE_BATCH = ["loss", "gradient_l2", "sharpness", "hessian_exact_rank"]


def ignoring(target: Tensor, *samples: int) -> Tensor:
    return target.index_fill(0, torch.tensor(samples), -100)


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """InfoNCE: a sample alone has nothing to be told from, and no loss."""
    pairs = torch.randn(len(output), output.shape[1], dtype=output.dtype, generator=torch.Generator().manual_seed(0))
    return cross_entropy(output @ pairs.T, torch.arange(len(output)))


@pytest.mark.parametrize("first", ["loss", "hessian_rank"])
@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [(nn.CrossEntropyLoss(WEIGHTS), Y), (nn.CrossEntropyLoss(WEIGHTS), ignoring(Y, 2)),
     (cross_entropy, ignoring(Y, 0, 3)), (cross_entropy, Y), (contrast, Y)],
)  # fmt: skip
def test_measures_of_the_batch_are_those_of_the_loss_that_training_sees(
    loss_fn: LossFn, target: Tensor, first: str
) -> None:
    model = zoo.build("mlp")
    found = diagnose(model, (X, target), loss_fn, measures=[first, *OF_THE_BATCH]).values
    loss = loss_fn(model(X), target)
    gradient = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    hessian = [torch.autograd.grad(g, list(model.parameters()), retain_graph=True) for g in flat]
    matrix = torch.stack([torch.cat([h.flatten() for h in row]) for row in hessian])
    assert found["loss"] == pytest.approx(float(loss.detach()))
    assert found["gradient_l2"] == pytest.approx(float(flat.detach().norm()))
    assert found["sharpness"] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-3)
    assert found["hessian_exact_rank"] == curvature.relative_rank(matrix, len(matrix))


def test_a_mean_with_class_weights_is_noted_where_samples_are_taken_alone() -> None:
    model = zoo.build("mlp")

    def ranks(loss_fn: LossFn) -> tuple[float, tuple[str, ...]]:
        found = diagnose(model, (X, Y), loss_fn, measures=["hessian_rank", "gradient_effective_rank"])
        return found.values["gradient_effective_rank"], found.notes

    plain, none = ranks(cross_entropy)
    mean, noted = ranks(nn.CrossEntropyLoss(WEIGHTS))
    total, kept = ranks(nn.CrossEntropyLoss(WEIGHTS, reduction="sum"))
    assert none == kept == ()
    assert "neither the mean nor the sum" in noted[0]
    assert "reduction='sum'" in noted[0]
    assert mean == plain
    assert total != pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("samples", [(0,), (3,), (0, len(Y) - 1)])
def test_samples_without_a_loss_of_their_own_are_named(samples: tuple[int, ...]) -> None:
    target = ignoring(Y, *samples)
    found = diagnose(zoo.build("mlp"), (X, target), cross_entropy, measures=["hessian_rank", "error", "loss"])
    assert "the loss of a sample is NaN when it is taken alone" in found.skipped["hessian_rank"]
    assert {"error", "loss"} <= found.values.keys()
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert diagnose(zoo.build("mlp"), (X, target), summed, measures=["hessian_rank"]).values["hessian_rank"] > 0


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, lambda losses: losses])
def test_losses_that_cancel_are_still_told_from_each_other(reduce: Callable[[Tensor], Tensor]) -> None:
    """A policy's losses have both signs, and their sum may be small as rounding is."""
    advantage = torch.cat([torch.linspace(1, 2, 50), -torch.linspace(1, 2, 50)])
    output, batch = torch.ones(100, 1) * (1 + 1e-7), Batch.of((torch.ones(100, 1), advantage))

    def loss_fn(out: Tensor, weight: Tensor) -> Tensor:
        return reduce(out[:, 0] * weight)

    exact = float(sample_losses(loss_fn, output, batch).double().mean())
    assert mean_loss(loss_fn, output, batch) == exact
    output.requires_grad_()
    (slope,) = torch.autograd.grad(summed_loss(loss_fn, output, batch).total, output)
    torch.testing.assert_close(slope[:, 0], advantage)


def test_the_error_is_that_of_classes_wherever_they_are() -> None:
    logits, target = torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    wrong = float((logits.argmax(1) != target).double().mean())
    for output in (logits, logits.movedim(1, -1)):
        assert diagnose(nn.Identity(), (output, target), measures=["error"]).values["error"] == wrong


@pytest.mark.parametrize(
    ("output", "target", "reason"),
    [
        (torch.randn(6, 1), torch.tensor([0, 1, 0, 1, 1, 1]), "logits of at least two classes"),
        (torch.randn(6), torch.tensor([0, 1, 0, 1, 1, 1]), r"got shapes \(6,\) and \(6,\)"),
        (torch.randn(6, 3, 3), torch.zeros(6, 3, dtype=torch.long), r"of shape \(6, 3, 3\) do not show"),
        (torch.randn(6, 3), torch.zeros(6, 3, dtype=torch.long), r"got shapes \(6, 3\) and \(6, 3\)"),
    ],
)
def test_an_error_that_has_no_classes_is_not_taken(output: Tensor, target: Tensor, reason: str) -> None:
    assert re.search(reason, diagnose(nn.Identity(), (output, target), measures=["error"]).skipped["error"])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_taken_for_a_weight(bad: float) -> None:
    model = zoo.build("mlp")
    with torch.no_grad():
        model[4].bias[0] = bad
    notes = diagnose(model, (X, Y), cross_entropy, measures=["gradient_condition_number", "loss"]).notes
    assert notes
    assert not any("neither the mean nor the sum" in note for note in notes)
