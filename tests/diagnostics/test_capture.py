import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pliant.diagnostics.batches import Batch
from pliant.diagnostics.capture import capture
from pliant.diagnostics.probe import batch_statistics, undisturbed

BATCH = Batch.of(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
IMAGES = Batch.of(torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(0)))


def test_features_follow_norm_layer_and_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    found = capture(model, BATCH, keep=True)
    first = model[:3](BATCH.args[0])
    second = model[3:5](first)
    assert list(found.layers) == ["0", "3"]
    torch.testing.assert_close(found.layers["0"].values, first)
    torch.testing.assert_close(found.layers["0"].mean_abs, first.double().abs().mean(0))
    assert found.layers["0"].active.equal((first != 0).sum(0))
    torch.testing.assert_close(found.layers["3"].values, second)
    torch.testing.assert_close(found.representation, second)
    torch.testing.assert_close(found.output, model(BATCH.args[0]))
    assert capture(model, BATCH).layers["0"].values is None


def test_activations_that_are_functions_and_in_place() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = functional.leaky_relu(self.a(x), inplace=True)
            self.seen = h.clone()
            h += 100  # after the activation: not what its units did
            return self.b(h)

    model = Net()
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["a"]
    assert found.layers["a"].values.equal(model.seen)


def test_linear_network_has_the_outputs_of_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    found = capture(model, BATCH, keep=True)
    assert list(found.layers) == ["0", "1"]
    torch.testing.assert_close(found.layers["1"].values, model[:2](BATCH.args[0]))


def test_activation_of_the_output_is_not_hidden() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2), nn.Tanh())
    assert list(capture(model, BATCH).layers) == ["0"]


def test_units_of_a_convolution_are_channels() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    found = capture(model, IMAGES)
    h = model[:2](IMAGES.args[0])
    torch.testing.assert_close(found.layers["0"].mean_abs, h.double().abs().mean((0, 2, 3)))
    assert found.representation.shape == (6, 108)


def test_positions_count_as_samples_of_a_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2))
    batch = Batch.of(torch.randn(3, 7, 4))
    found = capture(model, batch)
    torch.testing.assert_close(found.layers["0"].mean_abs, model[:2](batch.args[0]).double().abs().mean((0, 1)))
    assert found.representation.shape == (21, 5)


def test_one_layer_with_two_activations_has_two_names() -> None:
    class CReLU(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.relu(x), torch.relu(-x)], 1)

    model = nn.Sequential(nn.Linear(4, 5), CReLU(), nn.Linear(10, 2))
    assert list(capture(model, BATCH).layers) == ["0", "0:2"]


def test_transformer_layers_are_seen_though_they_have_a_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 9, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(4, 2)).eval()
    found = capture(model, Batch.of(torch.randn(3, 5, 4)))
    assert list(found.layers) == ["0.linear1"]
    assert len(found.layers["0.linear1"].mean_abs) == 9


def test_capture_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    capture(model, BATCH)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_undisturbed_restores_modes_and_random_numbers() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4))
    model[1].eval()
    before = torch.get_rng_state()
    with undisturbed(model):
        assert not model[0].training
        torch.rand(10)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.get_rng_state().equal(before)


def test_batch_statistics_are_what_training_normalises_with() -> None:
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
