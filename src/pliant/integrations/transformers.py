"""A callback for the Trainer of Hugging Face transformers.

    Trainer(..., callbacks=[PliantCallback(lambda model: [pliant.L2Init(model)])])

Methods are made on the unwrapped model when training begins, and attached to the optimizer inside Accelerate's wrapper.
Their state is saved within the optimizer's state, in the file `optimizer.pt` of each checkpoint: wherever Trainer
resumes from, optimizer and methods fit together.

With DistributedDataParallel, every process runs the callback and the replicas stay bit-equal.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._importing import naming_extra
from pliant._step_hooks import unwrap_optimizer
from pliant._warnings import warn_user
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

with naming_extra("pliant.integrations.transformers", "transformers"):
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler

KEY = "pliant"
"""The key of the methods' state in an optimizer's state."""


__all__ = ["PliantCallback"]


class PliantCallback(TrainerCallback):  # type: ignore[misc]
    """Makes methods for the model, attaches them, saves their state, and lets reinitializers act.

    Methods act only while `train()` runs.

    Args:
        make: `make(model)` returns the methods. It is called when training begins, once for each model.
        at: When reinitializers act: integers are optimizer steps, floats are epochs. They act after that step, before
            an evaluation or a checkpoint at the same step.
        monitor: Settings of a `pliant.Monitor`, such as `{"every": 100, "probe": batch}`. The values of its newest
            record are part of Trainer's next log under `pliant/`, and so reach whatever `report_to` names.

    Attributes:
        methods: The methods by name.
        monitor: The monitor, once training has begun.
        receipts: The receipts of reinitializers, each with the step.
    """

    def __init__(
        self,
        make: Callable[[nn.Module], Method | Iterable[Method]],
        at: Sequence[float] | float | None = None,
        monitor: Mapping[str, Any] | None = None,
    ) -> None:
        self.make = make
        self.methods: dict[str, Method] = {}
        self.monitor: Monitor | None = None
        self.receipts: list[tuple[int, Receipt]] = []
        self._times = ActionTimes(at)
        self._monitor_settings = monitor
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._step = 0
        self._logged = 0
        self._handle: RemovableHandle | None = None

    def on_new_data(self, batches: Any = None, loss_fn: Any = None) -> list[Receipt]:
        """Let all reinitializers act now.

        Args:
            batches: The new data, for methods that look at it.
            loss_fn: The loss of an output and a target, for methods that look at gradients.

        Returns:
            What they did.
        """
        if self._model is None or self._optimizer is None:
            raise ValueError("on_new_data: there is no model yet; call it after train() has begun, or pass at=[0]")
        chosen = [method for method in self.methods.values() if method.acts_on_new_data]
        receipts = [method.apply(self._optimizer, batches=batches, loss_fn=loss_fn) for method in chosen]
        self.receipts += [(self._step, receipt) for receipt in receipts]
        return receipts

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make methods and monitor, load their state if training resumes, and attach them."""
        self._optimizer = unwrap_optimizer(kwargs["optimizer"])
        if kwargs["model"] is not self._model:
            self._model = kwargs["model"]
            self.methods = name_methods(self.make(kwargs["model"]))
            refuse_architecture(self.methods)
            self.monitor = None
        for method in self.methods.values():
            attach_to_holders(method, [self._optimizer])
        if self._monitor_settings is not None and self.monitor is None:
            self.monitor = Monitor(kwargs["model"], self._optimizer, **self._monitor_settings)
        elif self.monitor is not None:
            self.monitor.attach(self._optimizer)
        self._times.start(state.global_step, state.epoch or 0.0)
        if (saved := self._optimizer.state.pop(KEY, None)) is not None:  # type: ignore[call-overload]
            load_states(self.methods, saved["methods"])
            self._times.load_state(saved["times"])
            if self.monitor is not None and saved["monitor"] is not None:
                self.monitor.load_state_dict(saved["monitor"])
        self._handle = self._optimizer.register_state_dict_post_hook(self._add_state)
        if self.monitor is not None:
            self._logged = len(self.monitor.records)
            self._go_first(sys._getframe(1).f_locals.get("self"))
        self._step = state.global_step
        if self._times.due(state.global_step, state.epoch or 0.0):
            self.on_new_data()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let reinitializers act if it is time."""
        self._step = state.global_step
        if self._times.due(state.global_step, state.epoch or 0.0):
            self.on_new_data()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the newest values of the monitor."""
        if self.monitor is None or logs is None or len(self.monitor.records) == self._logged:
            return
        self._logged = len(self.monitor.records)
        values = {f"{KEY}/{key}": value for key, value in self.monitor.records[-1].values.items()}
        logs.update(values)
        if state.log_history:
            state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the methods and the monitor."""
        for method in self.methods.values():
            method.detach()
        if self.monitor is not None:
            self.monitor.detach()
        if self._handle is not None:
            self._handle.remove()

    def _add_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add what a resumed run needs to the optimizer's state, when that is saved."""
        state_dict["state"][KEY] = {
            "methods": states_of(self.methods),
            "times": self._times.state(),
            "monitor": None if self.monitor is None else self.monitor.state_dict(),
        }

    def _go_first(self, handler: Any) -> None:
        """Move this callback to the front, so that its values are in the log before others report it.

        Trainer puts the callbacks of `report_to` before the user's, and tells no callback about the others. So the list
        comes from the handler that called `on_train_begin`.
        """
        if not (isinstance(handler, CallbackHandler) and self in handler.callbacks):
            warn_user(
                "the values of the monitor reach trainer.state.log_history, but not the loggers of report_to: the list "
                "of the Trainer's callbacks was not found; pass log= among the settings of the monitor instead"
            )
            return
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)
