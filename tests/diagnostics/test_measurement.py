"""What a measurement says of the values that it was given, and how networks are measured."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

from pliant.diagnostics import Measurement, Sign, measure, measures
from pliant.diagnostics._healthy_limits import SEVERE
from pliant.diagnostics.batches import LossFn
from pliant.diagnostics.signs import healthy_limit
from tests import zoo
from tests.diagnostics.networks import NETWORKS, network


def measurement(values: dict[str, float], reference: dict[str, float]) -> Measurement:
    return Measurement(values, reference, {}, (), 8)


@pytest.mark.parametrize("reference", [math.nan, math.inf, 0.0, -0.1])
def test_a_reference_that_is_not_positive_and_finite_allows_no_judgment(reference: float) -> None:
    for name in ("sharpness", "hessian_rank"):
        sign = measures.info(name).sign
        assert sign is not None
        assert sign.times(0.05, reference) is None
        found = measurement({name: 5.0}, {name: reference})
        assert found.findings() == []
        assert found.unjudged() == {name: f"the reference's value is {reference:.4g}"}
        assert found.summary == "No sign of lost plasticity could be judged."


def test_of_lost_units_those_that_remain_are_compared() -> None:
    sign = measures.info("dormant_fraction").sign
    assert sign is not None
    assert sign.times(0.75, 0.5) == pytest.approx(2)
    assert sign.times(0.75, None) == pytest.approx(4)
    assert sign.times(1.0, 0.5) == math.inf
    assert sign.times(math.nan, 0.5) is None


def test_unjudged_signs_are_named_and_not_called_absent() -> None:
    values = {"weight_l2": 300.0, "weight_l2/a": 3.0, "spectral_norm": math.nan, "feature_rank": 0.5, "sharpness": 2.0}
    reference = {"weight_l2": 1.0, "weight_l2/a": math.nan, "spectral_norm": 1.0, "sharpness": math.nan}
    found = measurement(values, reference)
    reasons = {
        "spectral_norm": "its value is nan",
        "feature_rank": "the reference has no value",
        "sharpness": "the reference's value is nan",
    }
    assert found.unjudged() == reasons
    (weight,) = found.findings()
    assert (weight.measure, weight.grade, weight.layers) == ("weight_l2", "severe", ())
    listed = ", ".join(f"{name} ({why})" for name, why in reasons.items())
    assert found.describe_signs()[-1] == f"not judged: {listed}."
    assert not any(line.startswith("fine") for line in found.describe_signs())
    assert found.summary == "Of 1 sign of lost plasticity, 1 is severe."


def test_a_sign_in_a_single_layer_is_reported() -> None:
    """A layer whose units have gone dormant must not hide behind a larger one that is well."""
    values = {"dormant_fraction": 0.17, "dormant_fraction/0": 0.0, "dormant_fraction/2": 0.99, "weight_l2": 1.0}
    reference = {"dormant_fraction": 0.1, "dormant_fraction/0": 0.05, "dormant_fraction/2": 0.15, "weight_l2": 1.0}
    found = measurement(values, reference)
    assert found.describe_signs() == [
        "fine: dormant_fraction, weight_l2.",
        "only in single layers: dormant_fraction (layer 2).",
    ]
    assert found.summary == "No sign of lost plasticity was found: all 2 are in the range of healthy networks."


def test_measures_skipped_for_one_reason_share_a_line() -> None:
    found = replace(
        measurement({}, {}), skipped={"a": "it needs a batch", "b": "it needs labels", "c": "it needs a batch"}
    )
    skipped = [line for line in found.describe_gaps() if line.startswith("Skipped")]
    assert skipped == ["Skipped: a, c: it needs a batch", "Skipped: b: it needs labels"]


def test_layers_are_named_worst_first() -> None:
    dormant = {"dormant_fraction": 0.5, "dormant_fraction/a": 0.97, "dormant_fraction/b": 0.99}
    found = measurement(dormant, {"dormant_fraction": 0.1, "dormant_fraction/a": 0.01, "dormant_fraction/b": 0.5})
    assert found.findings()[0].layers == ("b", "a")
    limit = healthy_limit("weight_l2")
    grown = {"weight_l2": 9.0, "weight_l2/a": 3 * limit, "weight_l2/b": 4 * limit, "weight_l2/c": 0.9 * limit}
    found = measurement(grown, {"weight_l2": 3.0, "weight_l2/a": 1.0, "weight_l2/b": 2.0, "weight_l2/c": 1.0})
    assert found.findings()[0].layers == ("a", "b")
    assert found.findings()[0].by_layer == pytest.approx({"a": 3, "b": 2, "c": 0.9})


def test_grades_are_multiples_of_healthy_networks() -> None:
    limit = healthy_limit("spectral_norm")
    grades = [
        measurement({"spectral_norm": times * limit}, {"spectral_norm": 1.0}).findings()[0].grade
        for times in (0.5, 0.99, 1.01, SEVERE - 0.01, SEVERE + 0.01)
    ]
    assert grades == ["fine", "fine", "raised", "raised", "severe"]


def test_the_largest_sign_comes_first() -> None:
    values = {name: 100.0 * healthy_limit(name) for name in ("weight_l2", "spectral_norm")}
    values["weight_l2"] *= 2
    found = measurement(values, dict.fromkeys(values, 1.0))
    assert [(each.measure, round(each.size)) for each in found.findings()] == [
        ("weight_l2", 200),
        ("spectral_norm", 100),
    ]


def test_no_sign_is_judged_by_a_reference_of_another_shape() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 5)).double()

    found = measure(build(40), zoo.batch("mlp"), cross_entropy, build(4))
    assert [finding.measure for finding in found.findings()] == ["dormant_fraction"], "which has a level of its own"
    assert found.unjudged()["weight_l2"] == "the reference has other parameters"
    assert found.reference["weight_l2"] > 0
    assert "no sign is judged by them" in found.notes[-1]
    assert measure(build(4), reference=build(4), measures=["weight_l2"]).unjudged() == {}


@pytest.mark.parametrize("frozen", ["model", "reference", "all of the reference"])
def test_frozen_layers_do_not_cause_a_sign(frozen: str) -> None:
    """Gradients of both networks are taken by the same parameters, and what is frozen stays so."""
    model, reference = zoo.build("mlp"), zoo.build("mlp")
    (model if frozen == "model" else reference)[: 5 if frozen.startswith("all") else 3].requires_grad_(False)
    before = [p.requires_grad for net in (model, reference) for p in net.parameters()]
    found = measure(model, zoo.batch("mlp"), cross_entropy, reference)
    assert found.values["hessian_rank"] == found.reference["hessian_rank"]
    assert found.values["sharpness"] == found.reference["sharpness"]
    assert found.values["gradient_l2"] == found.reference["gradient_l2"]
    assert [p.requires_grad for net in (model, reference) for p in net.parameters()] == before
    assert found.unjudged() == {}


def test_without_a_reference_only_lost_units_are_judged() -> None:
    found = measurement({"weight_l2": 3.0, "sharpness": math.nan, "dormant_fraction": 0.5}, {})
    lack = "there is no fresh network to compare with"
    assert found.unjudged() == {"weight_l2": lack, "sharpness": "its value is nan"}
    assert [finding.measure for finding in found.findings()] == ["dormant_fraction"]


def test_why_the_reference_has_no_value_is_a_note() -> None:
    reference = zoo.build("mlp")
    with torch.no_grad():
        reference[0].weight[0, 0] = math.nan
    chosen = ["sharpness", "weight_l2", "hessian_rank", "gauss_newton_rank"]
    found = measure(zoo.build("mlp"), zoo.batch("mlp"), cross_entropy, reference, measures=chosen)
    assert "sharpness" in found.values
    assert set(found.unjudged()) == {"sharpness", "weight_l2", "hessian_rank"}
    (note,) = [note for note in found.notes if note.startswith("the reference has no sharpness: ")]
    assert len(note) > len("the reference has no sharpness: ")
    neither = measure(nn.Linear(2, 2), None, None, nn.Linear(2, 2))
    assert not any(note.startswith("the reference has no") for note in neither.notes), "it lacks what the model lacks"


def test_reference_is_exported_beside_the_network() -> None:
    found = measurement({"weight_l2": 3.0, "weight_l2/a": 2.0, "loss": 1.0}, {"weight_l2": 1.0, "weight_l2/a": 0.5})
    expected = {**found.values, "reference/weight_l2": 1.0, "reference/weight_l2/a": 0.5}
    assert found.to_dict() == expected

    class Writer(dict[str, float]):
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            self[tag] = scalar_value

    writer = Writer()
    found.write_scalars(writer, prefix="at")
    assert writer == {f"at/{key}": value for key, value in expected.items()}


def test_long_names_keep_the_columns_of_the_table() -> None:
    name = "gradient_condition_number@classification"
    lines = measurement({name: 2.0, "weight_l2": 3.0}, {name: 4.0}).table().splitlines()
    assert len(lines) == 3
    assert [line.index(number) for line, number in zip(lines[1:], "23", strict=True)] == [len(name) + 11] * 2
    assert lines[0].index("network") + len("network") == len(name) + 12
    assert measurement({}, {}).table().split() == ["network"]


def trained(name: str = "mlp", steps: int = 20) -> tuple[nn.Module, nn.Module]:
    """A network after some training, and as it was."""
    model = zoo.build(name)
    initial = copy.deepcopy(model)
    x, y = zoo.batch(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, initial


def test_every_measure_has_a_value_for_a_network_with_everything() -> None:
    model, initial = trained()
    found = measure(model, zoo.batch("mlp"), cross_entropy, initial)
    assert set(found.skipped) == {"attention_entropy"}
    infos = map(measures.info, measures.names())
    expected = {info.name for info in infos if not info.needs & {"step", "moments"} and info.cost != "matrix"}
    expected -= {"attention_entropy"}  # an MLP has no attention
    assert expected == {row.measure for row in found.rows()}
    assert expected == {row.measure for row in found.rows() if not row.layer}, "each has a total"
    assert all(math.isfinite(v) for k, v in found.values.items() if "condition_number" not in k)


def test_values_are_those_of_the_formulas() -> None:
    model, initial = trained()
    x, y = zoo.batch("mlp")
    v = measure(model, (x, y), cross_entropy, initial).to_dict()
    w, w0 = ([m.weight.detach() for m in net if isinstance(m, nn.Linear)] for net in (model, initial))
    theta, theta0 = (torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (model, initial))
    assert v["loss"] == pytest.approx(float(cross_entropy(model(x), y).detach()))
    assert v["error"] == pytest.approx(float((model(x).argmax(1) != y).double().mean()))
    assert v["weight_l1"] == pytest.approx(float(theta.abs().sum()))
    assert v["weight_l2"] == pytest.approx(float(theta.norm()))
    assert v["weight_growth"] == pytest.approx(float(theta.norm() / theta0.norm()))
    assert v["weight_l2/2"] == pytest.approx(
        float(torch.cat([p.detach().flatten() for p in model[2].parameters()]).norm())
    )
    tops = [float(torch.linalg.matrix_norm(m, 2)) for m in w]
    assert v["spectral_norm"] == pytest.approx(sum(tops) / 3)
    assert v["spectral_norm_max"] == pytest.approx(max(tops))
    assert v["spectral_norm/0"] == pytest.approx(tops[0])
    assert v["lipschitz_bound"] == pytest.approx(math.prod(tops))
    assert v["frobenius_bound"] == pytest.approx(math.prod(float(m.norm()) for m in w))
    assert v["stable_rank/4"] == pytest.approx(float(w[2].norm() ** 2) / tops[2] ** 2)
    dfi = [min(float((m @ m.T - torch.eye(len(m))).norm() ** 2), float((m.T @ m - torch.eye(m.shape[1])).norm() ** 2))
           for m in w]  # fmt: skip
    assert v["isometry_deviation"] == pytest.approx(sum(dfi))
    sfe = [float((a - b).norm() ** 2) for a, b in zip(w, w0, strict=True)]
    assert v["frobenius_error"] == pytest.approx(sum(sfe))
    assert v["frobenius_error_normalized"] == pytest.approx(sum(sfe) / sum(float(m.norm() ** 2) for m in w0))
    assert v["distance_l2"] == pytest.approx(float((theta - theta0).norm()))
    assert v["distance_wasserstein"] <= v["distance_l2"]
    hidden = model[:4](x).detach()
    sigma = torch.linalg.svdvals(hidden)
    assert v["feature_rank"] == pytest.approx((int((sigma.cumsum(0) < 0.99 * sigma.sum()).sum()) + 1) / 8)
    shares = sigma[sigma > 0] / sigma.sum()
    assert v["feature_effective_rank"] == pytest.approx(math.exp(-float((shares * shares.log()).sum())), rel=1e-6)
    layers = [model[:2](x).detach(), hidden]
    dead = [float((h == 0).all(0).double().mean()) for h in layers]
    assert v["dead_fraction/2"] == pytest.approx(dead[1])
    assert v["dead_fraction"] == pytest.approx(sum(dead) / 2)
    assert v["representation_change/0"] == pytest.approx(
        float((layers[0] - initial[:2](x)).norm(dim=1).mean().detach())
    )
    gradient = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    assert v["gradient_l2"] == pytest.approx(float(torch.cat([g.flatten() for g in gradient]).norm()))


def test_relative_error_to_zero_is_infinite_unless_equal() -> None:
    model, zero = nn.Linear(3, 2), nn.Linear(3, 2)
    nn.init.zeros_(zero.weight)
    names = ["frobenius_error_normalized"]
    assert measure(model, reference=zero, measures=names).values["frobenius_error_normalized"] == math.inf
    assert measure(zero, reference=zero, measures=names).values["frobenius_error_normalized"] == 0


def test_ranks_of_whole_matrices_come_on_demand_and_where_they_fit() -> None:
    model, _ = trained()
    names = [name for name in measures.names() if measures.info(name).cost == "matrix"]
    x, y = zoo.batch("mlp")
    assert set(measure(model, (x, y), cross_entropy, measures=names).values) == set(names)
    assert not set(names) & set(measure(model, (x, y), cross_entropy).values)
    wide = nn.Sequential(nn.Linear(x.shape[1], 3000), nn.ReLU(), nn.Linear(3000, 5)).double()
    assert set(measure(wide, (x, y), cross_entropy, measures=names).skipped) == set(names)


@pytest.mark.parametrize(
    ("outputs", "target", "loss_fn", "reason"),
    [
        (3, torch.randn(8, 3), mse_loss, "it needs a class for each sample, as an integer"),
        (1, torch.randint(0, 2, (8, 1)), lambda out, y: mse_loss(out, y.float()), "of at least two classes"),
        (3, torch.randint(0, 3, (8, 3)), lambda out, y: mse_loss(out, y.float()), "it needs a class for each sample"),
    ],
)
def test_ranks_that_count_classes_need_classes(outputs: int, target: Tensor, loss_fn: LossFn, reason: str) -> None:
    names = ["gauss_newton_rank", "fisher_rank"]
    found = measure(nn.Linear(12, outputs), (torch.randn(8, 12), target), loss_fn, measures=names)
    assert all(reason in found.skipped[name] for name in names)
    tokens = measure(nn.Linear(3, 2), (torch.ones(2, 4, 3), torch.ones(2, 4, 2)), mse_loss, measures=names)
    assert "it needs logits, [samples, classes]" in tokens.skipped["fisher_rank"]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_network_is_measured(name: str) -> None:
    model, batch, loss_fn = network(name)
    found = measure(model, batch, loss_fn, copy.deepcopy(model))
    assert "hessian_rank" in found.values
    assert "sharpness" in found.values
    allowed = {"balancedness", "feature_rank", "feature_srank", "feature_effective_rank", "dormant_fraction",
               "dead_fraction", "dormancy", "feature_covariance_distance", "representation_change",
               "saturation", "gradient_dormant_fraction", "attention_entropy"}  # fmt: skip
    if name == "language":  # the table that is added to its tokens may be a weight or not
        allowed |= {"lipschitz_bound", "frobenius_bound"}
    assert set(found.skipped) <= allowed
    for distance in ("frobenius_error", "distance_l2", "distance_wasserstein", "layer_balance"):
        assert found.values[distance] == 0
    same = (k for k in found.values if not measures.info(k.partition("/")[0]).needs & {"reference"})
    assert all(found.values[k] == pytest.approx(found.reference[k], nan_ok=True) for k in same)


def test_nothing_of_the_model_is_changed() -> None:
    model, batch, loss_fn = network("residual")
    model.train()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure(model, batch, loss_fn, copy.deepcopy(model))
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is not None and p.grad.eq(1).all() for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert torch.get_rng_state().equal(random)


def test_measures_with_missing_needs_are_skipped() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    bare = measure(model)
    assert bare.samples == 0
    assert bare.skipped["hessian_rank"] == "it needs a batch"
    assert bare.skipped["dead_fraction"] == "it needs a batch"
    assert bare.skipped["weight_growth"] == "it needs a reference"
    assert "weight_l2" in bare.values
    assert measure(model, x).skipped["hessian_rank"] == "it needs a loss_fn"
    unlabeled = measure(model, x, cross_entropy)
    assert unlabeled.skipped["sharpness"] == "it needs labels, and the batch has none"
    assert "feature_rank" in unlabeled.values
    (line,) = [line for line in str(unlabeled).splitlines() if "it needs labels" in line]
    assert line.startswith("Skipped: ")
    assert "sharpness" in line
    other = measure(model, (x, y), cross_entropy, zoo.build("tied"))
    assert "the same names and shapes" in other.skipped["distance_l2"]
    assert other.reference["weight_l2"] > 0


def test_a_measure_that_does_not_apply_says_why() -> None:
    model, _ = trained("cnn_bn")
    found = measure(model, zoo.batch("cnn_bn"), cross_entropy)
    assert "is a BatchNorm2d" in found.skipped["balancedness"]


def test_chosen_measures_alone_are_taken() -> None:
    model, initial = trained()
    found = measure(model, zoo.batch("mlp"), cross_entropy, initial, measures=["hessian_rank", "weight_l2"])
    assert {row.measure for row in found.rows()} == {"hessian_rank", "weight_l2"}
    with pytest.raises(ValueError, match="there is no measure 'hesian_rank'; did you mean 'hessian_rank'"):
        measure(model, measures=["hesian_rank"])
    with pytest.raises(ValueError, match=r"statistics: .* is not allowed; it must be one of"):
        measure(model, statistics="none")  # type: ignore[arg-type]


def test_loaders_dicts_and_several_losses() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp", size=20)
    loader = DataLoader(TensorDataset(x, y), batch_size=6)
    from_loader = measure(model, loader, cross_entropy, measures=["loss", "hessian_rank"], samples=16)
    assert from_loader.samples == 16
    direct = measure(model, (x[:16], y[:16]), cross_entropy, measures=["loss", "hessian_rank"])
    assert from_loader.values == direct.values
    losses = {"all": cross_entropy, "first": lambda out, target: cross_entropy(out[:, :2], target.clamp(max=1))}
    several = measure(model, {"input": x, "labels": y}, losses, measures=["weight_l2", "loss", "gradient_l2"])
    keys = {row.measure for row in several.rows()}
    assert keys == {"weight_l2", "loss@all", "loss@first", "gradient_l2@all", "gradient_l2@first"}
    assert several.values["loss@all"] == pytest.approx(float(cross_entropy(model(x), y).detach()))
    assert several.values["loss@first"] != several.values["loss@all"]


def test_several_losses_are_named_so_that_keys_can_be_read() -> None:
    model, batch = zoo.build("mlp"), zoo.batch("mlp")
    with pytest.raises(ValueError, match="at least one loss, got an empty mapping"):
        measure(model, batch, {})
    for name in ("a/b", "", 3):
        with pytest.raises(ValueError, match=f"names without '/', .* got {name!r}"):
            measure(model, batch, {name: cross_entropy})  # type: ignore[dict-item]
    with torch.no_grad():
        model[4].bias[0] = math.nan
    notes = measure(model, batch, {"a": cross_entropy, "b": cross_entropy}, measures=["loss"]).notes
    assert sum("the model's output" in note for note in notes) == 1


def test_a_model_that_has_nothing_to_learn_is_measured_for_the_rest() -> None:
    x, y = zoo.batch("mlp")
    frozen = measure(zoo.build("mlp").requires_grad_(False), (x, y), cross_entropy)
    for name in ("gradient_l2", "hessian_rank", "sharpness"):
        assert frozen.skipped[name] == "the model must have a parameter that requires gradients, got none"
    assert frozen.values["balancedness"] > 1
    matrix = [name for name in measures.names() if measures.info(name).cost == "matrix"]
    assert set(measure(zoo.build("mlp").requires_grad_(False), (x, y), cross_entropy, measures=matrix).skipped) == set(
        matrix
    )
    bare = measure(nn.ReLU(), (x, x), mse_loss)
    assert bare.values["loss"] > 0
    assert bare.skipped["balancedness"] == "weights must hold at least one layer, got none"


def test_a_parameter_that_the_output_does_not_depend_on_has_no_gradient() -> None:
    model = zoo.build("mlp").requires_grad_(False)
    model.extra = nn.Linear(2, 2).double()
    model.forward = lambda x: nn.Sequential.forward(model[:5], x)  # type: ignore[method-assign]
    names = ["gradient_l2", "hessian_rank", "sharpness", "hessian_exact_rank"]
    found = measure(model, zoo.batch("mlp"), cross_entropy, measures=names)
    assert found.skipped == {}
    assert {found.values[name] for name in names} == {0.0}


def test_a_measure_whose_derivative_is_missing_is_skipped_alone() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(10, 6, mode="max"), nn.Linear(6, 4)

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.bag(index))

    found = measure(Bag(), (torch.randint(0, 10, (8, 3)), torch.randint(0, 4, (8,))), cross_entropy)
    assert "not implemented" in found.skipped["sharpness"]
    assert found.values["hessian_rank"] > 0
    sparse = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4))
    batch = torch.randint(0, 10, (8, 3)), torch.randint(0, 4, (8,))
    found = measure(sparse, batch, cross_entropy, measures=["hessian_exact_rank", "sharpness"])
    assert len(found.skipped["hessian_exact_rank"]) < 100, "not all of a message of pages"
    assert found.values["sharpness"] > 0


def test_inference_mode_does_not_matter() -> None:
    model = zoo.build("mlp", dtype=torch.float32)
    names = ["loss", "hessian_rank", "sharpness"]
    with torch.inference_mode():
        batch = zoo.batch("mlp", dtype=torch.float32)
        inside = measure(model, batch, cross_entropy, measures=names)
        made_there = zoo.build("mlp", dtype=torch.float32)
    assert inside.values == measure(model, batch, cross_entropy, measures=names).values
    found = measure(made_there, batch, cross_entropy)
    assert "made in inference mode" in found.skipped["sharpness"]
    assert found.values["loss"] > 0


def test_a_model_without_shapes_is_named() -> None:
    x, y = zoo.batch("mlp")
    lazy = nn.Sequential(nn.Linear(12, 8), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"model must be initialized, but 1.weight has no shape yet"):
        measure(lazy, (x, y), cross_entropy)
    with pytest.raises(ValueError, match=r"reference must be initialized"):
        measure(nn.Linear(12, 8), (x, y), cross_entropy, lazy)


def test_a_model_without_values_or_units_is_named() -> None:
    x, y = zoo.batch("mlp")
    with pytest.raises(ValueError, match=r"model must hold values, but 0.weight is on the device 'meta'"):
        measure(zoo.build("mlp").to("meta"))
    with pytest.raises(ValueError, match=r"reference must hold values"):
        measure(zoo.build("mlp"), reference=zoo.build("mlp").to("meta"))
    empty = zoo.build("mlp")
    empty[0].weight, empty[0].bias = nn.Parameter(torch.zeros(0, 12)), nn.Parameter(torch.zeros(0))
    empty[2].weight = nn.Parameter(torch.zeros(8, 0))
    with pytest.raises(
        ValueError, match=r"model must have units in every layer, but the weight of '0' has shape \(0, 12\)"
    ):
        measure(empty, (x, y), cross_entropy)


def test_planted_dead_and_dormant_units_are_counted_where_they_are() -> None:
    model = zoo.build("mlp")
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[0].bias[:4] = -1
        model[2].weight[:2] *= 1e-4
        model[2].bias[:2] = 1e-4
    found = measure(model, zoo.batch("mlp", size=64), measures=["dormant_fraction", "dead_fraction"])
    assert found.values["dead_fraction/0"] >= 4 / 16
    assert found.values["dormant_fraction/2"] >= 2 / 16
    assert found.values["dormant_fraction/2"] > found.values["dead_fraction/2"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weights_are_named_and_other_measures_continue(bad: float) -> None:
    model, initial = trained()
    with torch.no_grad():
        model[2].weight[0, 0] = bad
    found = measure(model, zoo.batch("mlp"), cross_entropy, initial)
    assert any("1 NaN or infinite entries in 2.weight" in note for note in found.notes)
    assert any(note.startswith("not finite:") and "spectral_norm/2 is nan" in note for note in found.notes)
    assert math.isfinite(found.values["spectral_norm/0"])
    assert math.isfinite(found.values["weight_l2/4"])
    assert any("the model's output" in note for note in found.notes)


@pytest.mark.parametrize("where", ["input", "bias"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_batch_or_bias_that_is_not_finite_gives_no_healthy_number(where: str, bad: float) -> None:
    model, initial = trained()
    x, y = zoo.batch("mlp")
    with torch.no_grad():
        (x if where == "input" else model[2].bias).view(-1)[0] = bad
    found = measure(model, (x, y), cross_entropy, initial)
    for key in ("dormant_fraction", "dead_fraction", "dormancy", "loss", "feature_rank", "error"):
        assert math.isnan(found.values[key]), key
    assert "finite" in found.skipped["balancedness"]
    assert math.isfinite(found.values["spectral_norm_max"])


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_largest_value_is_nan_if_a_layer_is_nan(layer: int) -> None:
    model, initial = trained(steps=1)
    with torch.no_grad():
        model[layer].weight[0, 0] = math.nan
    found = measure(model, reference=initial, measures=["spectral_norm_max", "layer_balance"])
    assert math.isnan(found.values["spectral_norm_max"])
    assert math.isnan(found.values["layer_balance"])


def test_a_network_without_a_weight_has_no_spectrum() -> None:
    model, x = nn.Sequential(nn.LayerNorm(6)), torch.randn(4, 6)
    found = measure(model, (x, x), mse_loss, copy.deepcopy(model))
    for name in ("spectral_norm", "lipschitz_bound", "frobenius_bound", "isometry_deviation", "layer_balance"):
        assert found.skipped[name] == "it needs a weight of two or more dimensions, and the model has none"
    assert found.values["hessian_rank"] > 0


def test_half_precision() -> None:
    model, initial = trained(steps=3)
    exact = measure(model, zoo.batch("mlp"), cross_entropy, initial)
    half = measure(copy.deepcopy(model).bfloat16(), zoo.batch("mlp"), cross_entropy, copy.deepcopy(initial).bfloat16())
    for key in ("weight_l2", "spectral_norm", "gradient_l2", "distance_l2", "isometry_deviation"):
        assert half.values[key] == pytest.approx(exact.values[key], rel=0.05)


def test_fresh_batch_norm_is_compared_as_training_sees_it() -> None:
    """A fresh network has running statistics that fit nothing: its eval-mode features are not those it trains with."""
    model = zoo.build("cnn_bn", dtype=torch.float32)
    x, y = zoo.batch("cnn_bn", size=32, dtype=torch.float32)
    batch = measure(model, (100 * x, y), cross_entropy, measures=["loss"])
    in_training = float(cross_entropy(copy.deepcopy(model).train()(100 * x), y).detach())
    assert batch.values["loss"] == pytest.approx(in_training, rel=1e-4)
    running = measure(model, (100 * x, y), cross_entropy, measures=["loss"], statistics="running")
    assert running.values["loss"] == pytest.approx(float(cross_entropy(model.eval()(100 * x), y).detach()), rel=1e-4)
    assert running.values["loss"] != pytest.approx(in_training, rel=0.01)


def test_compiled_models_are_unwrapped() -> None:
    model = zoo.build("mlp")
    assert measure(torch.compile(model)).values == measure(model).values


def test_signs_name_layers_and_what_they_explain() -> None:
    model, initial = copy.deepcopy(zoo.build("mlp")), zoo.build("mlp")
    with torch.no_grad():
        model[2].weight *= 100
        model[0].weight[:11] = 0
        model[0].bias[:11] = -1
    found = measure(model, zoo.batch("mlp"), cross_entropy, initial)
    present = {finding.measure: finding for finding in found.findings() if finding.present}
    assert present["weight_l2"].layers == ("2",)
    assert present["dormant_fraction"].layers[0] == "0"
    lines = found.describe_signs()
    (line,) = [line for line in lines if "weight_l2" in line]
    assert line.startswith("severe: the weights have grown. weight_l2 is ")
    assert line.endswith("largest in layer 2.")
    healthy = measure(initial, zoo.batch("mlp"), cross_entropy, initial)
    assert healthy.summary.startswith("No sign of lost plasticity was found")
    assert str(healthy).endswith("\n".join([healthy.summary, *healthy.describe_signs()]))


def test_times_worse_than_a_fresh_network() -> None:
    higher, lower = Sign("higher", "", ""), Sign("lower", "", "")
    assert (higher.times(2.1, 1.0), higher.times(0.5, 1.0), higher.times(3.0, None)) == (2.1, 0.5, None)
    assert (lower.times(0.4, 1.0), lower.times(2.0, 1.0), lower.times(0.0, 1.0)) == (2.5, 0.5, math.inf)
    assert higher.times(math.nan, 1.0) is None


def test_table_has_a_line_for_every_measure_and_layer() -> None:
    model, initial = trained()
    found = measure(model, zoo.batch("mlp"), cross_entropy, initial)
    table = found.table()
    lines = table.splitlines()
    assert lines[0].split() == ["network", "reference"]
    assert any(line.startswith("weight_l2 ") and f"{found.values['weight_l2']:.4g}" in line for line in lines)
    assert sum(line.startswith("4 ") for line in lines) >= 2
    assert "weight_l2/0" not in table
    assert str(found).startswith(table)
    assert found.summary in str(found)


def test_parquet_and_tensorboard_hold_the_same_values(tmp_path: Path) -> None:
    model, initial = trained()
    found = measure(model, zoo.batch("mlp"), cross_entropy, initial)
    found.to_parquet(tmp_path / "found.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "found.parquet").to_pylist()
    assert {f"{r['measure']}/{r['layer']}".rstrip("/"): r["value"] for r in table} == found.values
    assert {r["measure"]: r["reference"] for r in table if not r["layer"]}["weight_l2"] == found.reference["weight_l2"]
    with SummaryWriter(tmp_path / "events") as writer:
        found.write_scalars(writer, step=3)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    scalar = events.Scalars("diagnosis/weight_l2/0")[0]
    assert (scalar.step, scalar.value) == (3, pytest.approx(found.values["weight_l2/0"]))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_costs_the_measures_of_gradients_alone() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self[0](x))
            return self[2](checkpoint(lambda h: torch.relu(self[1](h)), hidden, use_reentrant=True))

    model = Checkpointed(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    found = measure(model, (torch.randn(16, 4), torch.randint(0, 3, (16,))), cross_entropy)
    assert "use_reentrant=False" in found.skipped["gradient_l2"]
    assert "use_reentrant=False" in found.skipped["sharpness"]
    assert found.values["weight_l2"] > 0
    assert found.values["feature_rank"] > 0


def test_outputs_in_a_dictionary_skip_only_the_error(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = zoo.build("mlp")

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    found = measure(Wrapped(), zoo.batch("mlp"), lambda out, y: cross_entropy(out["logits"], y))
    assert found.skipped["error"] == "it needs a tensor of logits and integer labels"
    assert found.values["hessian_rank"] > 0


def test_feature_rank_sees_twin_critics_apart() -> None:
    model = zoo.TwinCritics()
    with torch.no_grad():
        model.first[0].weight[1:] = model.first[0].weight[0]
        model.first[0].bias[1:] = model.first[0].bias[0]
    values = measure(model, (torch.randn(32, 6),), measures=["feature_rank"]).values
    assert values["feature_rank/first.2"] == pytest.approx(1 / 8)
    assert values["feature_rank/second.2"] > 1 / 8
    mean = (values["feature_rank/first.2"] + values["feature_rank/second.2"]) / 2
    assert values["feature_rank"] == pytest.approx(mean)
