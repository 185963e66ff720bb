"""The callback in the real Trainer: checkpoints, accumulation, clipping, bf16, compile, several processes, reports."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, TrainerCallback, TrainerControl, TrainerState

import pliant
from pliant.integrations.transformers import PliantCallback
from tests.integrations.language_models import IDS, MODELS, gpt2, llama, trainer

EXAMPLE = {"input_ids": IDS[:2]}


def several(model: nn.Module) -> list[pliant.Method]:
    gated = isinstance(model, LlamaForCausalLM)
    return [
        pliant.L2Init(model, lam=1e-2),
        pliant.SpectralRegularization(model, lam=1e-2),
        *([] if gated else [pliant.ReDo(model, EXAMPLE, every=3, tau=0.9)]),
        pliant.HareTortoise(model, every=5),
        pliant.ShrinkPerturb(model, seed=0),
    ]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}, {"bf16": True}])
def test_resume_from_a_checkpoint_is_bit_equal(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    keep = {"save_strategy": "steps", "save_steps": 4}

    def callback() -> PliantCallback:
        return PliantCallback(several, at=[2, 6], monitor={"every": 3, "budget": None})

    whole = callback()
    trained = trainer(MODELS[name](), tmp_path / "whole", whole, **settings, **keep)
    trained.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "elsewhere" / "checkpoint-4")
    again = callback()
    resumed = trainer(MODELS[name](), tmp_path / "elsewhere", again, **settings, **keep)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(trained.model), weights(resumed.model))
    assert [step for step, _ in whole.receipts] == [2, 6]
    assert [step for step, _ in again.receipts] == [6]
    assert whole.monitor is not None
    assert again.monitor is not None
    assert whole.monitor.to_dict() == again.monitor.to_dict()
    for key, method in whole.methods.items():
        assert method.steps == again.methods[key].steps
        assert not method.optimizers


def test_the_same_as_a_method_attached_by_hand(tmp_path: Path) -> None:
    """A penalty through the callback equals the same penalty attached to the Trainer's optimizer."""

    class ByHand(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.method = pliant.L2Init(kwargs["model"], lam=0.1).attach(kwargs["optimizer"].optimizer)

    results = []
    for callback in (PliantCallback(lambda model: pliant.L2Init(model, lam=0.1)), ByHand(), None):
        run = trainer(gpt2(), tmp_path, *([callback] if callback else []))
        run.train()
        results.append(weights(run.model))
    assert_equal(results[0], results[1])
    assert not all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def test_attach_unwraps_the_optimizer_of_accelerate(tmp_path: Path) -> None:
    found = []

    class Wrapped(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.method = pliant.L2(kwargs["model"]).attach(kwargs["optimizer"])
            found.append((kwargs["optimizer"], self.method.optimizers))
            pliant.FIRE(kwargs["model"]).apply(kwargs["optimizer"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.method.detach(kwargs["optimizer"])

    callback = Wrapped()
    trainer(gpt2(), tmp_path, callback).train()
    ((wrapper, attached),) = found
    assert attached == (wrapper.optimizer,)
    assert sum(callback.method.steps) == 8
    assert callback.method.optimizers == ()


def test_steps_are_counted_once_for_each_accumulated_batch(tmp_path: Path) -> None:
    callback = PliantCallback(lambda model: [pliant.L2Init(model)])
    trainer(gpt2(), tmp_path, callback, gradient_accumulation_steps=3, max_steps=4).train()
    assert callback.methods["l2_init"].steps == [4]


@pytest.mark.parametrize(("at", "steps"), [([0], [0]), ([2, 5], [2, 5]), ([1.0], [6]), ([0.5, 7], [3, 7]), (3, [3])])
def test_reinitializers_act_at_steps_and_epochs(at: Any, steps: list[int], tmp_path: Path) -> None:
    callback = PliantCallback(lambda model: [pliant.FIRE(model)], at=at)
    trainer(gpt2(), tmp_path, callback).train()  # six steps are an epoch
    assert [step for step, _ in callback.receipts] == steps
    assert all(receipt.entries for _, receipt in callback.receipts)


def test_model_init_makes_new_methods_for_each_model(tmp_path: Path) -> None:
    made = []

    def make(model: nn.Module) -> list[pliant.Method]:
        made.append(model)
        return [pliant.L2Init(model)]

    run = trainer(None, tmp_path, PliantCallback(make), model_init=gpt2, max_steps=2)
    run.train()
    run.train()
    assert len({id(model) for model in made}) == 2


def test_a_second_train_continues_with_the_same_methods(tmp_path: Path) -> None:
    callback = PliantCallback(lambda model: [pliant.L2Init(model)])
    run = trainer(gpt2(), tmp_path, callback, max_steps=2)
    run.train()
    method = callback.methods["l2_init"]
    run.train()
    assert callback.methods["l2_init"] is method
    assert method.steps == [4]


def test_on_new_data_by_hand(tmp_path: Path) -> None:
    callback = PliantCallback(lambda model: [pliant.DASH(model), pliant.L2(model)])
    with pytest.raises(ValueError, match="there is no model yet"):
        callback.on_new_data()
    run = trainer(gpt2(), tmp_path, callback, max_steps=2)
    run.train()
    (receipt,) = callback.on_new_data(
        batches=[({"input_ids": IDS[:4]}, IDS[:4])],
        loss_fn=lambda output, ids: nn.functional.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ),
    )
    assert receipt.method == "dash"


def test_torch_compile(tmp_path: Path) -> None:
    callback = PliantCallback(lambda model: [pliant.L2Init(model, lam=0.1)], at=[1])
    plain = PliantCallback(lambda model: [pliant.L2Init(model, lam=0.1)], at=[1])
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    runs = [  # LLaMA has no dropout, which draws other numbers when it is compiled
        trainer(llama(), tmp_path, callback, max_steps=2, **compiled),
        trainer(llama(), tmp_path, plain, max_steps=2),
    ]
    for run in runs:
        run.train()
    assert callback.methods["l2_init"].steps == [2]
    for ours, theirs in zip(weights(runs[0].model), weights(runs[1].model), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_values_of_the_monitor_are_in_the_log_and_in_every_report(tmp_path: Path) -> None:
    reported: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            reported.append(dict(logs))

    callback = PliantCallback(lambda model: [], monitor={"every": 2, "budget": None, "measures": ["weight_l2"]})
    run = trainer(gpt2(), tmp_path, Reporter(), callback)  # the reporter comes first
    run.train()
    assert [entry["pliant/weight_l2"] for entry in reported if "loss" in entry]
    logged = [entry["pliant/weight_l2"] for entry in run.state.log_history if "pliant/weight_l2" in entry]
    assert len(logged) == 4
    assert callback.monitor is not None
    assert logged == [value for _, value in callback.monitor.to_dict()["weight_l2"]]


def test_a_loop_that_is_not_the_trainers_is_told_what_it_misses() -> None:
    callback = PliantCallback(lambda model: [], monitor={"every": 2, "measures": ["weight_l2"]})
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="not the loggers of report_to.* pass log="):
        callback.on_train_begin(None, TrainerState(), TrainerControl(), model=model, optimizer=optimizer)


def test_trackio_gets_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")  # read when it was imported
    callback = PliantCallback(lambda model: [], monitor={"every": 2, "budget": None, "measures": ["weight_l2"]})
    settings = {"report_to": ["trackio"], "max_steps": 4, "run_name": "run", "project": "pliant"}
    trainer(gpt2(), tmp_path, callback, **settings).train()
    logged = sqlite_storage.SQLiteStorage.get_logs("pliant", "run")
    values = [value for entry in logged for key, value in entry.items() if key.endswith("pliant/weight_l2")]
    assert callback.monitor is not None
    assert values == [value for _, value in callback.monitor.to_dict()["weight_l2"]]


def test_tensorboard_gets_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = PliantCallback(lambda model: [], monitor={"every": 2, "budget": None, "measures": ["weight_l2"]})
    trainer(gpt2(), tmp_path, callback, report_to=["tensorboard"], max_steps=4).train()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    (tag,) = [tag for tag in events.Tags()["scalars"] if tag.endswith("pliant/weight_l2")]
    assert callback.monitor is not None
    assert [event.value for event in events.Scalars(tag)] == pytest.approx(
        [value for _, value in callback.monitor.to_dict()["weight_l2"]]
    )


def test_a_checkpoint_without_methods_warns_of_nothing_and_starts_them_anew(tmp_path: Path) -> None:
    trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=4).train()
    callback = PliantCallback(lambda model: [pliant.L2Init(model)], at=[2])
    run = trainer(gpt2(), tmp_path, callback, max_steps=10)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert callback.methods["l2_init"].steps == [6]
    assert not callback.receipts  # step 2 is past


def test_a_checkpoint_resumes_without_the_callback(tmp_path: Path) -> None:
    callback = PliantCallback(lambda model: [pliant.L2Init(model)])
    trainer(gpt2(), tmp_path, callback, save_strategy="steps", save_steps=4).train()
    plain = trainer(gpt2(), tmp_path, save_strategy="steps", save_steps=2)
    plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert plain.state.global_step == plain.args.max_steps > 4


@pytest.mark.parametrize("at", [-1, "2", [True], float("nan"), [float("inf")]])
def test_times_out_of_range(at: Any) -> None:
    with pytest.raises(ValueError, match="it takes integers for steps and floats for epochs, from 0 on"):
        PliantCallback(lambda model: [], at=at)
