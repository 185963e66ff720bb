"""DASH against the paper, and what it must leave unchanged."""

import copy
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from pliant import DASH
from pliant.diagnostics import measure
from pliant.models import create
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.methods import trajectories
from tests.reference import dash as reference

Data = list[tuple[Tensor, Tensor]]
assert_close = partial(trajectories.assert_close, rtol=1e-10, atol=1e-12)


def data(name: str, count: int = 3) -> Data:
    return [zoo.batch(name, seed=50 + i) for i in range(count)]


def joined(batches: Data) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def clear_idle(model: nn.Module) -> None:
    """Set biases to zero whose gradient is zero up to rounding, so that it has no direction to compare.

    They are the biases of convolutions, all of which BatchNorm follows if there is any, and those of attention's keys.
    """
    convolutions = (nn.Conv2d,) * any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for name, module in model.named_modules():
        if (isinstance(module, convolutions) or name.endswith(".key")) and module.bias is not None:
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", ["mlp", "cnn", "vgg", "cnn_bn"])
def test_batches_as_chunks_match_the_reference(name: str, alpha: float) -> None:
    """As in the authors' code, every chunk is one batch, oldest first."""
    model, batches = zoo.build(name), data(name)
    clear_idle(model)
    control = copy.deepcopy(model)
    DASH(model, alpha=alpha, lam=0.1, accumulate="batch").apply(batches=batches, loss_fn=cross_entropy)
    reference.dash(control, reference.directions(control, batches, alpha), 0.1)
    assert_close(model, control)


@pytest.mark.parametrize(("name", "options", "shape"), [
    ("resnet18", {"width": 2}, (3, 8, 8)),
    ("vit_tiny", {"width": 6, "depth": 1, "heads": 2}, (3, 8, 8)),
])  # fmt: skip
def test_matches_the_reference_on_the_papers_networks(name: str, options: dict[str, int], shape: Any) -> None:
    model = create(name, shape, 5, **options).double()
    inputs, labels = torch.randn(8, *shape, dtype=torch.float64), torch.randint(0, 5, (8,))
    clear_idle(model)
    control = copy.deepcopy(model)
    DASH(model, lam=0.05).apply(batches=[(inputs, labels)], loss_fn=cross_entropy)
    reference.dash(control, reference.directions(control, [(inputs, labels)], 0.3), 0.05)
    assert_close(model, control)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_batches_join_into_chunks(name: str) -> None:
    batches = data(name, 4)
    whole, pieces, pairs = zoo.build(name), zoo.build(name), zoo.build(name)
    DASH(whole).apply(batches=[joined(batches)], loss_fn=cross_entropy)
    DASH(pieces).apply(batches=batches, loss_fn=cross_entropy)
    assert_close(pieces, whole)
    receipt = DASH(pairs, chunk_size=16).apply(batches=batches, loss_fn=cross_entropy)
    assert receipt.details["chunks"] == 2
    control = zoo.build(name)
    chunks = [joined(batches[:2]), joined(batches[2:])]
    DASH(control, accumulate="batch").apply(batches=chunks, loss_fn=cross_entropy)
    assert_close(pairs, control)


def test_batches_are_weighted_by_their_size() -> None:
    batches = data("mlp", 2)
    (x, y), rest = batches[0], batches[1]
    whole, pieces = zoo.build("mlp"), zoo.build("mlp")
    DASH(whole).apply(batches=[joined([(x[:3], y[:3]), rest])], loss_fn=cross_entropy)
    DASH(pieces).apply(batches=[(x[:3], y[:3]), rest], loss_fn=cross_entropy)
    assert_close(pieces, whole)


def test_alpha_has_no_effect_on_a_single_chunk() -> None:
    one, other = zoo.build("mlp"), zoo.build("mlp")
    DASH(one, alpha=0.1).apply(batches=data("mlp"), loss_fn=cross_entropy)
    DASH(other, alpha=0.9).apply(batches=data("mlp"), loss_fn=cross_entropy)
    assert_close(one, other)
    DASH(one, alpha=0.1, accumulate="batch").apply(batches=data("mlp"), loss_fn=cross_entropy)
    DASH(other, alpha=0.9, accumulate="batch").apply(batches=data("mlp"), loss_fn=cross_entropy)
    assert not torch.allclose(one[0].weight, other[0].weight)


@pytest.mark.filterwarnings("ignore:.*changed none of")
def test_chunk_that_does_not_reach_a_weight_counts_as_zero_gradient() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x[0, 0] > 0 else self.b(x)

    def apply(third: float) -> Tensor:
        model = Switch().double()
        with torch.no_grad():
            model.a.weight.fill_(1.0)
        rows = [[1.0, 0.0, 0.0], [third, 0.0, 0.0], [0.1, 1.0, 0.0]]
        batches = [(torch.tensor([row]).double(), torch.full((1, 1), 50.0).double()) for row in rows]

        def loss(output: Tensor, target: Tensor) -> Tensor:
            # A zero gradient and no gradient at all must have the same effect.
            return ((output - target) ** 2).mean() * (0.0 if float(output) == 1.25 else 1.0)

        DASH(model, lam=0.01, alpha=0.3, accumulate="batch").apply(batches=batches, loss_fn=loss)
        return model.a.weight.detach()

    torch.testing.assert_close(apply(-1.0), apply(1.25))


def test_lam_one_changes_nothing() -> None:
    model = zoo.build("cnn_bn")
    before = snapshot(model)
    DASH(model, lam=1.0).apply(batches=data("cnn_bn"), loss_fn=cross_entropy)
    for name, value in snapshot(model).items():
        assert torch.equal(value, before[name]), name


@pytest.mark.filterwarnings("ignore:.*changed none of")
def test_weights_renormalized_by_a_forward_pass_are_restored() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3))
    before = snapshot(model)
    batch = torch.arange(10).view(5, 2), torch.arange(5) % 3
    DASH(model, lam=1.0).apply(batches=[batch], loss_fn=cross_entropy)
    assert_same(snapshot(model), before)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffer_is_left_alone(layout: torch.layout) -> None:
    class Neighbors(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.adjacency @ super().forward(x)

    model, edges = Neighbors(4, 3), torch.eye(5).roll(1, 0)
    model.register_buffer("adjacency", edges.to_sparse(layout=layout))
    batch = torch.randn(5, 4), torch.arange(5) % 3
    assert DASH(model).apply(batches=[batch], loss_fn=cross_entropy).tensors
    assert torch.equal(model.adjacency.to_dense(), edges)
    assert measure(model, batch, cross_entropy, measures=["loss", "weight_l2"]).notes == ()
    model.adjacency = (edges * torch.nan).to_sparse(layout=layout)
    assert "adjacency" in measure(model, batch, cross_entropy, measures=["weight_l2"]).notes[0]


@pytest.mark.parametrize("training", [True, False])
def test_everything_else_stays_unchanged(training: bool) -> None:
    model = zoo.build("cnn_bn")
    model.insert(8, nn.Dropout(0.5))
    optimizer = Adam(model.parameters())
    train(model, optimizer, "cnn_bn", range(2))
    model.train(training)
    model[5].eval()
    before = snapshot(model)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    moments = copy.deepcopy(optimizer.state_dict())
    generator = torch.get_rng_state()
    DASH(model).apply(optimizer, batches=data("cnn_bn"), loss_fn=cross_entropy)
    assert torch.equal(torch.get_rng_state(), generator)
    assert [m.training for m in model.modules()] == modes
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, gradients[name]), name
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    for name in ("1.weight", "1.bias", "5.weight", "5.bias"):
        assert torch.equal(model.get_parameter(name), before[name]), name
    assert str(optimizer.state_dict()) == str(moments)


def test_random_generators_stay_unchanged() -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in data("mlp"):
            random.random(), numpy.random.rand(), torch.rand(1)
            yield batch

    states = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state()
    DASH(zoo.build("mlp")).apply(batches=batches(), loss_fn=cross_entropy)
    assert random.getstate() == states[0]
    assert str(numpy.random.get_state()) == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_list_of_inputs_is_one_argument() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 5)

        def forward(self, pair: list[Tensor]) -> Tensor:
            return self.layer((pair[0] + pair[1]).float())

    x, y = zoo.batch("mlp")
    model = Pair()
    receipt = DASH(model, lam=0.3).apply(batches=[([x, x], y)], loss_fn=cross_entropy)
    assert receipt.details["mean_factors"]["layer.weight"] > 0.3


def test_parameter_that_the_loss_does_not_reach_shrinks_by_lam() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).double()
    weight = model["unused"].weight.detach().clone()
    model.forward = model["used"].forward  # type: ignore[method-assign]
    DASH(model, lam=0.25).apply(batches=[(torch.ones(4, 3).double(), torch.zeros(4).long())], loss_fn=cross_entropy)
    torch.testing.assert_close(model["unused"].weight, 0.25 * weight)


def test_keyword_inputs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, features: Tensor) -> Tensor:
            return self.layer(features)

    model = Named()
    plain = copy.deepcopy(model.layer)
    x, y = torch.randn(5, 3), torch.randint(0, 2, (5,))
    DASH(model).apply(batches=[({"features": x}, y)], loss_fn=cross_entropy)
    DASH(plain).apply(batches=[(x, y)], loss_fn=cross_entropy)
    assert torch.equal(model.layer.weight, plain.weight)


def test_transposed_weights_shrink_by_unit() -> None:
    from transformers.pytorch_utils import Conv1D

    linear, stored = nn.Linear(4, 3).double(), Conv1D(3, 4).double()
    with torch.no_grad():
        stored.weight.copy_(linear.weight.T)
        stored.bias.copy_(linear.bias)
    batch = [(torch.randn(6, 4).double(), torch.randint(0, 3, (6,)))]
    DASH(linear).apply(batches=batch, loss_fn=cross_entropy)
    DASH(stored).apply(batches=batch, loss_fn=cross_entropy)
    torch.testing.assert_close(stored.weight.T, linear.weight)


def test_invalid_settings_are_errors() -> None:
    model = zoo.build("mlp")
    with pytest.raises(ValueError, match=r"lam: 1\.5 is not allowed"):
        DASH(model, lam=1.5)
    with pytest.raises(ValueError, match=r"alpha: 0 is not allowed; it must be a number that is in \(0, 1\]"):
        DASH(model, alpha=0)
    with pytest.raises(ValueError, match="accumulate: 'epoch' is not allowed; it must be one of 'chunk', 'batch'"):
        DASH(model, accumulate="epoch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_size: 5 has no effect with accumulate='batch'"):
        DASH(model, accumulate="batch", chunk_size=5)
    with pytest.raises(ValueError, match="batches: None, but dash needs the new data"):
        DASH(model).apply()
    with pytest.raises(ValueError, match="loss_fn: None, but dash needs the new data"):
        DASH(model).apply(batches=data("mlp"))
    with pytest.raises(ValueError, match="batches: empty; dash needs at least one batch"):
        DASH(model).apply(batches=[], loss_fn=cross_entropy)


def test_examples_are_counted_for_any_type_of_target() -> None:
    inputs, labels = zoo.batch("mlp")
    sizes = (2, 3, 3)
    parts = list(zip(inputs[:8].split(sizes), labels[:8].split(sizes), strict=True))

    def run(form: Any, loss: Any) -> nn.Module:
        model = zoo.build("mlp")
        receipt = DASH(model, chunk_size=5).apply(batches=[(x, form(y)) for x, y in parts], loss_fn=loss)
        assert receipt.details["chunks"] == 2
        return model

    plain = snapshot(run(lambda y: y, cross_entropy))
    assert_same(snapshot(run(lambda y: {"label": y, "unit": "kg"}, lambda o, t: cross_entropy(o, t["label"]))), plain)
    assert_same(snapshot(run(lambda y: y.tolist(), lambda o, t: cross_entropy(o, torch.tensor(t)))), plain)


FREE = torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("loss_fn", [lambda o, _: o.detach().sum() * FREE, lambda o, _: o.detach().sum()])
def test_loss_that_reaches_no_parameter_is_an_error(loss_fn: Any) -> None:
    model = zoo.build("mlp")
    before = snapshot(model)
    with pytest.raises(ValueError, match="loss_fn: its gradient reaches none of the parameters"):
        DASH(model).apply(batches=data("mlp"), loss_fn=loss_fn)
    assert_same(snapshot(model), before)


def test_model_frozen_after_construction_is_an_error() -> None:
    model = zoo.build("mlp")
    dash = DASH(model)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="loss_fn: its gradient reaches none of the parameters"):
        dash.apply(batches=data("mlp"), loss_fn=cross_entropy)


def test_target_without_dimensions() -> None:
    model = nn.Linear(3, 1)
    receipt = DASH(model).apply(batches=[(torch.ones(1, 3), torch.tensor(2.0))], loss_fn=lambda o, t: (o - t).sum())
    assert receipt.details["chunks"] == 1
    assert receipt.details["unreached"] == []


def test_batch_without_a_tensor_is_an_error() -> None:
    model = zoo.build("mlp")
    with pytest.raises(ValueError, match="batches: neither inputs nor targets hold a tensor"):
        DASH(model).apply(batches=[(([1.0],), [0])], loss_fn=cross_entropy)


def test_batch_that_is_not_a_pair_is_an_error() -> None:
    model = zoo.build("mlp")
    before = snapshot(model)
    with pytest.raises(ValueError, match="batches: holds a Tensor; it must hold pairs of inputs and targets"):
        DASH(model).apply(batches=[torch.zeros(2, 12)], loss_fn=cross_entropy)  # type: ignore[list-item]
    assert_same(snapshot(model), before)


def test_overflowing_gradient_is_an_error_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    kept = copy.deepcopy(model.state_dict())
    data = [(torch.ones(2, 3), torch.ones(2, 3))]
    with pytest.raises(ValueError, match=r"loss_fn: its gradient of '\d\.\w+' on the new data is not finite"):
        DASH(model).apply(batches=data, loss_fn=lambda output, target: (output.exp() * 3e38).sum())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
