from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from pliant.diagnostics.batches import Batch, gather, sample_losses, summed_loss

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
    with pytest.raises(ValueError, match="at least one batch"):
        gather(iter([]), 3)
    with pytest.raises(ValueError, match="one structure"):
        gather(iter([(X, Y), X]), 10)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        gather(loader, 0)


@pytest.mark.parametrize("nothing", [None, (), {}, (None, None), torch.ones(0, 3), "text"])
def test_what_holds_no_sample_is_named(nothing: object) -> None:
    with pytest.raises(ValueError, match="batch must be"):
        Batch.of(nothing)


def test_inputs_take_the_models_precision() -> None:
    batch = Batch.of((X, Y)).on(nn.Linear(3, 2).double())
    assert batch.args[0].dtype == torch.float64
    assert batch.target.dtype == torch.int64
    assert Batch.of(X).on(nn.ReLU()).args[0] is X


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


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """A mean whose weights depend on the labels: of one sample alone, they cancel."""
    return cross_entropy(output, target, torch.arange(1.0, 8.0))


@pytest.mark.parametrize("loss_fn", [cross_entropy, nn.CrossEntropyLoss(reduction="sum"),
                                     nn.CrossEntropyLoss(reduction="none"), weighted])  # fmt: skip
def test_the_sum_of_the_samples_losses_has_their_gradient(loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    output, batch = torch.randn(5, 7, requires_grad=True), Batch.of((X, Y))
    total, losses = summed_loss(loss_fn, output, batch)
    expected = cross_entropy(output, Y, reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    (ours,), (theirs,) = torch.autograd.grad(total, output), torch.autograd.grad(expected.sum(), output)
    torch.testing.assert_close(ours, theirs)
    assert not losses.requires_grad
