"""Methods that change the architecture once, at construction, before the optimizer is created.

Such a method replaces modules and, where widths change, parameters. An optimizer or method that was created earlier
still holds the old parameters. So `attach()` refuses an optimizer that holds a replaced parameter, or that holds the
parameters of a layer but not those added to it.
"""

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from pliant.anatomy.units import Passage, UnitGroup
from pliant.distributed import splits_units
from pliant.methods._core.attachment import Attachment
from pliant.methods._core.filters import Filter, choose_units, learnable_parameters
from pliant.methods._core.method import Kind, Method, Receipt
from pliant.methods._core.on_ranks import Sharding
from pliant.running import call_with, eval_mode


class Architecture(Method):
    """A change of the model's layers, in place.

    Args:
        model: The model; it is changed at once.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), on which the units
            are found.
        where: After which layers, as a predicate on name and value of their weight; all if None.

    Attributes:
        changed: The layers after which the model was changed.
        skipped: The other layers, with the reason.
    """

    kind: ClassVar[Kind] = "architecture"
    sharding: Sharding = "never"

    def __init__(self, model: nn.Module, example: Any = None, *, where: Filter | None = None) -> None:
        learnable_parameters(model)  # raises before anything is changed
        places, self.skipped = self._find(model, example, where)
        self.changed: list[str] = []
        self._replaced: list[weakref.ref[nn.Parameter]] = []
        # Each added parameter, with a parameter of its layer that an optimizer of the layer holds.
        self._companions: dict[str, str] = {}
        self._tensors = self._entries = 0
        for name, place in places.items():
            self._change(model, place)
            self.changed.append(name)
        if example is not None:
            _check_runs(model, example, self.name, self.changed)
        super().__init__(model)

    def _find(self, model: nn.Module, example: Any, where: Filter | None) -> tuple[Mapping[str, Any], dict[str, str]]:
        """Return the layers to change by name, as `_change` takes them, and the reasons against the others."""
        groups, skipped = choose_units(
            self.name,
            model,
            example,
            where,
            partial(self._reason_against, model),
            f"{self.name} fits behind none of its layers",
        )
        return {group.name: group for group in groups}, skipped

    def _reason_against(self, model: nn.Module, group: UnitGroup) -> str | None:
        """Return why the model cannot be changed after a layer, or None if it can."""
        return None

    @abstractmethod
    def _change(self, model: nn.Module, place: Any) -> None:
        """Change the model after a layer."""

    def step(self) -> None:
        """Raise a TypeError: the method acts only at construction."""
        raise TypeError(f"{self.name} changed the model when it was made; there is nothing to do at a step")

    @property
    def receipt(self) -> Receipt:
        """The changed and skipped layers, and the numbers of new tensors and entries."""
        details = {"changed": self.changed, "skipped": self.skipped}
        return Receipt(self.name, "change layers", self._tensors, self._entries, details)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_replaced": []}

    def _replace_parameter(self, module: nn.Module, leaf: str, parameter: nn.Parameter) -> None:
        """Give a module a parameter of another shape."""
        self._replaced.append(weakref.ref(getattr(module, leaf)))
        setattr(module, leaf, parameter)
        self._count(parameter)

    def _count(self, parameter: nn.Parameter) -> None:
        self._tensors += 1
        self._entries += parameter.numel()

    def _match(self, optimizer: Optimizer) -> Attachment:
        replaced = [parameter for reference in self._replaced if (parameter := reference()) is not None]
        for group in optimizer.param_groups:
            if any(held is old for held in group["params"] for old in replaced):
                raise ValueError(
                    f"optimizers: this {type(optimizer).__name__} holds a parameter that {self.name} replaced; "
                    f"make the optimizer, and other methods, after {self.name}"
                )
        split = [name for name in self.changed if splits_units(self.model, f"{name}.weight")]
        if split:
            raise ValueError(
                f"model: parallelize_module splits the units of {split[0]!r} over the ranks, but {self.name} acts on "
                "all of them together; leave the layer out of the plan, or leave it out with where="
            )
        attachment = super()._match(optimizer)
        held = set(attachment.names)
        for made, beside in self._companions.items():
            if beside in held and made not in held and self.parameters[made].requires_grad:
                raise ValueError(
                    f"optimizers: this {type(optimizer).__name__} holds {beside!r} but not {made!r}, which {self.name} "
                    f"made; make the optimizer, and other methods, after {self.name}"
                )
        return attachment


def replaceable(model: nn.Module, passage: Passage) -> bool:
    """Return whether the call is the only one of its module, so that replacing the module replaces the call."""
    module = model.get_submodule(passage.module)
    return passage.alone and passage.module != "" and next(module.children(), None) is None


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace a module; the new one gets the training mode of the old one."""
    parent, _, leaf = path.rpartition(".")
    module.train(model.get_submodule(path).training)
    setattr(model.get_submodule(parent), leaf, module)


def _check_runs(model: nn.Module, example: Any, name: str, changed: list[str]) -> None:
    """Call the changed model, because sizes that are hard-coded in forward() show only then."""
    try:
        with eval_mode(model), torch.no_grad():
            call_with(model, example)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"model: with {name} behind {', '.join(changed)} the model does not run ({reason}): its forward() probably "
            "has sizes as numbers, as in view(-1, 256). Leave these layers out with `where`, and build the model "
            "again, since this one is changed"
        ) from error
