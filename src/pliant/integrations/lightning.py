"""A callback for Lightning's Trainer, with automatic or manual optimization.

    Trainer(..., callbacks=[PliantCallback(lambda module: [pliant.L2Init(module.net)])])

Methods are made on the LightningModule when fitting begins, and each is attached to all optimizers that train some of
its parameters. Their state is part of every checkpoint that Lightning writes, like any callback's state.

With DistributedDataParallel, every process runs the callback and the replicas stay bit-equal.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pliant._importing import naming_extra
from pliant._step_hooks import unwrap_optimizer
from pliant.diagnostics import Monitor
from pliant.integrations._methods import (
    ActionTimes,
    attach_to_holders,
    load_states,
    name_methods,
    refuse_architecture,
    states_of,
)
from pliant.methods import Method, Receipt

with naming_extra("pliant.integrations.lightning", "lightning"):
    from lightning.pytorch import Callback


__all__ = ["PliantCallback"]


class PliantCallback(Callback):  # type: ignore[misc]
    """Makes methods for the module, attaches them, saves their state, and lets reinitializers act.

    Methods act only while `fit()` runs.

    Args:
        make: `make(module)` returns the methods. It is called when fitting begins, once for each module.
        at: When reinitializers act: integers are batches of training, floats are epochs. They act after that batch,
            before a checkpoint at the same batch.
        monitor: Settings of a `pliant.Monitor`, such as `{"every": 100, "probe": batch}`. It watches the first
            optimizer. Its values go to `LightningModule.log` under `pliant/`.

    Attributes:
        methods: The methods by name.
        monitor: The monitor, once fitting has begun.
        receipts: The receipts of reinitializers, each with the number of batches before it.
    """

    def __init__(
        self,
        make: Callable[[Any], Method | Iterable[Method]],
        at: Sequence[float] | float | None = None,
        monitor: Mapping[str, Any] | None = None,
    ) -> None:
        self.make = make
        self.methods: dict[str, Method] = {}
        self.monitor: Monitor | None = None
        self.receipts: list[tuple[int, Receipt]] = []
        self._times = ActionTimes(at)
        self._monitor_settings = monitor
        self._module: nn.Module | None = None
        self._optimizers: list[Optimizer] = []
        self._batches = 0
        self._logged = 0
        self._loaded: dict[str, Any] | None = None

    def on_new_data(self, batches: Any = None, loss_fn: Any = None) -> list[Receipt]:
        """Let all reinitializers act now.

        Args:
            batches: The new data, for methods that look at it.
            loss_fn: The loss of an output and a target, for methods that look at gradients.

        Returns:
            What they did.
        """
        if self._module is None:
            raise ValueError("on_new_data: there is no module yet; call it after fit() has begun, or pass at=[0]")
        chosen = [method for method in self.methods.values() if method.acts_on_new_data]
        receipts = [method.apply(*self._optimizers, batches=batches, loss_fn=loss_fn) for method in chosen]
        self.receipts += [(self._batches, receipt) for receipt in receipts]
        return receipts

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make methods and monitor, load their state if fitting resumes, and attach them."""
        self._optimizers = [unwrap_optimizer(optimizer) for optimizer in trainer.optimizers]
        if pl_module is not self._module:
            self._module = pl_module
            self.methods = name_methods(self.make(pl_module))
            refuse_architecture(self.methods)
            self.monitor = None
        for method in self.methods.values():
            attach_to_holders(method, self._optimizers)
        if self._monitor_settings is not None and self.monitor is None:
            self.monitor = Monitor(pl_module, self._optimizers[0], **self._monitor_settings)
        elif self.monitor is not None:
            self.monitor.attach(self._optimizers[0])
        self._batches = trainer.fit_loop.total_batch_idx + 1
        self._times.start(self._batches, float(trainer.current_epoch))
        if self._loaded is not None:
            saved, self._loaded = self._loaded, None
            load_states(self.methods, saved["methods"])
            self._times.load_state(saved["times"])
            if self.monitor is not None and saved["monitor"] is not None:
                self.monitor.load_state_dict(saved["monitor"])
        self._logged = 0 if self.monitor is None else len(self.monitor.records)
        if self._times.due(self._batches, float(trainer.current_epoch)):
            self.on_new_data()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Let reinitializers act if it is time, and log what the monitor found."""
        self._batches = trainer.fit_loop.total_batch_idx + 1
        epoch = trainer.current_epoch + (batch_idx + 1) / trainer.num_training_batches
        if self._times.due(self._batches, epoch):
            self.on_new_data()
        if self.monitor is not None and len(self.monitor.records) > self._logged:
            self._logged = len(self.monitor.records)
            for key, value in self.monitor.records[-1].values.items():
                pl_module.log(f"pliant/{key}", value)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach the methods and the monitor."""
        for method in self.methods.values():
            method.detach()
        if self.monitor is not None:
            self.monitor.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {
            "methods": states_of(self.methods),
            "times": self._times.state(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until the methods are made."""
        self._loaded = state_dict
