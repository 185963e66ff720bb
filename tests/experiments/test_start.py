"""Runs that start from a checkpoint: what they load, when methods act, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import pliant
from pliant import data, models, streams
from pliant.data.cache import digest_file
from pliant.experiments.recipe import RecipeError, make_recipe
from pliant.experiments.run import execute, load_old_test, make_learner, make_stream
from pliant.experiments.run_config import Part, RunConfig, Start
from pliant.experiments.store import Run, load_run
from pliant.training import Learner, Settings, evaluate, train
from tests.experiments.helpers import events, interrupt, outputs, small, write_waiting_network

SETTINGS = Settings(batch_size=16)


def write_checkpoint(folder: Path, scale: float = 1.0, **beside: Any) -> Path:
    model = models.create("mlp", (1, 8, 8), 10, seed=77, widths=[16])
    weights = {name: scale * value for name, value in model.state_dict().items()}
    torch.save({"model": weights, **beside} if beside else weights, folder / "old.pt")
    return folder / "old.pt"


def from_checkpoint(path: Path, **changes: Any) -> RunConfig:
    start = Start(str(path), digest_file(path))
    single = Part("single", {"epochs": 2})
    return small(**{"stream": single, "methods": (), "training": SETTINGS, "start": start} | changes)


def finished(config: RunConfig, root: Path) -> Run:
    outcome = execute(config, root)
    assert outcome.status == "finished", outcome.error
    run = load_run(root / "runs" / config.id)
    assert run is not None
    return run


def test_continuing_trains_the_checkpoint(tmp_path: Path) -> None:
    config = from_checkpoint(write_checkpoint(tmp_path))
    run = finished(config, tmp_path)
    dataset = data.load("digits", first=160)
    model = models.create("mlp", dataset.shape, 10, seed=0, widths=[16])
    model.load_state_dict(torch.load(tmp_path / "old.pt"))
    assert run.records[0]["entry_test_accuracy"] == evaluate(model, dataset.test)[0]
    plain = list(train(Learner(model, SETTINGS), streams.create("single", dataset, 0, epochs=2), seed=0))
    assert [record["test_accuracy"] for record in run.records] == [record["test_accuracy"] for record in plain]
    assert [record["loss"] for record in run.records] == [record["loss"] for record in plain]


def test_a_method_acts_once_with_initial_values_of_an_untrained_network(tmp_path: Path) -> None:
    config = from_checkpoint(write_checkpoint(tmp_path), methods=(Part("shrink_perturb", {"lam": 0.25}),))
    run = finished(config, tmp_path)
    assert [len(record["receipts"]) for record in run.records] == [1, 0]
    dataset = data.load("digits", first=160)
    model = models.create("mlp", dataset.shape, 10, seed=0, widths=[16])
    old = torch.load(tmp_path / "old.pt")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.lerp(old[name], parameter, 0.25))
    plain = list(train(Learner(model, SETTINGS), streams.create("single", dataset, 0, epochs=2), seed=0))
    assert [record["loss"] for record in run.records] == [record["loss"] for record in plain]


def test_fresh_ignores_the_checkpoint(tmp_path: Path) -> None:
    config = from_checkpoint(write_checkpoint(tmp_path), fresh=True)
    without = replace(config, start=None)
    from_start, plain = finished(config, tmp_path), finished(without, tmp_path)
    assert [each["loss"] for each in from_start.records] == [each["loss"] for each in plain.records]


@pytest.mark.parametrize("methods", [(Part("swr", {"lam": 0.01}),), (Part("l2_init"), Part("head_reset"))])
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, methods: tuple[Part, ...]) -> None:
    checkpoint = write_checkpoint(tmp_path)
    single = Part("single", {"epochs": 4})
    network = write_waiting_network(tmp_path, step=25)  # in the third epoch of ten steps
    config = from_checkpoint(
        checkpoint, methods=methods, model=network, stream=single, old_data=Part("digits", {"first": 50})
    )
    interrupt(config, tmp_path)
    assert execute(config, tmp_path).status == "finished"
    assert events(tmp_path, config) == ["start", "start", "resume", "end"]
    assert execute(config, tmp_path / "whole").status == "finished"
    assert outputs(tmp_path, config) == outputs(tmp_path / "whole", config)


def test_another_content_of_the_file_is_another_run(tmp_path: Path) -> None:
    before = from_checkpoint(write_checkpoint(tmp_path))
    after = from_checkpoint(write_checkpoint(tmp_path, scale=2.0))
    assert before.id != after.id
    outcome = execute(before, tmp_path)
    assert outcome.status == "failed"
    assert "has changed since these runs were asked for" in outcome.error


def test_configurations_without_a_start_keep_their_ids(tmp_path: Path) -> None:
    assert '"start"' not in small().to_json()
    assert '"old_data"' not in small().to_json()
    config = from_checkpoint(write_checkpoint(tmp_path), old_data=Part("digits"))
    assert RunConfig.from_dict(json.loads(config.to_json())) == config


VALUES: dict[str, Any] = {"data": "digits", "model": {"name": "mlp", "widths": [16]}, "stream": "single"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": "absent.pt"}, r"^start: there is no file 'absent.pt'"),
        ({"start": 3}, r"^start is 3"),
        ({"methods": ["crelu"]}, "crelu changes the network, which the checkpoint then does not fit"),
        ({"methods": ["hare_tortoise"]}, "its average would start at an untrained network"),
        ({"old_data": "nowhere"}, "'nowhere' is neither a data set nor a path"),
    ],
)
def test_wrong_recipes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path)
    with pytest.raises(RecipeError, match=message):
        make_recipe({**VALUES, "methods": ["vanilla"], "start": "old.pt", **changes})


def compare(folder: Path, **changes: Any) -> pliant.ComparisonResult:
    values = {**VALUES, "start": folder / "old.pt", "stream": {"name": "single", "epochs": 1}, **changes}
    return pliant.compare(["vanilla"], seeds=1, workers=1, progress=False, out=folder / "out", **values)


def test_a_checkpoint_that_does_not_fit_is_refused_before_any_training(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"^'.*old.pt' does not fit the model: .*size mismatch"):
        compare(tmp_path, model={"name": "mlp", "widths": [24]})
    (tmp_path / "old.pt").write_text("not a checkpoint")
    with pytest.raises(ValueError, match=r"^'.*old.pt' "):
        compare(tmp_path)
    assert not (tmp_path / "out").exists()


def write_npz(path: Path, classes: int = 10, size: int = 8) -> Path:
    y = numpy.arange(40) % classes
    x = numpy.random.default_rng(0).integers(256, size=(40, 1, size, size), dtype=numpy.uint8)
    numpy.savez(path, x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    return path


def test_old_data_must_have_inputs_and_classes_of_the_new(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(
        ValueError, match=r"old_data: inputs of small are .* \(1, 6, 6\), inputs of digits .* \(1, 8, 8\)"
    ):
        compare(tmp_path, old_data=write_npz(tmp_path / "small.npz", size=6))
    with pytest.raises(ValueError, match="has a class '10' that digits does not have"):
        compare(tmp_path, old_data=write_npz(tmp_path / "more.npz", classes=11))


def test_old_labels_are_matched_by_the_names_of_classes(tmp_path: Path) -> None:
    def images(names: list[str]) -> data.Dataset:
        x = torch.randint(256, (8, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(names)))
        y = torch.arange(8) % len(names)
        return data.from_tensors("made", (x, y), (x, y), tuple(names))

    new, old = images(["ant", "bee", "cat"]), images(["bee", "cat"])
    config = small(old_data=Part("digits"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda name, **options: old)
        examples = load_old_test(config, streams.create("single", new, 0))
    assert examples is not None
    assert examples.y.tolist() == [1, 2] * 4
    # The network sees old images scaled like the new ones.
    assert torch.equal(examples.batch(torch.arange(8))[0], replace(new.test, x=old.test.x).batch(torch.arange(8))[0])


def make_state(learner: Learner) -> dict[str, Any]:
    return {"model": learner.model.state_dict(), "optimizer": learner.optimizer.state_dict()}


@pytest.mark.parametrize("optimizer", [{"optimizer": "adam"}, {"optimizer": "sgd", "momentum": 0.9}], ids=str)
def test_optimizer_state_is_loaded_if_asked(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    """Training that was split in two by a checkpoint of network and optimizer goes on as one."""
    settings = Settings(batch_size=16, **optimizer)
    dataset = data.load("digits", first=160)
    model = models.create("mlp", dataset.shape, 10, seed=0, widths=[16])
    learner = Learner(model, settings)
    list(train(learner, streams.create("single", dataset, 0, epochs=1), seed=5))
    torch.save(make_state(learner), tmp_path / "old.pt")
    start = Start(str(tmp_path / "old.pt"), digest_file(tmp_path / "old.pt"), optimizer="optimizer")
    config = from_checkpoint(tmp_path / "old.pt", training=settings, start=start)
    run = finished(config, tmp_path)
    learner.task = 0  # the same network and optimizer go on
    again = list(train(learner, streams.create("single", dataset, 0, epochs=2), seed=0))
    assert [record["loss"] for record in run.records] == [record["loss"] for record in again]
    without = finished(replace(config, start=replace(start, optimizer="")), tmp_path)
    assert without.records[0]["loss"] != run.records[0]["loss"]


def test_optimizer_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    dataset = data.load("digits", first=160)

    def try_state(settings: Settings, widths: list[int], key: str = "optimizer") -> None:
        learner = Learner(models.create("mlp", dataset.shape, 10, widths=widths), settings)
        list(train(learner, streams.create("single", dataset, 0, epochs=1), seed=0))
        path = write_checkpoint(tmp_path, optimizer=learner.optimizer.state_dict())
        start = Start(str(path), digest_file(path), optimizer=key)
        config = from_checkpoint(path, start=start)
        make_learner(config, make_stream(config))

    try_state(Settings(), [16])
    with pytest.raises(ValueError, match="holds momentum_buffer: it is not the state of Adam"):
        try_state(Settings(optimizer="sgd", momentum=0.9), [16])
    with pytest.raises(ValueError, match=r"under 'optimizer' of .* belongs to another network"):
        try_state(Settings(), [8])
    with pytest.raises(ValueError, match=r"holds no optimizer state under 'adam'; save optimizer.state_dict\(\) there"):
        try_state(Settings(), [16], key="adam")


def test_old_accuracy_is_recorded_at_the_start_and_at_every_evaluation(tmp_path: Path) -> None:
    config = from_checkpoint(write_checkpoint(tmp_path), old_data=Part("digits", {"first": 20}))
    run = finished(config, tmp_path)
    assert run.records[0]["entry_old_test_accuracy"] == run.records[0]["entry_test_accuracy"]
    for record in run.records:
        assert record["old_test_accuracy"] == record["test_accuracy"]
    assert run.result["final_old_test_accuracy"] == run.records[-1]["old_test_accuracy"]


def test_tensors_of_the_checkpoint_are_not_shared(tmp_path: Path) -> None:
    config = from_checkpoint(write_checkpoint(tmp_path))
    first, second = (make_learner(config, make_stream(config)) for _ in range(2))
    parameters: list[Tensor] = list(first.model.parameters())
    with torch.no_grad():
        parameters[0].zero_()
    assert not torch.equal(parameters[0], next(second.model.parameters()))


def test_examples_that_the_checkpoint_has_learned_neither_choose_nor_test(tmp_path: Path) -> None:
    digits = data.load("digits")
    old = tmp_path / "old.npz"
    known = torch.cat([digits.train.x[:100], digits.test.x[:200]])
    numpy.savez(old, x_train=known.numpy(), y_train=torch.cat([digits.train.y[:100], digits.test.y[:200]]).numpy(),
                x_test=digits.test.x[:50].numpy(), y_test=digits.test.y[:50].numpy())  # fmt: skip
    config = from_checkpoint(write_checkpoint(tmp_path), old_data=Part(str(old)))
    whole = data.load(config.data.name, **config.data.options)
    stream = make_stream(config)
    assert len(stream.dataset.test) == len(whole.test) - 200
    assert len(stream.dataset.train) == len(whole.train)
    choosing = make_stream(replace(config, purpose="selection", holdout=0.2))
    assert len(choosing.dataset.test) > 0
    assert not choosing.dataset.test.are_in(data.load(str(old)).train).any()
    numpy.savez(old, x_train=digits.test.x.numpy(), y_train=digits.test.y.numpy(),
                x_test=digits.test.x[:50].numpy(), y_test=digits.test.y[:50].numpy())  # fmt: skip
    with pytest.raises(ValueError, match="old_data: all test examples of digits are training examples of old"):
        make_stream(config)
