"""Head reset: re-draw the last layers when data is new (Nikishin et al. 2022; SWR paper, D.2).

The head is the fully connected tail of a convolutional network, or the last layer of a fully connected network. If a
fully connected network has several heads, such as an actor's mean and deviation or twin critics, it is the last layer
of each.
"""

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from pliant._validation import check_modules
from pliant.anatomy.layers import called_layers, classifier_names
from pliant.methods._core.filters import learnable_parameters
from pliant.methods._core.initial import Init, bare_modules
from pliant.methods._core.reinitializer import OptimizerState, Steps
from pliant.methods.full_reset import FullReset


def find_head(model: nn.Module, example: Any) -> tuple[str, ...]:
    """Return the names of the head's layers, in order of their calls.

    Args:
        model: The model.
        example: An example input: a tensor, a tuple of arguments or a dictionary of keyword arguments.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
        >>> find_head(model, torch.zeros(1, 1, 4, 4))
        ('2', '4')
    """
    return tuple(classifier_names(called_layers(model, example)))


class HeadReset(FullReset):
    """Re-draw the head from its initial distribution, on `apply()`.

    Args:
        model: The model.
        example: An example input, on which `find_head` finds the head. Not needed if `head` is given.
        head: The names of the head's modules.
        optimizer_state: "reset" (default) or "keep" the moments of the head.
        init: A function that initializes the model in place, run after every module's own `reset_parameters`.
        seed: The seed of a private random stream. None draws from torch's global generators.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.
    """

    name = "head_reset"

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        head: Sequence[str] | None = None,
        optimizer_state: OptimizerState = "reset",
        init: Init | None = None,
        seed: int | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        learnable_parameters(model)  # rejects unsuitable parameters before the model is called
        if head is None:
            if example is None:
                raise ValueError("example: None, and head is not given; pass an example input or head=[module names]")
            head = find_head(model, example)
        self.head = check_modules("head", model, head)
        ours = {id(p) for name in self.head for p in model.get_submodule(name).parameters()}
        _check_not_tied(model, self.head, ours)
        names = {name for name, p in model.named_parameters() if id(p) in ours}
        super().__init__(
            model,
            optimizer_state=optimizer_state,
            init=init,
            seed=seed,
            where=lambda name, _: name in names,
            at=at,
            every=every,
        )
        self._bare = bare_modules(model, self.head)


def _check_not_tied(model: nn.Module, head: Sequence[str], parameters: Collection[int]) -> None:
    """Raise a ValueError if a module outside the head holds a parameter of the head, as an embedding may."""
    for name, module in model.named_modules():
        inside = any(name == top or name.startswith(top + ".") for top in head)
        if not inside and any(id(p) in parameters for p in module.parameters(recurse=False)):
            raise ValueError(
                f"head: {', '.join(head)} shares a parameter with {name!r}, which a reset would draw again too; "
                "name other modules with head=[module names], or untie the weights"
            )
