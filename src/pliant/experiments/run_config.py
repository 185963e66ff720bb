"""The complete configuration of one run, in plain types.

The id of a run is derived from its configuration. The same configuration always has the same folder, so finished runs
are never repeated and interrupted runs are found again.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from pliant._validation import check_choice, check_number
from pliant.training import Reference, Settings

Purpose = Literal["result", "selection"]

SELECTION_SEEDS = 1_000_000
"""The first seed of runs that choose settings; results have other seeds."""


@dataclass(frozen=True)
class Part:
    """A data set, network, stream or method by name, with its options.

    Args:
        name: A registered name, `module:function`, or for data also a path.
        options: Options by name, in JSON's types.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self, name=str, options=dict)

    def __str__(self) -> str:
        return f"{self.name}({self.written_options})" if self.options else self.name

    @property
    def written_options(self) -> str:
        """The options in one line, in the sorted order of the store."""
        return ", ".join(f"{key}={value}" for key, value in sorted(self.options.items()))


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run starts from.

    Args:
        path: The file.
        digest: A digest of its content, so that another content under the same name is another run.
        key: The place of the weights in the file; see `load_weights`.
        optimizer: The place of the optimizer's state in the file; empty for a new optimizer.
    """

    path: str
    digest: str
    key: str = ""
    optimizer: str = ""

    def __post_init__(self) -> None:
        _check_types(self, path=str, digest=str, key=str, optimizer=str)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        label: The name of the entry in tables.
        methods: The methods that act at once; empty for plain training.
        fresh: Whether every task starts from an untrained network.
        data: The data set.
        model: The network.
        stream: The sequence of tasks.
        training: The settings of the training.
        measures: Measures to record during training.
        seed: The seed of everything that is drawn.
        purpose: "result": train on all training data, test on the test data. "selection": test on held-out training
            data; the test data is not used.
        holdout: The share of the training data that is held out.
        device: Where to compute.
        reference: The network that measures compare with.
        start: The checkpoint to start from; None for an untrained network. The first task is then new data.
        old_data: Data whose test examples are evaluated too, to see what is forgotten.
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
    start: Start | None = None
    old_data: Part | None = None

    def __post_init__(self) -> None:
        _check_types(self, label=str, fresh=bool, seed=int, device=str)
        check_choice("purpose", self.purpose, get_args(Purpose))
        check_choice("reference", self.reference, get_args(Reference))
        check_number("holdout", self.holdout, high=1.0, below=True)
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must fit into 64 bits")
        if not all(isinstance(name, str) for name in self.measures):
            raise ValueError(f"measures are {self.measures!r}; they must be names")

    @cached_property
    def id(self) -> str:
        """The id of the run: label, seed and a digest of the configuration."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=6).hexdigest()
        return f"{re.sub(r'[^a-z0-9]+', '-', self.label.lower()).strip('-')[:40]}-s{self.seed}-{digest}"

    @property
    def variant(self) -> tuple[str, str]:
        """The label and the settings of the methods, which runs with other seeds share."""
        return self.label, describe(self.methods)

    @property
    def starts_shared(self) -> bool:
        """Whether the second task starts from a checkpoint of a first task that all runs of a seed share."""
        return bool(self.stream.options.get("checkpoint"))

    def to_json(self) -> str:
        """Return the configuration as JSON, with sorted keys."""
        values = asdict(self)
        for name, default in (("reference", "initial"), ("start", None), ("old_data", None)):
            if values[name] == default:  # Defaults are left out, so that kept runs keep their ids.
                del values[name]
        values["training"] = {
            name: value
            for name, value in values["training"].items()
            if name not in _LATER or value != getattr(Settings, name)
        }
        return json.dumps(values, sort_keys=True)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Make a configuration from the parsed JSON of `to_json`."""
        start, old_data = values.get("start"), values.get("old_data")
        return cls(
            **values
            | {
                "start": None if start is None else Start(**start),
                "old_data": None if old_data is None else Part(**old_data),
                "methods": tuple(Part(**part) for part in values["methods"]),
                "data": Part(**values["data"]),
                "model": Part(**values["model"]),
                "stream": Part(**values["stream"]),
                "training": read_settings(values["training"]),
                "measures": tuple(values["measures"]),
            }
        )


_LATER = ("betas", "accumulate", "precision", "layout", "decay", "decay_to")
"""Settings that are left out of a configuration where they have their defaults, as in `to_json` above."""


def _check_types(record: object, **types: type) -> None:
    """Raise a ValueError if an attribute has another type; files may hold anything."""
    for name, allowed in types.items():
        value = getattr(record, name)
        if not isinstance(value, allowed) or (allowed is int and isinstance(value, bool)):
            raise ValueError(f"{name} is {value!r}; it must be a {allowed.__name__}")


SETTING = ("data", "model", "stream", "training", "start", "old_data")
"""The keys that runs must share to be compared, in a configuration and in a recipe."""


def describe(parts: Iterable[Part]) -> str:
    """Describe methods that act at once, with their settings."""
    return " + ".join(map(str, parts))


def full_name(label: str, settings: str) -> str:
    """Join a label and settings; settings that begin with the label stand alone.

    Example:
        >>> full_name("l2", "l2(lam=0.1)"), full_name("mine", "l2(lam=0.1)"), full_name("l2", "l2_init(lam=0.1)")
        ('l2(lam=0.1)', 'mine: l2(lam=0.1)', 'l2: l2_init(lam=0.1)')
    """
    if settings == label or settings.startswith(f"{label}("):
        return settings
    return f"{label}: {settings}" if settings else label


def read_settings(values: dict[str, Any]) -> Settings:
    """Make training settings from parsed JSON, which has no tuples."""
    tuples: dict[str, Any] = {name: tuple(values[name]) for name in ("decay_epochs", "betas") if name in values}
    return Settings(**values | tuples)
