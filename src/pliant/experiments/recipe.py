"""An experiment as data: what a TOML file or the flags of `pliant compare` say, checked before anything runs.

A wrong key or value is answered with where it stands, what it is, what is allowed there and what was
probably meant.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
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
from pliant._names import check_names, suggest
from pliant.data.image_folder import load_folder
from pliant.diagnostics import measures
from pliant.experiments.method_specs import BASELINES, check_method, parse_part, published_sweep, split_methods
from pliant.experiments.run_config import SELECTION_SEEDS, Part, Purpose, RunConfig, find_unwritable, read_settings
from pliant.training import RESULTS, Reference, Settings

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
                value = dict(value) | {"grid": published_sweep(name)}
                if not value["grid"]:
                    raise ValueError(f"grid of {name} is 'sweep', but its sources have none; give values, or drop it")
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


def label_of(entry: Any) -> str | None:
    """Return what tables call an entry that is not checked yet; None if that cannot be told.

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
            return {"label": label_of(value), "parts": [parse_part(part) for part in split_methods(value)]}
        if isinstance(value, Mapping) and "parts" not in value and "name" in value:
            name = value["name"]
            if not isinstance(name, str):
                raise ValueError(f"name is {name!r}; it must be one method's; several stand in parts = ['swr', 'l2']")
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
            training=read_settings(asdict(self.training) | _fit("training", entry.training, _hints(Settings))),
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
    try:
        return TypeAdapter(hint)
    except PydanticUserError:  # a Python object is allowed too, such as a plan of SWR: only the method can check it
        return TypeAdapter(Any)


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
    if where == "seeds":
        return f"{where} is {problem['input']!r}; it must be how many, or a list of them"
    message = message.replace("tuple", "list")  # as TOML calls it
    return f"{where} is {problem['input']!r}: {message[0].lower()}{message[1:]}"
