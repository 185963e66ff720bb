"""One frozen record a method: what drives its tests, the command line's listing and the docs."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from pliant.methods.base import Kind, Method
from pliant.methods.fire import FIRE
from pliant.methods.l2 import L2
from pliant.methods.l2_init import L2Init
from pliant.methods.resets import FullReset, HeadReset
from pliant.methods.shrink_perturb import ShrinkPerturb
from pliant.methods.swr import SWR
from pliant.spelling import suggest


@dataclass(frozen=True)
class Tunable:
    """A setting of a method that is worth tuning.

    Attributes:
        name: The keyword.
        meaning: What it does, in a few words.
        default: Its default.
        low: The smallest value that makes sense.
        high: The largest value that makes sense; None if there is no bound.
        sweep: The values that the sources sweep.
    """

    name: str
    meaning: str
    default: float | None
    low: float
    high: float | None
    sweep: tuple[float, ...] = ()


@dataclass(frozen=True)
class MethodInfo:
    """What there is to know of a method.

    Attributes:
        name: The name in the registry, on the command line and in recipes.
        cls: The class.
        paper: Where it comes from.
        summary: What it does, in a sentence.
        tunables: What to tune.
    """

    name: str
    cls: type[Method]
    paper: str
    summary: str
    tunables: tuple[Tunable, ...] = ()

    @property
    def kind(self) -> Kind:
        """When the method acts."""
        return self.cls.kind


_TENS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)

_RECORDS = (
    MethodInfo(
        "swr",
        SWR,
        "Soft weight rescaling (2024), §3",
        "pull each weight's norm towards its initial norm after every step, keeping the function",
        (
            Tunable("lam", "how far towards the initial norm, each step", 1e-3, 0.0, 1.0, (1.0, *_TENS[:-1])),
            Tunable("lam_classifier", "the same for the classifier", None, 0.0, 1.0, (1.0, *_TENS[:-1])),
        ),
    ),
    MethodInfo(
        "l2",
        L2,
        "Krogh & Hertz 1991",
        "λ/2 ‖θ‖² in the loss",
        (Tunable("lam", "strength of the pull towards zero", 1e-4, 0.0, None, _TENS),),
    ),
    MethodInfo(
        "l2_init",
        L2Init,
        "Kumar et al. 2023",
        "λ/2 ‖θ − θ₀‖² in the loss",
        (Tunable("lam", "strength of the pull towards the initial values", 1e-4, 0.0, None, _TENS),),
    ),
    MethodInfo(
        "shrink_perturb",
        ShrinkPerturb,
        "Ash & Adams 2020",
        "move all weights part of the way back to their initial values when data is new",
        (Tunable("lam", "how much of the old weights to give up", 0.4, 0.0, 1.0, (0.2, 0.4, 0.6, 0.8)),),
    ),
    MethodInfo(
        "head_reset",
        HeadReset,
        "Nikishin et al. 2022",
        "re-draw the fully connected tail when data is new",
    ),
    MethodInfo(
        "full_reset",
        FullReset,
        "FIRE (2026), §4",
        "re-draw the whole network when data is new: training from scratch",
    ),
    MethodInfo(
        "fire",
        FIRE,
        "FIRE (2026), §3",
        "replace weights by the nearest isometries when data is new",
        (
            Tunable("lam", "how far towards the isometry", 1.0, 0.0, 1.0),
            Tunable("iterations", "Newton–Schulz iterations", 10, 1, None, (5, 10)),
        ),
    ),
)

_BY_NAME = {record.name: record for record in _RECORDS}

CONTEXT = ("example", "seed")
"""What `create` takes for any method and passes on only to those that want it."""


def names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(_BY_NAME)


def info(name: str) -> MethodInfo:
    """Return the record of a method.

    Raises:
        ValueError: If there is none of that name; says which is the nearest.
    """
    if name not in _BY_NAME:
        raise ValueError(f"name: there is no method {name!r}; {suggest(name, names())}")
    return _BY_NAME[name]


def create(name: str, model: nn.Module, **settings: Any) -> Method:
    """Make a method by name.

    Args:
        name: One of `names()`.
        model: The model.
        settings: The method's own keyword arguments; `example` and `seed` may be given to any method and are dropped
            where they are not wanted.

    Returns:
        The method, not attached yet.

    Raises:
        ValueError: If the method or a setting is unknown.

    Example:
        >>> import torch
        >>> create("l2", torch.nn.Linear(2, 2), lam=0.1, seed=0).name
        'l2'
    """
    record = info(name)
    accepted = list(inspect.signature(record.cls).parameters)[1:]
    wanted = {key: value for key, value in settings.items() if key in accepted or key not in CONTEXT}
    for key in wanted:
        if key not in accepted:
            raise ValueError(f"settings: {name} has no setting {key!r}; {suggest(key, accepted)}")
    return record.cls(model, **wanted)
