"""An experiment as data: what a TOML file or the flags of `pliant compare` say, checked before anything runs.

A wrong key or value is answered with where it stands, what it is, what is allowed there and what was
probably meant.
"""

import contextlib
import functools
import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from pliant import data, methods, models, streams
from pliant.assignments import override
from pliant.data.local import load_folder
from pliant.diagnostics import measures
from pliant.experiments.config import SELECTION_SEEDS, Part, Purpose, RunConfig, find_unwritable
from pliant.experiments.wanted import BASELINES, check_method, parse_part, split_methods
from pliant.importing import import_object
from pliant.spelling import check_names, suggest
from pliant.training import RESULTS, Reference, Settings

Scale = Literal["paper", "quick"]
"""How large an experiment is done: as published, or in minutes."""

_MOST_SEEDS = 10_000


class RecipeError(ValueError):
    """Something in a recipe is wrong; the message says where, and how it could be right."""


def _as_part(value: Any) -> Any:
    """Accept a bare name, and take the options that stand beside a name."""
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
        raise ValueError(f"is {value}; how many there are must be 1 … {_MOST_SEEDS}")
    return tuple(range(value))


NamedPart = Annotated[Part, BeforeValidator(_as_part)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GridPart(_Strict):
    """One method of an entry, with values to choose from.

    Args:
        name: A registered method.
        settings: Fixed settings.
        grid: Settings to choose, each from a list. The word "sweep" stands for the sources' own sweep of the
            first of the method's tunables that has one: the strength, mostly.
    """

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = parse_part(value)
        if isinstance(value, Mapping) and "settings" not in value:
            known = {"name", "grid"}
            settings = {key: item for key, item in value.items() if key not in known}
            value = {key: value[key] for key in known & value.keys()} | {"settings": settings}
        if isinstance(value, Mapping) and isinstance(name := value.get("name"), str):
            check_method(name)
            if value.get("grid") == "sweep":
                swept = [t for t in methods.info(name).tunables if t.sweep]
                value = dict(value) | {"grid": {t.name: list(t.sweep) for t in swept[:1]}}
        return value

    @model_validator(mode="after")
    def _check(self) -> "GridPart":
        check_names(self.name, (*self.settings, *self.grid), methods.options(self.name))
        for key in self.settings.keys() & self.grid.keys():
            raise ValueError(f"{self.name}.{key} has both a value, {self.settings[key]!r}, and a grid; drop one")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid of {self.name}.{key} is empty; it must hold at least one value")
        variants = self.variants()
        for number, variant in enumerate(variants):
            if variant in variants[:number]:
                raise ValueError(f"grid of {self.name} has the same settings twice: {dict(variant.options)}")
        return self

    def variants(self) -> list[Part]:
        """Every combination of the grid's values."""
        hints = get_type_hints(methods.info(self.name).cls.__init__)
        return [
            Part(self.name, _fit(self.name, self.settings | dict(zip(self.grid, values, strict=True)), hints))
            for values in itertools.product(*self.grid.values())
        ]


class Entry(_Strict):
    """A row of the comparison: a method, several at once, or a baseline.

    Args:
        label: What tables call it; the methods' names by default.
        parts: The methods; none for a baseline.
        fresh: Whether it is the baseline of an untrained network at every task.
        data: Where this entry's data set differs from the recipe's: another name, other options.
        model: Where its network differs, in the same way.
        stream: Options of the stream that differ.
        training: Settings of the training that differ.
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
            parts = [parse_part(part) for part in split_methods(value)]
            return {"label": "+".join(part["name"] for part in parts), "parts": parts}
        if isinstance(value, Mapping) and "parts" not in value and "name" in value:
            own = {"label": value["name"]} | {key: value[key] for key in cls.model_fields if key in value}
            if value["name"] in BASELINES:
                rest = {key: item for key, item in value.items() if key != "name"}
                return own | rest | {"parts": (), "fresh": value["name"] == "fresh"}
            return own | {"parts": [{key: item for key, item in value.items() if key not in own}]}
        return value

    @model_validator(mode="after")
    def _check(self) -> "Entry":
        for info in (methods.info(part.name) for part in self.parts if self.fresh):
            if info.kind == "architecture" or info.cls.saved:
                does = "changes" if info.kind == "architecture" else "remembers"
                raise ValueError(f"{self.label}: {info.name} {does} the network, which fresh=true makes anew; drop one")
        return self

    def variants(self) -> list[tuple[Part, ...]]:
        """Every combination of the parts' settings."""
        return list(itertools.product(*(part.variants() for part in self.parts)))


class Selection(_Strict):
    """How settings are chosen where a grid leaves a choice.

    Args:
        on: "validation": by runs that never see the test data and are tested on a part of the training data.
            "test": by the test results themselves, as the sources do; optimistic.
        fraction: How large that part is.
        seeds: How many runs decide for each setting; their seeds are not those of the results.
    """

    on: Literal["validation", "test"] = "validation"
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    seeds: Annotated[int, Field(ge=1)] = 3

    @property
    def drawn(self) -> range:
        """The seeds of these runs."""
        return range(SELECTION_SEEDS, SELECTION_SEEDS + self.seeds)


class Recipe(_Strict):
    """An experiment.

    Args:
        title: What it is called.
        source: Which table or figure it repeats.
        choices: What the source leaves open, what was chosen, and why.
        published: The source's own results, by label: the mean of the stream's headline, and its spread.
        data: The data set.
        model: The network.
        stream: What the network meets.
        training: How it is trained.
        methods: What is compared.
        seeds: The seeds, or how many.
        selection: How settings are chosen.
        measures: What is measured on the way.
        reference: Which network measures compare with: the initial one, the one at the end of the task before
            ("boundary"), or the one when the task before began ("previous_task").
        headline: The result that decides; the stream's own if there is none here.
        device: Where to compute.
    """

    title: str = ""
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
                raise ValueError(f"{key}: is empty; there must be at least one")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {list(self.seeds)} has one twice")
        labels = [entry.label for entry in self.methods]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(f"methods: {label!r} stands there {labels.count(label)} times; give each a label")
        check_names("published", self.published, labels)
        check_names("measures", self.measures, list(measures.names()))
        check_names("headline", [self.headline] if self.headline else [], list(RESULTS))
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"device is {self.device!r}; allowed are those of torch: cpu, cuda, cuda:1, …") from error
        for entry in self.methods:
            check_names("training", entry.training, [field.name for field in fields(Settings)])
            config = self.config(entry, (), 0, "result")
            _check_stream(config.stream)
            _check_model(config.model)
            _check_data(config.data)
        return self

    def config(self, entry: Entry, parts: tuple[Part, ...], seed: int, purpose: Purpose) -> RunConfig:
        """Say completely what one run is."""
        dataset, model = _change(self.data, entry.data), _change(self.model, entry.model)
        stream = Part(self.stream.name, self.stream.options | entry.stream)
        return RunConfig(
            label=entry.label,
            methods=parts,
            fresh=entry.fresh,
            data=_fit_part("data", dataset, _data_hints(data.is_function(dataset.name))),
            model=_fit_part("model", model, _model_hints(model.name)),
            stream=_fit_part("stream", stream, _hints(streams.stream_class(stream.name))),
            training=replace(self.training, **_fit("training", entry.training, _hints(Settings))),
            measures=self.measures,
            seed=seed,
            purpose=purpose,
            # Only where it matters: a result must not be done again because a selection would differ.
            holdout=self.selection.fraction if purpose == "selection" else 0.0,
            device=self.device,
            reference=self.reference,
        )

    @property
    def deciding(self) -> str:
        """The result that decides."""
        return self.headline or streams.stream_class(self.stream.name).headline


def _change(part: Part, changes: Mapping[str, Any]) -> Part:
    """Apply what an entry has different: other options; with another name, its options alone."""
    name = changes.get("name", part.name)
    if not isinstance(name, str):
        raise ValueError(f"name is {name!r} in the place of {part.name!r}; it must be a text")
    options = {key: value for key, value in changes.items() if key != "name"}
    return Part(name, part.options | options if name == part.name else options)


def _fit_part(where: str, part: Part, hints: Mapping[str, Any]) -> Part:
    return Part(part.name, _fit(where, part.options, hints))


def _fit(where: str, options: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Bring options into the types that they are annotated with; names without an annotation are left alone."""
    return {
        key: _fit_value(f"{where}.{key}", value, hints[key]) if key in hints else value
        for key, value in options.items()
    }


def _fit_value(where: str, value: Any, hint: Any) -> Any:
    adapter = _adapter(hint)
    with contextlib.suppress(ValidationError):
        adapter.validate_json(json.dumps(value, default=str), strict=True)
        return value  # As it is, be it 1 for 1.0: runs are named by how it is written.
    try:
        return adapter.dump_python(adapter.validate_python(value), mode="json")
    except ValidationError as error:
        raise ValueError(f"{where} is {value!r}: {error.errors()[0]['msg']}") from error


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


_hints = functools.cache(get_type_hints)


def _model_hints(name: str) -> dict[str, Any]:
    if name.endswith(".py"):
        raise ValueError(f"model is {name!r}; it must name a function in that file too: {name}:function")
    return {} if ":" in name else _hints(models.info(name).build)


@functools.cache
def _data_hints(of_function: bool) -> dict[str, Any]:
    loads = (data.load,) if of_function else (load_folder, data.load)
    return {name: hint for load in loads for name, hint in get_type_hints(load).items()}


def _check_data(part: Part) -> None:
    allowed = data.options(part.name)
    if allowed is not None:
        check_names("data", part.options, allowed)


def _check_stream(part: Part) -> None:
    check_names("stream", part.options, streams.options(part.name))


def _check_model(part: Part) -> None:
    if ":" in part.name:
        if not callable(import_object(part.name)):
            raise ValueError(f"model is {part.name!r}, which cannot be called; it must be a function")
        if "seed" in part.options:
            raise ValueError("model.seed: initial weights are drawn under the run's seed; call the option otherwise")
        return
    check_names("model", part.options, models.options(part.name))


def recipe_folder() -> Path:
    """Where the recipes that come with Pliant are: in the package, or beside its sources."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str) -> Path:
    """Find a recipe by its name or path."""
    path = Path(name)
    if path.suffix in (".toml", ".json"):
        return path
    found = {file.stem: file for file in sorted(recipe_folder().glob("*.toml"))}
    if name not in found:
        raise RecipeError(f"there is no recipe {name!r}; {suggest(name, found)}, or the path of a .toml file")
    return found[name]


def load_recipe(path: Path, overrides: Iterable[str] = (), scale: Scale = "paper") -> Recipe:
    """Read a recipe.

    Args:
        path: A TOML file, or an experiment's `recipe.json`. Its table `quick` holds what differs at that scale; of
            single methods by their labels, `methods = { ReDo = { every = 9 } }`.
        overrides: Changes of the form `key=value`, `stream.epochs=5` for a key inside a table.
        scale: "paper": as the source has it. "quick": the same shape, in minutes.

    Returns:
        The recipe, checked.

    Raises:
        RecipeError: If it is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe {str(path)!r}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not {path.suffix.removeprefix('.').upper()}: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds a {type(values).__name__}; a recipe is a table of keys and values")
    quick = values.pop("quick", None)
    if scale == "quick":
        if quick is None:
            raise RecipeError(f"{path} has no table 'quick'; it runs at scale 'paper' only")
        values = _merge(values, quick)
    overrides = list(overrides)
    values = override(values, overrides)
    _check_reach(values, overrides)
    if any(text.startswith("methods=") for text in overrides) and isinstance(values.get("published"), dict):
        labels = {_label(entry) for entry in values["methods"]} if isinstance(values["methods"], list) else set()
        values["published"] = {key: number for key, number in values["published"].items() if key in labels}
    return make_recipe(values)


def _check_reach(values: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Raise a RecipeError if an override changes nothing, since every method has a value of its own."""
    entries = values.get("methods")
    own = [entry if isinstance(entry, dict) else {} for entry in (entries if isinstance(entries, list) else ())]
    for text in overrides:
        table, _, key = text.partition("=")[0].partition(".")
        if own and key and all(isinstance(entry.get(table), dict) and key in entry[table] for entry in own):
            raise RecipeError(f"{text} would change nothing: every method has its own {table}.{key}")


def _merge(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace what changes name; in a table (or where a bare name stands for one), only what they name in it.

    A table of methods changes those of its labels.
    """
    merged = dict(values)
    for key, change in changes.items():
        old = merged.get(key)
        if isinstance(change, Mapping) and isinstance(old, dict):
            change = _merge(old, change)
        elif isinstance(change, Mapping) and isinstance(old, str) and key in ("data", "model", "stream"):
            change = _merge({"name": old}, change)
        elif key == "methods" and isinstance(change, Mapping) and isinstance(old, list):
            change = _merge_methods(old, change)
        merged[key] = change
    return merged


def _merge_methods(entries: list[Any], changes: Mapping[str, Any]) -> list[Any]:
    labels = [_label(entry) for entry in entries]
    for label, change in changes.items():
        if label not in labels:
            raise RecipeError(f"quick.methods: there is no {label!r}; {suggest(label, filter(None, labels))}")
        if not isinstance(change, Mapping):
            raise RecipeError(f"quick.methods.{label} is {change!r}; it must be a table of what changes")
    merged = []
    for entry, own in zip(entries, labels, strict=True):
        if own is None or own not in changes:
            merged.append(entry)
        elif isinstance(entry, str) and entry != own:
            raise RecipeError(f"quick.methods.{own}: {entry!r} must be written as a table too, to change it")
        else:
            merged.append(_merge({"name": entry} if isinstance(entry, str) else entry, changes[own]))
    return merged


def _label(entry: Any) -> str | None:
    """Return what tables call an entry that is not checked yet; None for what is no entry at all."""
    if isinstance(entry, str):
        return "+".join(part.partition(":")[0] for part in split_methods(entry))
    return entry.get("label", entry.get("name")) if isinstance(entry, dict) else None


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """Check a recipe's values.

    Raises:
        RecipeError: If a value is wrong; names every one that is.
    """
    if problem := find_unwritable(values):
        raise RecipeError(problem)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(problem) for problem in error.errors())) from error


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
    return f"{where} is {problem['input']!r}: {message[0].lower()}{message[1:]}"
