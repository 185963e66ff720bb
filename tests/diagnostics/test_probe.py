import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pliant.diagnostics.batches import Batch
from pliant.diagnostics.measurement import measure
from pliant.diagnostics.probe import batch_statistics, count_non_finite, find_batch_norms
from pliant.distributed import unwrap_model
from pliant.running import undisturbed
from tests.diagnostics.networks import BATCH, IMAGES

X, Y = torch.randn(16, 6), torch.randint(0, 4, (16,))


def test_wrappers_of_every_kind_and_depth_are_taken_off() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    assert unwrap_model(nn.DataParallel(model)) is model
    assert unwrap_model(torch.compile(nn.DataParallel(torch.compile(model)))) is model
    found = measure(nn.DataParallel(model), (X, Y), cross_entropy, copy.deepcopy(model), measures=["weight_growth"])
    assert found.values["weight_growth/0"] == 1


class Shared(nn.Module):
    """One BatchNorm layer, called twice on what has different statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        once = self.norm(input=3 * x + 1).relu()
        return self.head(self.norm(5 * self.body(once)).relu())


def in_training(model: nn.Module) -> float:
    return float(cross_entropy(copy.deepcopy(model)(X), Y).detach())


def test_a_norm_layer_that_is_called_twice_has_the_statistics_of_each_call() -> None:
    model = Shared()
    found = measure(model, (X, Y), cross_entropy, measures=["loss", "gradient_l2", "hessian_rank", "sharpness"])
    assert found.values["loss"] == pytest.approx(in_training(model), rel=1e-5)
    assert not found.skipped
    with undisturbed(model), batch_statistics(model, Batch.of(X)):
        whole, part = model(X), model(X[:3])
    torch.testing.assert_close(part, whole[:3])
    assert not model._forward_pre_hooks
    assert not model.norm._forward_pre_hooks


def test_a_norm_layer_that_is_frozen_keeps_its_own_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_mean.fill_(2.0)
    model[1].eval()
    assert find_batch_norms(model, "batch") == [model[3]]
    found = measure(model, (X, Y), cross_entropy, model, measures=["loss"])
    assert found.values["loss"] == found.reference["loss"] == pytest.approx(in_training(model), rel=1e-5)
    assert len(find_batch_norms(model.eval(), "batch")) == 2, (
        "modes of a model in eval mode say nothing of its training"
    )


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_norm_layer_without_running_statistics_has_those_of_the_batch(statistics: str) -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    model = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 4)).eval()
    found = measure(model, (X, Y), cross_entropy, measures=["loss", "hessian_rank"], statistics=statistics)  # type: ignore[arg-type]
    assert found.values["loss"] == pytest.approx(in_training(model), rel=1e-5)
    assert found.values["hessian_rank"] > 0
    assert norm.running_mean is None
    assert norm.running_var is None


def test_a_single_sample_has_no_statistics_and_a_note_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    said = "BatchNorm layers used their running statistics, because a single sample has no variance"
    assert said in measure(model, (X[:1], Y[:1]), cross_entropy, measures=["loss"]).notes
    assert said not in measure(model, (X, Y), cross_entropy, measures=["loss"]).notes


def test_hooks_are_gone_after_a_forward_pass_that_fails() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    with pytest.raises(RuntimeError), undisturbed(model), batch_statistics(model, Batch.of(torch.ones(3, 5))):
        pass
    assert not model[1]._forward_pre_hooks


def test_batch_statistics_are_what_training_normalizes_with() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    before = copy.deepcopy(model.state_dict())
    in_training = copy.deepcopy(model).train()(IMAGES.args[0])
    with undisturbed(model), batch_statistics(model, IMAGES):
        torch.testing.assert_close(model(IMAGES.args[0]), in_training)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())


def test_batch_statistics_come_back_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="on purpose"), undisturbed(model), batch_statistics(model, BATCH):
        raise RuntimeError("on purpose")
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert model.training


def test_non_finite_entries_are_counted() -> None:
    assert count_non_finite(torch.tensor([math.nan, 1.0, -math.inf])) == 2
