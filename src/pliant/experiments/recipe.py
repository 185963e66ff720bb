"""An experiment as data: the values of a TOML file, or of `pliant.compare`, checked before anything runs.

An error names the key, its value, what is allowed there and what was probably meant.
"""

import contextlib
import datetime
import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from pliant import data, methods, models, streams
from pliant._importing import import_object
from pliant._key_values import parse_value
from pliant._names import check_names, suggest
from pliant.data.cache import digest_file
from pliant.data.image_folder import load_folder
from pliant.diagnostics import measures
from pliant.experiments.run_config import SELECTION_SEEDS, Part, Purpose, RunConfig, Start, read_settings
from pliant.rl.results import RESULTS as RL_RESULTS
from pliant.training import RESULTS, Reference, Settings

_MOST_SEEDS = 10_000
_MOST_VARIANTS = 1000
"""The most combinations of a method's, or an entry's, values of grids."""
_MOST_RUNS = 100_000
"""The most runs of a recipe."""
_MOST_ERRORS = 10
"""The most errors that a message names."""


BASELINES = {"vanilla": "plain training, nothing attached", "fresh": "an untrained network at every task"}
"""Entries of a comparison that are not methods."""


class RecipeError(ValueError):
    """A recipe is wrong; the message says where, and what is allowed."""


def split_methods(text: str) -> list[str]:
    """Split methods that act at once, `swr+l2:lam=1e-3`, at the plus signs outside numbers.

    Example:
        >>> split_methods("swr + l2:lam=1e+0")
        ['swr', 'l2:lam=1e+0']
    """
    return [part.strip() for part in re.split(r"(?<![0-9][eE])\+", text)]


def parse_method(text: str) -> dict[str, Any]:
    """Parse a method with its settings: `swr`, `redo:tau=0.1:every=97`, or with a grid `swr:lam=1e-3|1e-4`.

    Example:
        >>> parse_method("l2:lam=0.1|0.01")
        {'name': 'l2', 'settings': {}, 'grid': {'lam': [0.1, 0.01]}}
    """
    name, *assignments = text.split(":")
    settings: dict[str, Any] = {}
    grid: dict[str, list[Any]] = {}
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign:
            raise ValueError(f"{text!r}: {assignment!r} must be of the form setting=value")
        if key in settings or key in grid:
            raise ValueError(f"{text!r}: {key} has two values; put | between values to choose from")
        values = [parse_value(each) for each in value.split("|")]
        if len(values) > 1:
            grid[key] = values
        else:
            settings[key] = values[0]
    return {"name": name, "settings": settings, "grid": grid}


def published_sweep(name: str) -> dict[str, list[Any]]:
    """Return the published sweep of a method's first tunable that has one; empty without a sweep.

    Example:
        >>> published_sweep("shrink_perturb"), published_sweep("head_reset")
        ({'lam': [0.2, 0.4, 0.6, 0.8]}, {})
    """
    tunables = methods.info(name).tunables if name in methods.names() else ()
    return next(({tunable.name: list(tunable.sweep)} for tunable in tunables if tunable.sweep), {})


def _check_method(name: str) -> None:
    if name in BASELINES:
        raise ValueError(f"{name} is a baseline, not a method: it stands alone and has no settings")
    if name not in methods.names():
        known = suggest(name, (*BASELINES, *methods.names()))
        hint = "write a colon before every setting: redo:tau=0.1:every=97" if "=" in name else known
        raise ValueError(f"there is no method {name!r}; {hint}")


def _as_part(value: Any) -> Any:
    """Accept a bare name, and options beside the name."""
    if isinstance(value, str):
        return {"name": value, "options": {}}
    if isinstance(value, Mapping):
        beside = {key: item for key, item in value.items() if key not in ("name", "options")}
        options = value.get("options", {})
        options = {**options, **beside} if isinstance(options, Mapping) else options
        return {"name": value.get("name"), "options": options}
    return value


def _as_seeds(value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if not 1 <= value <= _MOST_SEEDS:
        raise ValueError(f"is {value}; their number must be 1 … {_MOST_SEEDS}")
    return tuple(range(value))


def _as_start(value: Any) -> Any:
    """Accept a bare path, and read the digest of the file unless it is given."""
    given = {"path": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or "digest" in given or not isinstance(given.get("path"), str):
        return given
    path = Path(given["path"])
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    return {**given, "digest": digest_file(path)}


NamedPart = Annotated[Part, BeforeValidator(_as_part)]

Domain = Literal["supervised", "rl"]
_RL_KEYS = {"env": "data", "agent": "model"}
"""What data and network are called where an agent learns."""


def _rename_rl_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Call environment and agent data and model, as every run does."""
    for key, name in _RL_KEYS.items():
        if key in values and name in values:
            raise ValueError(f"{key} and {name} are both given; with domain 'rl' they are the same, drop {name}")
    return {_RL_KEYS.get(key, key): value for key, value in values.items()}


def _as_domain(value: Any) -> Any:
    """Accept a bare name too."""
    return value["name"] if isinstance(value, Mapping) and set(value) == {"name"} else value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GridPart(_Strict):
    """One method of an entry, with its settings.

    Args:
        name: A registered method.
        settings: Fixed settings.
        grid: Settings to choose, each from a list of values. The word "sweep" stands for the published sweep of the
            method's main setting.
    """

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = parse_method(value)
        if isinstance(value, Mapping) and "settings" not in value:
            known = {"name", "grid"}
            settings = {key: item for key, item in value.items() if key not in known}
            value = {key: value[key] for key in known & value.keys()} | {"settings": settings}
        if isinstance(value, Mapping) and isinstance(name := value.get("name"), str):
            _check_method(name)
            if value.get("grid") == "sweep":
                value = dict(value) | {"grid": published_sweep(name)}
                if not value["grid"]:
                    raise ValueError(f"grid of {name} is 'sweep', but no sweep is published; give values, or drop it")
        return value

    @model_validator(mode="after")
    def _check(self) -> "GridPart":
        check_names(self.name, (*self.settings, *self.grid), methods.options(self.name))
        methods.check_required(self.name, (*self.settings, *self.grid))
        for key in self.settings.keys() & self.grid.keys():
            raise ValueError(f"{self.name}.{key} has both a value, {self.settings[key]!r}, and a grid; drop one")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid of {self.name}.{key} is empty; it must hold at least one value")
        _check_variants(f"grid of {self.name}", map(len, self.grid.values()))
        for number, variant in enumerate(self.variants):
            if variant in self.variants[:number]:
                raise ValueError(f"grid of {self.name} has the same settings twice: {dict(variant.options)}")
        return self

    @functools.cached_property
    def variants(self) -> list[Part]:
        """Every combination of the grid's values."""
        hints = _hints(methods.info(self.name).cls.__init__) | {"where": str | list[str] | None}
        return [
            Part(self.name, _fit(self.name, self.settings | dict(zip(self.grid, values, strict=True)), hints))
            for values in itertools.product(*self.grid.values())
        ]


def _check_variants(what: str, lengths: Iterable[int]) -> None:
    if (combinations := math.prod(lengths)) > _MOST_VARIANTS:
        raise ValueError(f"{what} has {combinations} combinations of values; it must have at most {_MOST_VARIANTS}")


def label_of(entry: Any) -> str | None:
    """Return the label of an entry that is not checked yet; None if it is malformed.

    Example:
        >>> label_of("swr:lam=0.1+l2"), label_of({"parts": ["swr", {"name": "l2"}]}), label_of(3)
        ('swr+l2', 'swr+l2', None)
    """
    if isinstance(entry, str):
        return "+".join(part.partition(":")[0] for part in split_methods(entry))
    if not isinstance(entry, Mapping):
        return None
    if "label" in entry or "name" in entry:
        label = entry.get("label", entry.get("name"))
        return label if isinstance(label, str) else None
    parts = entry.get("parts")
    labels = [label_of(part) for part in parts] if isinstance(parts, list) else []
    return "+".join(filter(None, labels)) if labels and all(labels) else None


class Entry(_Strict):
    """A row of the comparison: a method, several at once, or a baseline.

    Args:
        label: Its name in tables; by default the names of the methods.
        parts: The methods; empty for a baseline.
        fresh: Whether each task starts with an untrained network.
        data: Changes of the recipe's data set: another name, other options.
        model: Changes of its network.
        stream: Changes of the stream's options.
        training: Changes of the training's settings.
    """

    label: str
    parts: tuple[GridPart, ...]
    fresh: bool = False
    data: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    stream: dict[str, Any] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value in BASELINES:
                return {"label": value, "parts": (), "fresh": value == "fresh"}
            return {"label": label_of(value), "parts": [parse_method(part) for part in split_methods(value)]}
        if isinstance(value, Mapping) and "parts" not in value and "name" in value:
            name = value["name"]
            if not isinstance(name, str):
                raise ValueError(f"name is {name!r}; it must be one method; write several as parts = ['swr', 'l2']")
            own = {"label": name} | {key: value[key] for key in cls.model_fields if key in value}
            if name in BASELINES:
                fresh = name == "fresh"
                if value.get("fresh", fresh) != fresh:
                    raise ValueError(f"fresh is {value['fresh']!r} for the baseline {name!r}; drop one of the two")
                rest = {key: item for key, item in value.items() if key != "name"}
                return own | rest | {"parts": (), "fresh": fresh}
            return own | {"parts": [{key: item for key, item in value.items() if key not in own}]}
        if isinstance(value, Mapping) and "label" not in value and (label := label_of(value)):
            return {"label": label, **value}
        return value

    @model_validator(mode="after")
    def _check(self) -> "Entry":
        _check_variants(f"{self.label}: the grids", (len(part.variants) for part in self.parts))
        for info in (methods.info(part.name) for part in self.parts if self.fresh):
            if info.kind == "architecture" or info.cls.saved:
                does = "changes" if info.kind == "architecture" else "remembers"
                raise ValueError(
                    f"{self.label}: {info.name} {does} the network, but fresh=true replaces it at each task; drop one"
                )
        return self

    def variants(self) -> list[tuple[Part, ...]]:
        """Every combination of the parts' settings."""
        return list(itertools.product(*(part.variants for part in self.parts)))


class Selection(_Strict):
    """How the values of grids are chosen.

    Args:
        on: "validation": by runs that are tested on held-out training data and never see the test data.
            For agents nothing is held out: seeds that the results do not use choose.
            "test": by the test results themselves, as many papers do; optimistic.
        fraction: The share of the training data that is held out.
        seeds: The number of runs for each value; their seeds differ from the results' seeds.
    """

    on: Literal["validation", "test"] = "validation"
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    seeds: Annotated[int, Field(ge=1, le=_MOST_SEEDS)] = 3

    @property
    def drawn(self) -> range:
        """The seeds of the runs that choose."""
        return range(SELECTION_SEEDS, SELECTION_SEEDS + self.seeds)


class Recipe(_Strict):
    """An experiment.

    Args:
        title: Its title.
        domain: "supervised", or "rl" if an agent learns in environments. Then `env` is the environment with its options
            and `agent` is the agent with its arguments in Stable-Baselines3; there is no `training`.
        source: The table or figure that it reproduces.
        choices: What the source leaves open, what was chosen, and why.
        published: The published mean and spread of the headline, by label.
        data: The data set.
        model: The network.
        stream: The sequence of tasks.
        training: The settings of the training.
        methods: The entries to compare.
        seeds: The seeds, or their number.
        selection: How the values of grids are chosen.
        measures: Measures to record during training.
        reference: The network that measures compare with: the initial one, the one at the end of the task before
            ("boundary"), or the one when the task before began ("previous_task").
        headline: The result that decides; by default the stream's.
        device: Where to compute.
        start: The checkpoint that all runs start from; without one they start from an untrained network.
        old_data: Data whose test examples are evaluated too, to see what is forgotten.
    """

    title: str = ""
    domain: Annotated[Domain, BeforeValidator(_as_domain)] = "supervised"
    source: str = ""
    choices: tuple[str, ...] = ()
    published: dict[str, tuple[float, float]] = Field(default_factory=dict)
    data: NamedPart
    model: NamedPart
    stream: NamedPart
    training: Settings = Settings()
    methods: tuple[Entry, ...]
    seeds: Annotated[tuple[int, ...], BeforeValidator(_as_seeds)] = (0, 1, 2, 3, 4)
    selection: Selection = Selection()
    measures: tuple[str, ...] = ()
    reference: Reference = "initial"
    headline: str = ""
    device: str = "cpu"
    start: Annotated[Start | None, BeforeValidator(_as_start)] = None
    old_data: Annotated[Part | None, BeforeValidator(_as_part)] = None

    @model_validator(mode="before")
    @classmethod
    def _read_domain(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if _as_domain(value.get("domain")) == "rl":
            entries = value.get("methods")
            entries = entries if isinstance(entries, list | tuple) else []
            renamed = [_rename_rl_keys(entry) if isinstance(entry, Mapping) else entry for entry in entries]
            return _rename_rl_keys(value) | ({"methods": renamed} if renamed else {})
        misplaced = (
            _RL_KEYS.keys() & value.keys() if _as_domain(value.get("domain", "supervised")) == "supervised" else ()
        )
        for key in misplaced:
            raise ValueError(f"{key} needs domain = 'rl'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _check_training_keys(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("training"), Mapping):
            check_names("training", value["training"], [field.name for field in fields(Settings)])
        return value

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        for key in ("methods", "seeds"):
            if not getattr(self, key):
                raise ValueError(f"{key}: is empty; give at least one")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} holds a seed twice")
        labels = [entry.label for entry in self.methods]
        ((label, times),) = Counter(labels).most_common(1)
        if times > 1:
            raise ValueError(f"methods: {label!r} occurs {times} times; give each entry its own label")
        variants = [math.prod(len(part.variants) for part in entry.parts) for entry in self.methods]
        runs = sum(number * len(self.seeds) + (number > 1) * number * self.selection.seeds for number in variants)
        if runs > _MOST_RUNS:
            raise ValueError(f"the recipe has {runs} runs; it must have at most {_MOST_RUNS}")
        check_names("published", self.published, labels)
        check_names("measures", self.measures, list(measures.names()))
        check_names(
            "headline", [self.headline] if self.headline else [], list(RL_RESULTS if self.domain == "rl" else RESULTS)
        )
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(
                f"device is {self.device!r}; it must be a device of torch: cpu, cuda, cuda:1, …"
            ) from error
        self._check_domain()
        for entry, config in zip(self.methods, self._configs.values(), strict=True):
            if config.start is not None or config.starts_shared:
                _check_startable(entry)
            check_names("stream", config.stream.options, streams.options(config.stream.name))
            if self.domain == "rl":
                continue  # Environment and agent are checked when they are made.
            _check_model(config.model)
            _check_data(config.data)
        if self.old_data is not None:
            _check_data(self.old_data)
        return self

    def _check_domain(self) -> None:
        of_environments = streams.is_of_environments(self.stream.name)
        if of_environments != (self.domain == "rl"):
            fitting = [name for name in streams.names() if streams.is_of_environments(name) != of_environments]
            raise ValueError(
                f"stream is {self.stream.name!r}, which domain {self.domain!r} does not have; "
                f"it must be one of {', '.join(fitting)}"
            )
        if self.domain == "supervised":
            return
        if self.training != Settings() or any(entry.training for entry in self.methods):
            raise ValueError("training: the agent's own arguments say how it learns; write them under agent")
        for key in ("start", "old_data"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: agents start untrained; drop it")

    @functools.cached_property
    def _configs(self) -> dict[str, RunConfig]:
        """What the runs of each entry have in common, by label."""
        return {entry.label: self._resolve(entry) for entry in self.methods}

    def _resolve(self, entry: Entry) -> RunConfig:
        """Apply an entry's changes, and convert all options to their annotated types."""
        dataset, model = _change(self.data, entry.data), _change(self.model, entry.model)
        stream = Part(self.stream.name, self.stream.options | entry.stream)
        training = self.training
        if entry.training:
            check_names("training", entry.training, [field.name for field in fields(Settings)])
            training = read_settings(asdict(training) | _fit("training", entry.training, _hints(Settings)))
        return RunConfig(
            label=entry.label,
            methods=(),
            fresh=entry.fresh,
            data=dataset if self.domain == "rl" else _fit_data("data", dataset),
            model=model if self.domain == "rl" else _fit_part("model", model, _model_hints(model.name)),
            stream=_fit_part("stream", stream, _hints(streams.stream_class(stream.name))),
            training=training,
            measures=self.measures,
            seed=0,
            purpose="result",
            holdout=0.0,
            device=self.device,
            reference=self.reference,
            start=self.start,
            old_data=None if self.old_data is None else _fit_data("old_data", self.old_data),
        )

    def config(self, entry: Entry, parts: tuple[Part, ...], seed: int, purpose: Purpose) -> RunConfig:
        """Return the configuration of one run.

        Args:
            entry: One of `methods`.
            parts: One of the entry's `variants`.
            seed: The seed.
            purpose: Whether the run chooses settings or is a result.
        """
        # A result does not depend on how much is held out for choosing.
        holdout = self.selection.fraction if purpose == "selection" else 0.0
        return replace(self._configs[entry.label], methods=parts, seed=seed, purpose=purpose, holdout=holdout)

    @property
    def deciding(self) -> str:
        """The result that decides."""
        return self.headline or streams.stream_class(self.stream.name).headline


def _change(part: Part, changes: Mapping[str, Any]) -> Part:
    """Apply an entry's changes to a part; another name drops the options of the old one."""
    name = changes.get("name", part.name)
    if not isinstance(name, str):
        raise ValueError(f"name is {name!r} instead of {part.name!r}; it must be a text")
    options = {key: value for key, value in changes.items() if key != "name"}
    return Part(name, part.options | options if name == part.name else options)


def _fit_part(where: str, part: Part, hints: Mapping[str, Any]) -> Part:
    return Part(part.name, _fit(where, part.options, hints))


def _fit_data(where: str, part: Part) -> Part:
    return _fit_part(where, part, _data_hints(data.is_function(part.name)))


def _fit(where: str, options: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to their annotated types; options without an annotation stay."""
    return {
        key: _fit_value(f"{where}.{key}", value, hints[key]) if key in hints else value
        for key, value in options.items()
    }


def _fit_value(where: str, value: Any, hint: Any) -> Any:
    adapter = _adapter(hint)
    with contextlib.suppress(ValidationError):
        adapter.validate_json(json.dumps(value, default=str), strict=True)
        return value  # As written, even 1 for 1.0: the name of a run depends on it.
    try:
        return adapter.dump_python(adapter.validate_python(value), mode="json")
    except ValidationError as error:
        raise ValueError(f"{where} is {value!r}: {error.errors()[0]['msg']}") from error


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint)
    except PydanticUserError:  # a Python object is allowed too, such as a plan of SWR: only the method can check it
        return TypeAdapter(Any)


_hints = functools.cache(get_type_hints)


def _model_hints(name: str) -> dict[str, Any]:
    if name.endswith(".py"):
        raise ValueError(f"model is {name!r}; name a function in that file too: {name}:function")
    return {} if ":" in name else _hints(models.info(name).build)


@functools.cache
def _data_hints(of_function: bool) -> dict[str, Any]:
    loads = (data.load,) if of_function else (load_folder, data.load)
    return {name: hint for load in loads for name, hint in get_type_hints(load).items()}


def _check_data(part: Part) -> None:
    allowed = data.options(part.name)
    if allowed is not None:
        check_names("data", part.options, allowed)


def _check_startable(entry: Entry) -> None:
    """Raise a ValueError if a method cannot act on a network that is loaded after the method was made."""
    for part in entry.parts:
        if methods.info(part.name).kind == "architecture":
            raise ValueError(f"{entry.label}: {part.name} changes the network, which the checkpoint then does not fit")
        if part.name == "hare_tortoise":
            raise ValueError(f"{entry.label}: its average would start at an untrained network, not at the checkpoint")


def _check_model(part: Part) -> None:
    if ":" in part.name:
        if not callable(import_object(part.name)):
            raise ValueError(f"model is {part.name!r}, which is not a function")
        if "seed" in part.options:
            raise ValueError("model.seed: the seed of the run draws the initial weights; give the option another name")
        return
    check_names("model", part.options, models.options(part.name))


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """Check the values of a recipe.

    Raises:
        RecipeError: If values are wrong; the message names all of them.
    """
    if problem := _find_unwritable(values):
        raise RecipeError(problem)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = [_explain(problem) for problem in itertools.islice(error.errors(), _MOST_ERRORS)]
        if (more := error.error_count() - len(problems)) > 0:
            problems.append(f"and {more} more")
        raise RecipeError("\n".join(problems)) from error


def _explain(problem: Any) -> str:
    where = ".".join(str(step) for step in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        key = problem["loc"][-1]
        models: dict[str, type[BaseModel]] = {"selection": Selection, "parts": GridPart, "methods": Entry}
        model = next((models[place] for place in models if place in problem["loc"]), Recipe)
        return f"{where}: there is no such key; {suggest(str(key), model.model_fields)}"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    if problem["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if where == "seeds":
        return f"{where} is {problem['input']!r}; it must be how many, or a list of them"
    message = message.replace("tuple", "list")  # as TOML calls it
    return f"{where} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _find_unwritable(value: Any, where: str = "") -> str | None:
    """Name the first value that JSON cannot hold, as runs are saved and named by their JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where}: {value} is not allowed; it must be finite"
    if isinstance(value, datetime.date | datetime.time):
        return f"{where}: {value} is a date or a time; write it as text, in quotes"
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    found = (_find_unwritable(inner, f"{where}.{key}".removeprefix(".")) for key, inner in inside)
    return next(filter(None, found), None)
