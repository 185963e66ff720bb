"""What a diagnosis says of the values that it was given: no model is measured here but where its notes are tested."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pliant.diagnostics import Diagnosis, diagnose, measures
from pliant.diagnostics.diagnosis_page import render_diagnosis
from tests import zoo


def diagnosis(values: dict[str, float], reference: dict[str, float]) -> Diagnosis:
    return Diagnosis(values, reference, {}, (), 8)


@pytest.mark.parametrize("reference", [math.nan, math.inf, 0.0, -0.1])
def test_no_factor_is_taken_of_a_reference_that_has_none(reference: float) -> None:
    for name in ("sharpness", "gradient_l2"):
        sign = measures.info(name).sign
        assert sign is not None
        assert sign.limit(reference) is None
        assert not sign.present(-0.05, reference)
        assert not sign.present(1e-9, reference)
        found = diagnosis({name: 5.0}, {name: reference})
        assert found.findings() == []
        assert found.unjudged() == {name: f"the reference's value is {reference:.4g}"}
        assert found.verdict.startswith("No sign of lost plasticity could be judged.\nNot judged: ")


def test_amounts_are_added_to_any_finite_reference() -> None:
    sign = measures.info("dormant_fraction").sign
    assert sign is not None
    assert sign.limit(0.0) == 0.1
    assert sign.limit(math.nan) is None
    assert sign.limit(None) == 0.1


def test_what_cannot_be_judged_is_named_and_not_called_absent() -> None:
    values = {"weight_l2": 3.0, "weight_l2/a": 3.0, "spectral_norm": math.nan, "feature_rank": 0.5, "sharpness": 2.0}
    reference = {"weight_l2": 1.0, "weight_l2/a": math.nan, "spectral_norm": 1.0, "sharpness": math.nan}
    found = diagnosis(values, reference)
    reasons = {
        "spectral_norm": "its value is nan",
        "feature_rank": "the reference has no value",
        "sharpness": "the reference's value is nan",
    }
    assert found.unjudged() == reasons
    (weight,) = found.findings()
    assert (weight.measure, weight.present, weight.layers) == ("weight_l2", True, ())
    listed = ", ".join(f"{name} ({why})" for name, why in reasons.items())
    assert f"Not judged: {listed}." in found.verdict.splitlines()
    assert "Not present" not in found.verdict
    assert "1 of 1 signs" in found.summary
    assert all(f"{name} could not be judged" in render_diagnosis(found, "") for name in reasons)


def test_a_sign_that_single_layers_show_alone_is_told() -> None:
    """A layer whose units have gone dormant must not hide behind a larger one that is well."""
    values = {"dormant_fraction": 0.17, "dormant_fraction/0": 0.0, "dormant_fraction/2": 0.33, "weight_l2": 1.0}
    reference = {"dormant_fraction": 0.1, "dormant_fraction/0": 0.05, "dormant_fraction/2": 0.15, "weight_l2": 1.0}
    found = diagnosis(values, reference)
    lines = found.verdict.splitlines()
    assert "Present only in single layers: dormant_fraction (2)." in lines
    assert "Not present: weight_l2." in lines
    assert "units have gone dormant only in single layers" in render_diagnosis(found, "")


def test_what_is_skipped_for_one_reason_stands_in_one_line() -> None:
    found = replace(
        diagnosis({}, {}), skipped={"a": "it needs a batch", "b": "it needs labels", "c": "it needs a batch"}
    )
    skipped = [line for line in found.show().splitlines() if line.startswith("Skipped")]
    assert skipped == ["Skipped: a, c: it needs a batch", "Skipped: b: it needs labels"]


def test_layers_are_named_in_the_order_of_what_made_them_a_sign() -> None:
    """By amount a layer that went from 0 to 0.9 is worse than one from 0.01 to 0.2; by factor it is the other way."""
    dormant = {"dormant_fraction": 0.5, "dormant_fraction/a": 0.2, "dormant_fraction/b": 0.9}
    found = diagnosis(dormant, {"dormant_fraction": 0.1, "dormant_fraction/a": 0.01, "dormant_fraction/b": 0.5})
    assert found.findings()[0].layers == ("b", "a")
    grown = {"weight_l2": 9.0, "weight_l2/a": 2.1, "weight_l2/b": 8.0, "weight_l2/c": 0.9}
    found = diagnosis(grown, {"weight_l2": 3.0, "weight_l2/a": 0.1, "weight_l2/b": 2.0, "weight_l2/c": 0.3})
    assert found.findings()[0].layers == ("a", "b", "c")
    lost = {"hessian_rank": 0.1, "hessian_rank/a": 0.3, "hessian_rank/b": 0.1}
    found = diagnosis(lost, {"hessian_rank": 0.9, "hessian_rank/a": 1.0, "hessian_rank/b": 0.2})
    assert found.findings()[0].layers == ("a", "b")


def test_no_sign_is_judged_by_a_reference_of_another_shape() -> None:
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 5)).double()

    found = diagnose(build(40), zoo.batch("mlp"), cross_entropy, build(4))
    assert [finding.measure for finding in found.findings()] == ["dormant_fraction"], "which has a level of its own"
    assert found.unjudged()["weight_l2"] == "the reference has other parameters"
    assert found.reference["weight_l2"] > 0
    assert "no sign is judged by them" in found.notes[-1]
    assert diagnose(build(4), reference=build(4), measures=["weight_l2"]).unjudged() == {}


@pytest.mark.parametrize("frozen", ["model", "reference", "all of the reference"])
def test_frozen_layers_are_no_sign(frozen: str) -> None:
    """Gradients of both networks are taken by the same parameters, and what is frozen stays so."""
    model, reference = zoo.build("mlp"), zoo.build("mlp")
    (model if frozen == "model" else reference)[: 5 if frozen.startswith("all") else 3].requires_grad_(False)
    before = [p.requires_grad for net in (model, reference) for p in net.parameters()]
    found = diagnose(model, zoo.batch("mlp"), cross_entropy, reference)
    assert found.values["hessian_rank"] == found.reference["hessian_rank"]
    assert found.values["sharpness"] == found.reference["sharpness"]
    assert found.values["gradient_l2"] == found.reference["gradient_l2"]
    assert [p.requires_grad for net in (model, reference) for p in net.parameters()] == before
    assert found.unjudged() == {}


def test_without_any_reference_only_what_is_nan_is_named() -> None:
    found = diagnosis({"weight_l2": 3.0, "sharpness": math.nan, "dormant_fraction": 0.5}, {})
    assert found.unjudged() == {"sharpness": "its value is nan"}
    assert [finding.measure for finding in found.findings()] == ["dormant_fraction"]


def test_why_the_reference_has_no_value_is_a_note() -> None:
    reference = zoo.build("mlp")
    with torch.no_grad():
        reference[0].weight[0, 0] = math.nan
    chosen = ["sharpness", "weight_l2", "hessian_rank", "gauss_newton_rank"]
    found = diagnose(zoo.build("mlp"), zoo.batch("mlp"), cross_entropy, reference, measures=chosen)
    assert "sharpness" in found.values
    assert set(found.unjudged()) == {"sharpness", "weight_l2", "hessian_rank"}
    (note,) = [note for note in found.notes if note.startswith("the reference has no sharpness: ")]
    assert len(note) > len("the reference has no sharpness: ")
    neither = diagnose(nn.Linear(2, 2), None, None, nn.Linear(2, 2))
    assert not any(note.startswith("the reference has no") for note in neither.notes), "it lacks what the model lacks"


def test_reference_is_exported_beside_the_network() -> None:
    found = diagnosis({"weight_l2": 3.0, "weight_l2/a": 2.0, "loss": 1.0}, {"weight_l2": 1.0, "weight_l2/a": 0.5})
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
    lines = diagnosis({name: 2.0, "weight_l2": 3.0}, {name: 4.0}).table().splitlines()
    assert len(lines) == 3
    assert [line.index(number) for line, number in zip(lines[1:], "23", strict=True)] == [len(name) + 11] * 2
    assert lines[0].index("network") + len("network") == len(name) + 12
    assert diagnosis({}, {}).table().split() == ["network"]
