"""The callback in Lightning's Trainer: automatic and manual optimization, checkpoints, several optimizers, logs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pliant
from pliant.integrations.lightning import PliantCallback

GENERATOR = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(48, 6, generator=GENERATOR), torch.randint(3, (48,), generator=GENERATOR)
EXAMPLE = INPUTS[:2]


class Automatic(LightningModule):
    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.optimizer_class = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.optimizer_class(self.parameters(), lr=1e-2)


class Manual(Automatic):
    """Two optimizers, each of one half of the network, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(cross_entropy(self(batch[0]), batch[1]))
        first.step()
        if index % 2:
            second.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net[:2].parameters(), lr=1e-2),
            torch.optim.SGD(self.net[2:].parameters(), lr=0.1),
        ]


MODULES = {"automatic": Automatic, "manual": Manual}


def loader(size: int = 8, sampler: Any = None) -> DataLoader[Any]:
    return DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=size, sampler=sampler)


def fit(
    module: LightningModule,
    folder: Path,
    *callbacks: Any,
    path: Path | None = None,
    data: DataLoader[Any] | None = None,
    **settings: Any,
) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
    }
    trainer = Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**defaults, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers of the loader
        trainer.fit(module, data or loader(), ckpt_path=path)
    return trainer


def several(module: Any) -> list[pliant.Method]:
    return [
        pliant.L2Init(module.net, lam=1e-2),
        pliant.ReDo(module.net, EXAMPLE, every=3, tau=0.5, seed=0),  # Lightning saves no generators
        pliant.HareTortoise(module.net, every=4),
        pliant.FullReset(module.net, seed=1),
    ]


def weights(module: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def build(name: str) -> LightningModule:
    torch.manual_seed(0)
    return MODULES[name]()


@pytest.mark.parametrize("name", MODULES)
def test_resume_from_a_model_checkpoint_is_bit_equal(name: str, tmp_path: Path) -> None:
    settings = {"at": [2, 9], "monitor": {"every": 3, "budget": None}}
    whole, again = PliantCallback(several, **settings), PliantCallback(several, **settings)
    keep = ModelCheckpoint(tmp_path, filename="{step}-{epoch}", save_top_k=-1, every_n_epochs=1)
    trained, resumed = build(name), build(name)
    fit(trained, tmp_path, whole, keep)
    (path,) = tmp_path.glob("*epoch=0*.ckpt")
    fit(resumed, tmp_path, again, path=path)
    assert all(torch.equal(a, b) for a, b in zip(weights(trained), weights(resumed), strict=True))
    assert [step for step, _ in whole.receipts] == [2, 9]
    assert [step for step, _ in again.receipts] == [9]
    assert whole.monitor is not None
    assert again.monitor is not None
    assert whole.monitor.to_dict() == again.monitor.to_dict()
    for key, method in whole.methods.items():
        assert method.steps == again.methods[key].steps
        assert not method.optimizers


@pytest.mark.parametrize("name", MODULES)
def test_the_same_as_a_loop_by_hand(name: str, tmp_path: Path) -> None:
    module = build(name)
    callback = PliantCallback(lambda module: pliant.L2Init(module.net, lam=0.1))
    fit(module, tmp_path, callback, max_epochs=1)
    twin = build(name)
    made = twin.configure_optimizers()
    optimizers = made if isinstance(made, list) else [made]
    pliant.L2Init(twin.net, lam=0.1).attach(*optimizers)
    for index, (x, y) in enumerate(loader()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        cross_entropy(twin(x), y).backward()
        for number, optimizer in enumerate(optimizers):
            if number == 0 or index % 2:
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(twin), strict=True))


def test_closures_and_accumulation(tmp_path: Path) -> None:
    """Automatic optimization passes a closure to step, which zeroes and computes the gradients."""
    module = build("automatic")
    callback = PliantCallback(lambda module: pliant.L2Init(module.net, lam=0.1))
    fit(module, tmp_path, callback, accumulate_grad_batches=3, gradient_clip_val=0.1)
    assert callback.methods["l2_init"].steps == [4]


@pytest.mark.parametrize(("at", "batches"), [(0, [0]), ([3, 7], [3, 7]), ([1.0], [6]), ([0.5, 2.0], [3, 12])])
def test_reinitializers_act_at_batches_and_epochs(at: Any, batches: list[int], tmp_path: Path) -> None:
    callback = PliantCallback(lambda module: [pliant.FIRE(module.net)], at=at)
    fit(build("automatic"), tmp_path, callback)
    assert [batch for batch, _ in callback.receipts] == batches


def test_values_of_the_monitor_go_to_the_logger(tmp_path: Path) -> None:
    settings = {"every": 2, "budget": None, "measures": ["weight_l2", "dormant_fraction"], "probe": EXAMPLE}
    callback = PliantCallback(lambda module: [], monitor=settings)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit(build("automatic"), tmp_path, callback, logger=logger, log_every_n_steps=1)
    header = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0]
    assert {"pliant/weight_l2", "pliant/dormant_fraction"} <= set(header.split(","))


def test_attach_unwraps_the_optimizers_of_lightning(tmp_path: Path) -> None:
    attached = []

    class ByHand(Manual):
        def on_train_start(self) -> None:
            self.method = pliant.L2(self.net).attach(*self.optimizers())
            attached.append(self.method.optimizers)
            pliant.FIRE(self.net).apply(*self.optimizers())

    torch.manual_seed(0)
    module = ByHand()
    trainer = fit(module, tmp_path)
    assert attached == [tuple(trainer.optimizers)]


def test_bf16(tmp_path: Path) -> None:
    callback = PliantCallback(several, at=[3])
    fit(build("automatic"), tmp_path, callback, precision="bf16-mixed", max_epochs=1)
    assert callback.methods["l2_init"].steps == [6]


def test_a_second_fit_continues_with_the_same_methods(tmp_path: Path) -> None:
    callback, module = PliantCallback(lambda module: [pliant.L2Init(module.net)]), build("automatic")
    fit(module, tmp_path, callback, max_epochs=1)
    method = callback.methods["l2_init"]
    fit(module, tmp_path, callback, max_epochs=1)
    assert callback.methods["l2_init"] is method
    assert method.steps == [12]


def test_on_new_data_needs_a_module() -> None:
    with pytest.raises(ValueError, match="there is no module yet"):
        PliantCallback(lambda module: []).on_new_data()


def test_a_method_that_no_optimizer_trains(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no optimizer trains a parameter of the l2"):
        fit(build("automatic"), tmp_path, PliantCallback(lambda module: [pliant.L2(nn.Linear(2, 2))]))


def test_a_change_of_the_architecture_comes_too_late(tmp_path: Path) -> None:
    callback = PliantCallback(lambda module: [pliant.LayerNormInsertion(module.net, EXAMPLE)])
    with pytest.raises(
        ValueError, match=r"make: layer_norm changes the layers of the model, .* pass it to the Trainer"
    ):
        fit(build("automatic"), tmp_path, callback)
