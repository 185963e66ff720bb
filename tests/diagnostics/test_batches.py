import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from pliant.diagnostics import curvature, measure
from pliant.diagnostics.batches import Batch, LossFn, error_rate, gather, mean_loss, sample_losses, summed_loss
from tests import zoo

X, Y = torch.randn(5, 3), torch.arange(5)


def test_all_forms_of_a_batch() -> None:
    assert Batch.of(X).target is None
    for form in ((X, Y), [X, Y]):
        batch = Batch.of(form)
        assert batch.args[0] is X
        assert batch.target is Y
        assert batch.size == 5
    assert Batch.of((X, None)).target is None
    assert len(Batch.of((X, X, Y)).args) == 2
    assert Batch.of(((X, X), Y)).args == (X, X)
    nested = Batch.of(({"a": X, "b": X}, Y))
    assert set(nested.kwargs) == {"a", "b"}
    for key in ("labels", "label", "targets", "target"):
        mapped = Batch.of({"a": X, key: Y})
        assert set(mapped.kwargs) == {"a"}
        assert mapped.target is Y
    assert Batch.of({"a": X}).target is None


def test_selecting_samples_leaves_what_is_shared_alone() -> None:
    shared = torch.ones(3, 3)
    batch = Batch.of(({"a": X, "mask": shared, "flag": True}, {"y": Y, "scale": 2}))
    part = batch.select(torch.tensor([4, 0]))
    assert part.size == 2
    assert part.kwargs["a"].equal(X[[4, 0]])
    assert part.kwargs["mask"] is shared
    assert part.target["y"].tolist() == [4, 0]
    assert part.target["scale"] == 2


def test_a_loader_gives_its_first_samples() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2)
    batch = gather(loader, 3)
    assert batch.size == 3
    assert batch.args[0].equal(X[:3])
    assert batch.target.tolist() == [0, 1, 2]
    assert gather(loader, 100).size == 5
    assert gather((X, Y), 2).size == 5, "a batch is taken as it is"
    assert gather([(X, Y), (X, Y)], 100).size == 10, "a list of tuples is a loader"
    with pytest.raises(ValueError, match="at least one batch"):
        gather(iter([]), 3)
    with pytest.raises(ValueError, match="the same structure"):
        gather(iter([(X, Y), X]), 10)
    with pytest.raises(ValueError, match=r"one shape to make a batch, got \(3,\) and \(2,\)"):
        gather(iter([(X, Y), (X[:, :2], Y)]), 10)
    with pytest.raises(ValueError, match=r"target must be made of tensors .* got a list"):
        gather(iter([(X, Y.tolist()), (X, Y.tolist())]), 10)
    with pytest.raises(ValueError, match="samples: 0 is not allowed; it must be an integer ≥ 1"):
        gather(loader, 0)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_loader_draws_no_random_number_of_the_training(shuffle: bool, own: bool) -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return super().__getitem__(index)[0] * (random.random() + numpy.random.rand()), Y[index]

    generator = torch.Generator().manual_seed(3) if own else None
    loader = DataLoader(Noisy(X, Y), batch_size=2, shuffle=shuffle, generator=generator)

    def states() -> list[object]:
        drawn = generator.get_state().tolist() if generator is not None else None
        return [torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist(), drawn]

    before = states()
    gather(loader, 3)
    assert states() == before


@pytest.mark.parametrize("nothing", [None, (), {}, (None, None), torch.ones(0, 3), "text"])
def test_data_without_samples_is_refused(nothing: object) -> None:
    with pytest.raises(ValueError, match="batch must be"):
        Batch.of(nothing)


def test_inputs_take_the_models_precision() -> None:
    batch = Batch.of((X, Y)).on(nn.Linear(3, 2).double())
    assert batch.args[0].dtype == torch.float64
    assert batch.target.dtype == torch.int64
    assert Batch.of(X).on(nn.ReLU()).args[0] is X


def test_inputs_stay_in_a_precision_that_the_model_has() -> None:
    model = nn.Sequential(nn.Linear(3, 2).bfloat16(), nn.Linear(2, 2))
    for dtype, becomes in ((torch.float32, torch.float32), (torch.float64, torch.bfloat16)):
        assert Batch.of(X.to(dtype)).on(model).args[0].dtype == becomes


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_samples_loss_is_that_of_the_sample_alone(reduction: str) -> None:
    output, batch = torch.randn(5, 7), Batch.of((X, Y))
    losses = sample_losses(nn.CrossEntropyLoss(reduction=reduction), output, batch)
    torch.testing.assert_close(losses, cross_entropy(output, Y, reduction="none"))


def test_tokens_are_averaged_within_their_sample() -> None:
    """With tokens to ignore, the mean over all tokens is not the mean of the samples' means."""
    output, target = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, -100, -100]])

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out.flatten(0, 1), y.flatten())

    losses = sample_losses(loss_fn, output, Batch.of((X[:2], target)))
    torch.testing.assert_close(losses[0], cross_entropy(output[0], target[0]))
    torch.testing.assert_close(losses[1], cross_entropy(output[1, :1], target[1, :1]))


def test_a_loss_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"a scalar or 5 numbers, got shape \(5, 7\)"):
        sample_losses(lambda out, y: out, torch.randn(5, 7), Batch.of((X, Y)))


@dataclass
class Unregistered:
    logits: Tensor


@pytest.mark.parametrize(
    ("output", "target", "named"),
    [
        (Unregistered(torch.randn(5, 7)), Y, "output must have a row .* got a Unregistered"),
        ((torch.randn(5, 7), Unregistered(X)), Y, "output must have a row .* got a Unregistered"),
        (torch.randn(7, 5), Y, r"row for each of the 5 samples .* got a tensor of shape \(7, 5\)"),
        (torch.randn(5, 7), Y.tolist(), "target must be made of tensors .* got a list"),
        (torch.randn(5, 7), {"a": Y, "b": Y.numpy()}, "target must be made of tensors .* got a ndarray"),
        (torch.randn(5, 7), Unregistered(X), "target must be made of tensors .* got a Unregistered"),
    ],
)
def test_outputs_and_targets_without_samples_are_refused(output: object, target: object, named: str) -> None:
    batch = Batch.of((X, target))
    if target is not Y:
        with pytest.raises(ValueError, match=named):
            batch.select(slice(0, 2))
    with pytest.raises(ValueError, match=named):
        sample_losses(lambda out, y: torch.ones(()), output, batch)


def test_a_loss_may_write_into_what_it_gets() -> None:
    def masking(out: Tensor, y: Tensor) -> Tensor:
        out[:, 5:] = -torch.inf
        return cross_entropy(out, y)

    leaf = torch.randn(5, 7, requires_grad=True)
    total, losses, _ = summed_loss(masking, leaf * 1, Batch.of((X, Y)))
    expected = cross_entropy(leaf[:, :5], Y, reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    (ours,), (theirs,) = torch.autograd.grad(total, leaf), torch.autograd.grad(expected.sum(), leaf)
    torch.testing.assert_close(ours, theirs)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """A mean whose weights depend on the labels: of one sample alone, they cancel."""
    return cross_entropy(output, target, torch.arange(1.0, 8.0))


@pytest.mark.parametrize("output", [torch.randn(5, 7), torch.zeros(5, 7)], ids=["any", "equal losses"])
@pytest.mark.parametrize("loss_fn", [cross_entropy, nn.CrossEntropyLoss(reduction="sum"),
                                     nn.CrossEntropyLoss(reduction="none"), weighted])  # fmt: skip
def test_the_sum_of_the_samples_losses_has_their_gradient(
    loss_fn: Callable[[Tensor, Tensor], Tensor], output: Tensor
) -> None:
    output, batch = output.requires_grad_(), Batch.of((X, Y))
    total, losses, reduced = summed_loss(loss_fn, output, batch, apart=True)
    assert reduced == (loss_fn is not weighted)
    expected = cross_entropy(output, Y, reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    (ours,), (theirs,) = torch.autograd.grad(total, output), torch.autograd.grad(expected.sum(), output)
    torch.testing.assert_close(ours, theirs)
    assert not losses.requires_grad


def test_where_the_slope_is_zero_the_second_derivatives_are_still_those_of_the_samples() -> None:
    """At a perfect fit a weighted mean has the value and the slope of the plain one, zero, but not its curvature."""
    weight = torch.tensor([[1.0], [1], [1], [1], [50]])

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return (weight[y.flatten()] * out.square()).sum() / weight[y.flatten()].sum()

    output = torch.zeros(5, 1, requires_grad=True)
    total = summed_loss(loss_fn, output, Batch.of((X, Y))).total
    (slope,) = torch.autograd.grad(total, output, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), output)
    assert curvature.tolist() == [[2.0]] * 5


def test_tensors_of_inference_mode_become_ordinary_ones() -> None:
    with torch.inference_mode():
        batch = Batch.of((torch.ones(2, 3), torch.zeros(2)))
    moved = batch.on(nn.Linear(3, 2))
    assert not moved.args[0].is_inference()
    assert not moved.target.is_inference()


INPUTS, LABELS = zoo.batch("mlp")


WEIGHTS = torch.tensor([1.0, 50.0, 1.0, 0.2, 3.0], dtype=torch.float64)


OF_THE_BATCH = ["loss", "gradient_l2", "sharpness", "hessian_exact_rank"]


def ignoring(target: Tensor, *samples: int) -> Tensor:
    return target.index_fill(0, torch.tensor(samples), -100)


def contrast(output: Tensor, target: Tensor) -> Tensor:
    """InfoNCE: a sample alone has nothing to compare with, and no loss."""
    pairs = torch.randn(len(output), output.shape[1], dtype=output.dtype, generator=torch.Generator().manual_seed(0))
    return cross_entropy(output @ pairs.T, torch.arange(len(output)))


@pytest.mark.parametrize("first", ["loss", "hessian_rank"])
@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [(nn.CrossEntropyLoss(WEIGHTS), LABELS), (nn.CrossEntropyLoss(WEIGHTS), ignoring(LABELS, 2)),
     (cross_entropy, ignoring(LABELS, 0, 3)), (cross_entropy, LABELS), (contrast, LABELS)],
)  # fmt: skip
def test_measures_of_the_batch_are_those_of_the_loss_that_training_sees(
    loss_fn: LossFn, target: Tensor, first: str
) -> None:
    model = zoo.build("mlp")
    found = measure(model, (INPUTS, target), loss_fn, measures=[first, *OF_THE_BATCH]).values
    loss = loss_fn(model(INPUTS), target)
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
        found = measure(model, (INPUTS, LABELS), loss_fn, measures=["hessian_rank", "gradient_effective_rank"])
        return found.values["gradient_effective_rank"], found.notes

    plain, none = ranks(cross_entropy)
    mean, noted = ranks(nn.CrossEntropyLoss(WEIGHTS))
    total, kept = ranks(nn.CrossEntropyLoss(WEIGHTS, reduction="sum"))
    assert none == kept == ()
    assert "neither the mean nor the sum" in noted[0]
    assert "reduction='sum'" in noted[0]
    assert mean == plain
    assert total != pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("samples", [(0,), (3,), (0, len(LABELS) - 1)])
def test_samples_without_a_loss_of_their_own_are_named(samples: tuple[int, ...]) -> None:
    target = ignoring(LABELS, *samples)
    found = measure(zoo.build("mlp"), (INPUTS, target), cross_entropy, measures=["hessian_rank", "error", "loss"])
    assert "the loss of a sample is NaN when it is taken alone" in found.skipped["hessian_rank"]
    assert {"error", "loss"} <= found.values.keys()
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert measure(zoo.build("mlp"), (INPUTS, target), summed, measures=["hessian_rank"]).values["hessian_rank"] > 0


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
        assert measure(nn.Identity(), (output, target), measures=["error"]).values["error"] == wrong


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
    assert re.search(reason, measure(nn.Identity(), (output, target), measures=["error"]).skipped["error"])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_loss_is_not_taken_for_a_weighted_loss(bad: float) -> None:
    model = zoo.build("mlp")
    with torch.no_grad():
        model[4].bias[0] = bad
    notes = measure(model, (INPUTS, LABELS), cross_entropy, measures=["gradient_condition_number", "loss"]).notes
    assert notes
    assert not any("neither the mean nor the sum" in note for note in notes)


def test_error_rate_counts_positions() -> None:
    output = torch.eye(3).expand(2, 3, 3)
    assert error_rate(output, torch.tensor([[0, 1, 2], [0, 0, 0]])) == pytest.approx(2 / 6)
    with pytest.raises(ValueError, match="target must have"):
        error_rate(torch.eye(3), torch.zeros(2))


def test_ignored_targets_do_not_count_as_errors() -> None:
    output = torch.eye(4).repeat(2, 1, 1)
    target = torch.tensor([[0, 1, 2, 0], [0, 1, -100, -100]])
    assert error_rate(output, target) == pytest.approx(1 / 6)
    assert math.isnan(error_rate(output, torch.full((2, 4), -100)))


def test_an_output_that_is_not_a_number_leaves_no_error() -> None:
    output, target = torch.eye(3), torch.tensor([0, 1, 2])
    output[1, 0] = math.nan
    assert math.isnan(error_rate(output, target))
    assert error_rate(output, torch.tensor([0, -100, 0])) == 0.5
