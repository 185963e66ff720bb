"""What the callbacks share: methods by name, their saved state, and when reinitializers act."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from pliant._warnings import warn_user
from pliant.methods import Method


def name_methods(made: Any, prefix: str = "") -> dict[str, Method]:
    """Return methods by name, with a number behind a repeated name.

    Args:
        made: What the user's `make` returned: a method, or several.
        prefix: Put before each name.

    Raises:
        TypeError: If `make` returned something else.
    """
    methods = [made] if isinstance(made, Method) else list(made) if isinstance(made, Iterable) else [made]
    if not all(isinstance(each, Method) for each in methods):
        raise TypeError(f"make: it must return methods, such as [pliant.L2Init(model)], got {made!r}")
    named: dict[str, Method] = {}
    for method in methods:
        repeats = sum(other.name == method.name for other in named.values())
        named[f"{prefix}{method.name}{f'.{repeats + 1}' if repeats else ''}"] = method
    return named


def attach_to_holders(method: Method, optimizers: Sequence[Optimizer]) -> None:
    """Attach a method to each optimizer that trains some of its parameters.

    A change of the architecture is done when it is made, and has nothing to attach.

    Raises:
        ValueError: If no optimizer does.
    """
    if method.kind == "architecture":
        return
    own = {id(parameter) for parameter in method.parameters.values()}
    holders = [each for each in optimizers if any(id(p) in own for g in each.param_groups for p in g["params"])]
    if not holders:
        raise ValueError(f"make: no optimizer trains a parameter of the {method.name} that it returned")
    attached = set(map(id, method.optimizers))
    if missing := [each for each in holders if id(each) not in attached]:
        method.attach(*missing)


def refuse_architecture(methods: Mapping[str, Method]) -> None:
    """Raise a ValueError if a method changed the layers of a model whose optimizer exists already."""
    for method in methods.values():
        if method.kind == "architecture":
            raise ValueError(
                f"make: {method.name} changes the layers of the model, but the optimizer holds the old ones; build the "
                f"model, make {method.name} on it, and then pass it to the Trainer"
            )


def states_of(methods: Mapping[str, Method]) -> dict[str, Any]:
    """Return the state of each method, copied to the CPU."""
    states = {name: method.state_dict() for name, method in methods.items()}
    copied: dict[str, Any] = tree_map(lambda x: x.detach().cpu().clone() if isinstance(x, Tensor) else x, states)
    return copied


@torch.no_grad()
def load_states(methods: Mapping[str, Method], states: Mapping[str, Any]) -> None:
    """Load the saved state of each method that has one, and warn of every difference."""
    for name, method in methods.items():
        if name in states:
            method.load_state_dict(states[name])
    if missing := sorted(methods.keys() - states.keys()):
        warn_user(f"the checkpoint has no state of {', '.join(missing)}: these methods start from the present weights")
    if unused := sorted(states.keys() - methods.keys()):
        warn_user(f"the checkpoint's state of {', '.join(unused)} is not used: make returned no such method")


def _listed(at: Any) -> tuple[Any, ...]:
    return () if at is None else (at,) if isinstance(at, Real | str) else tuple(at)


def check_times(at: Sequence[float] | float | None, *, whole: str, fraction: str) -> tuple[float, ...]:
    """Return the times at which reinitializers act, sorted.

    Args:
        at: One or more; integers count from 0, floats lie between 0 and 1.
        whole: What an integer counts, for the error.
        fraction: What a float is a fraction of, for the error.
    """
    times = _listed(at)
    for time in times:
        is_whole = isinstance(time, int) and not isinstance(time, bool) and time >= 0
        if not (is_whole or (isinstance(time, float) and 0 < time < 1)):
            raise ValueError(f"at: {time!r}; it takes {whole} from 0 on, or fractions of {fraction} between 0 and 1")
    return tuple(sorted(times))


class ActionTimes:
    """Says when reinitializers act, given in steps or epochs.

    Args:
        at: One or more times: integers are optimizer steps, floats are epochs.
    """

    def __init__(self, at: Sequence[float] | float | None) -> None:
        times = _listed(at)
        for time in times:
            number = isinstance(time, Integral | float) and not isinstance(time, bool)
            if not (number and 0 <= time < math.inf):
                raise ValueError(f"at: {time!r}; it takes integers for steps and floats for epochs, from 0 on")
        self._steps = [int(time) for time in times if isinstance(time, Integral)]
        self._epochs = [float(time) for time in times if not isinstance(time, Integral)]
        self._last = (-1, -1.0)

    def start(self, step: int, epoch: float) -> None:
        """Begin at a step; what lies before it is past."""
        self._last = (step - 1, epoch - 1e-6) if step else (-1, -1.0)

    def due(self, step: int, epoch: float) -> bool:
        """Say whether a time has come since the last call."""
        epoch += 1e-6  # it is computed as a fraction
        passed = any(self._last[0] < time <= step for time in self._steps)
        passed |= any(self._last[1] < time <= epoch for time in self._epochs)
        self._last = (step, epoch)
        return passed

    def state(self) -> list[float]:
        """Return what a resumed run needs."""
        return list(self._last)

    def load_state(self, state: Sequence[float]) -> None:
        """Restore what `state` returned."""
        self._last = (int(state[0]), float(state[1]))
