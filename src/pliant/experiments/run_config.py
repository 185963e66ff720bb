"""What one run is, completely and in plain types.

A run's name is derived from its configuration, so that the same configuration always means the same folder:
what is finished is never done twice, and what was interrupted is found again.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from pliant.training import Reference, Settings

Purpose = Literal["result", "selection"]

SELECTION_SEEDS = 1_000_000
"""First seed of the runs that choose settings: results come from other draws than the choice."""


@dataclass(frozen=True)
class Part:
    """Something chosen by name, with its options.

    Args:
        name: A registered name, `module:function`, or for data also a path.
        options: Options by name, in JSON's types.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({self.written_options})" if self.options else self.name

    @property
    def written_options(self) -> str:
        """The options in a line, sorted as in the store: a part reads the same before and after."""
        return ", ".join(f"{key}={value}" for key, value in sorted(self.options.items()))


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        label: What tables call the method.
        methods: The methods at work together; none for plain training.
        fresh: Whether every task starts from an untrained network: the baseline for plasticity.
        data: The data set.
        model: The network.
        stream: What the network meets.
        training: How it is trained.
        measures: What is measured on the way.
        seed: Decides everything that is drawn.
        purpose: "result": trained on all training data and tested on the test data. "selection": a part of
            the training data takes the place of the test data, which is not looked at.
        holdout: How large that part is.
        device: Where to compute.
        reference: Which network measures compare with.
    """

    label: str
    methods: tuple[Part, ...]
    fresh: bool
    data: Part
    model: Part
    stream: Part
    training: Settings
    measures: tuple[str, ...]
    seed: int
    purpose: Purpose
    holdout: float
    device: str
    reference: Reference = "initial"

    @cached_property
    def id(self) -> str:
        """The run's name: readable at the front, unique at the end."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=6).hexdigest()
        return f"{re.sub(r'[^a-z0-9]+', '-', self.label.lower()).strip('-')[:40]}-s{self.seed}-{digest}"

    @property
    def variant(self) -> tuple[str, str]:
        """What runs that differ in their seeds only have in common: label, and the methods' settings."""
        return self.label, describe(self.methods)

    def to_json(self) -> str:
        """Write down as JSON, the same text for the same configuration."""
        values = asdict(self)
        if self.reference == "initial":  # Left out: runs keep the names that they had before there was a choice.
            del values["reference"]
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Read what `to_json` wrote, after parsing."""
        return cls(
            **values
            | {
                "methods": tuple(Part(**part) for part in values["methods"]),
                "data": Part(**values["data"]),
                "model": Part(**values["model"]),
                "stream": Part(**values["stream"]),
                "training": read_settings(values["training"]),
                "measures": tuple(values["measures"]),
            }
        )


SETTING = ("data", "model", "stream", "training")
"""What runs must have in common to be compared, as it is called in a run's configuration and in a recipe."""


def describe(parts: Iterable[Part]) -> str:
    """Write down methods that act at once, with their settings: what settings are chosen and found by."""
    return " + ".join(map(str, parts))


def full_name(label: str, settings: str) -> str:
    """Name a variant by what tables call it and by its settings, which often begin with that.

    Example:
        >>> full_name("l2", "l2(lam=0.1)"), full_name("mine", "l2(lam=0.1)"), full_name("l2", "l2_init(lam=0.1)")
        ('l2(lam=0.1)', 'mine: l2(lam=0.1)', 'l2: l2_init(lam=0.1)')
    """
    if settings == label or settings.startswith(f"{label}("):
        return settings
    return f"{label}: {settings}" if settings else label


def read_settings(values: dict[str, Any]) -> Settings:
    """Read settings of a training that were written as JSON, which has no tuples."""
    return Settings(**values | {"decay_epochs": tuple(values["decay_epochs"])})
