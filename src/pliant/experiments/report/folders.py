"""From run folders to comparisons: which runs belong together, what each contender is called, what is broken.

Everything comes from the folders alone, at any moment: finished, under way, interrupted or damaged. A recipe is read as
it stands: its data, network and methods need not be at hand, and no code of its author runs.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pliant import data, streams
from pliant.experiments.provenance import read_sources
from pliant.experiments.recipe import Entry, GridPart, Recipe, Selection
from pliant.experiments.report.comparison import Broken, Comparison, Contender, Role
from pliant.experiments.run_config import SETTING, Part, RunConfig, describe, full_name, read_settings
from pliant.experiments.selection_summary import tell_choice
from pliant.experiments.store import FINAL, Run, Status, load_recipe_values, load_run, load_selection

_States = dict[tuple[str, str], set[str]]
"""Digests of data and networks of the user's own, by kind and name."""


@dataclass
class _Question:
    """A comparison in the making."""

    title: str
    setting: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] | None = None
    order: list[str] = field(default_factory=list)
    selection: dict[str, Any] = field(default_factory=dict)
    ranked: dict[tuple[object, ...], tuple[tuple[bool, int], Run]] = field(default_factory=dict)
    folders: dict[Path, None] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    states: _States = field(default_factory=dict)
    settings: dict[str, list[Any]] = field(default_factory=dict)

    def is_of(self, states: _States, settings: dict[str, list[Any]]) -> bool:
        """Whether runs of these states, with these settings by label, may be compared with those that are here."""
        return all(self.states.get(key, digests) == digests for key, digests in states.items()) and all(
            self.settings.get(label, own) == own for label, own in settings.items()
        )

    def add(self, run: Run, *, asked: bool) -> None:
        """Take what is finite of a run, or leave it if there is a better one of the same variant and seed.

        What is measured, and where it is computed, may have been changed between two of them: a seed still
        counts once. The one that the recipe asks for goes first, then the one that came further.
        """
        key = (*run.config.variant, run.config.purpose, run.config.seed)
        rank = asked, _PROGRESS[run.status]
        if key not in self.ranked or rank > self.ranked[key][0]:
            finite = {metric: value for metric, value in run.result.items() if math.isfinite(value)}
            self.ranked[key] = rank, replace(run, result=finite)

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.ranked.values()]


_Questions = dict[str, list[_Question]]
"""By what is asked; several of one kind where data, network or settings were changed between folders."""

_PROGRESS: dict[Status, int] = {"unfinished": 0, "failed": 1, "diverged": 2, "finished": 2}
"""How far a run came: a failed one may finish at another attempt."""


def read_folders(folders: Sequence[Path]) -> list[Comparison]:
    """Read the experiments in folders and bring together what belongs together.

    Runs of one recipe are one comparison, wherever they lie, unless data, network or a method's own settings were
    changed between one folder and another, and so are those of a method that it does not name (any more), if the rest
    is as the recipe has it. Other runs (it was changed since) are compared with those of the same data, model, stream
    and training.

    Args:
        folders: Experiments' folders.

    Raises:
        ValueError: If one of them is no experiment's folder, or none of them holds a run.
    """
    questions: _Questions = {}
    for folder in map(Path, folders):
        runs, broken = _read_runs(folder)
        recipe, problems = _read_recipe(folder)
        selection, unreadable = _read_selection(folder, recipe)
        broken += problems + unreadable
        theirs = _sort_in(folder, runs, recipe, questions)
        # What the folder says beside its runs belongs to the recipe's question, if any of the runs answers it.
        main = next((question for question in theirs if question.recipe), theirs[0] if theirs else None)
        if main is None:
            if not broken:
                continue
            main = _Question(folder.resolve().name, folders={folder: None})
            questions.setdefault(str(folder), []).append(main)
        main.broken += broken
        if selection and (recipe is None or main.recipe):
            labels = selection["labels"] | main.selection.get("labels", {})
            main.selection = selection | main.selection | {"labels": labels}
    if not questions:
        raise ValueError(f"there are no runs in {', '.join(map(str, folders))}")
    return _compare_all(questions)


def read_runs(runs: Iterable[Run]) -> list[Comparison]:
    """Bring runs together that are at hand already, by data, model, stream and training."""
    folders: defaultdict[Path, list[Run]] = defaultdict(list)
    for run in runs:
        folders[run.path.parent.parent].append(run)
    if not folders:
        raise ValueError("runs is empty; there must be at least one")
    questions: _Questions = {}
    for folder, members in folders.items():
        _sort_in(folder, members, None, questions)
    return _compare_all(questions)


def _read_runs(folder: Path) -> tuple[list[Run], list[Broken]]:
    if not (folder / "runs").is_dir():
        raise ValueError(f"{folder} holds no experiment: there is no folder 'runs' in it")
    runs, broken = [], []
    for entry in sorted(os.scandir(folder / "runs"), key=lambda entry: entry.name):
        path = Path(entry.path)
        if not entry.is_dir():
            continue
        try:
            run = _checked(load_run(path))
        except _MALFORMED as error:
            broken.append(Broken(path, f"{type(error).__name__}: {error}"))
        else:
            if run is not None:
                runs.append(run)
            elif any(path.iterdir()):
                broken.append(Broken(path, "holds neither config.json nor result.json"))
    return runs, broken


def _checked(run: Run | None) -> Run | None:
    """Refuse an end that no run has."""
    if run is not None:
        if run.status not in _PROGRESS:
            raise ValueError(f"status is {run.status!r}; it must be one of {', '.join(_PROGRESS)}")
        for metric, value in run.result.items():
            if not isinstance(value, int | float):
                raise TypeError(f"{metric} is {value!r}; it must be a number")
    return run


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OSError)
"""What reading a file that is not as it should be may raise."""


@dataclass(frozen=True)
class _Asked:
    """What a folder's recipe asks for: as it is written, and to be worked with."""

    values: dict[str, Any]
    recipe: Recipe


def _read_recipe(folder: Path) -> tuple[_Asked | None, list[Broken]]:
    path = folder / "recipe.json"
    if not path.exists():
        return None, []
    try:
        values = {"title": "", "source": "", "choices": []} | load_recipe_values(folder)
        recipe = _construct(values)
        for entry in recipe.methods:
            recipe.config(entry, (), 0, "result")
        return _Asked(values, recipe), []
    except _MALFORMED as error:
        return None, [Broken(path, f"{type(error).__name__}: {error}")]


def _construct(values: dict[str, Any]) -> Recipe:
    """Make a recipe of what `recipe.json` holds, which was checked when it was written."""
    entries = [
        Entry.model_construct(**entry | {"parts": tuple(GridPart.model_construct(**part) for part in entry["parts"])})
        for entry in values["methods"]
    ]
    parts = {name: Part(**values[name]) for name in ("data", "model", "stream")}
    return Recipe.model_construct(
        **values
        | parts
        | {
            "training": read_settings(values["training"]),
            "methods": tuple(entries),
            "seeds": tuple(values["seeds"]),
            "selection": Selection.model_construct(**values["selection"]),
            "measures": tuple(values["measures"]),
        }
    )


def _read_selection(folder: Path, asked: _Asked | None) -> tuple[dict[str, Any], list[Broken]]:
    """Read which settings were chosen, as far as the recipe still leaves that choice."""
    try:
        selection = load_selection(folder)
        if not selection:
            return {}, []
        chosen = {label: report["chosen"] for label, report in selection["labels"].items()}
        if asked is not None:
            choices = {entry.label: entry.variants() for entry in asked.recipe.methods if entry.label in chosen}
            offered = {
                label: {describe(parts) for parts in variants}
                for label, variants in choices.items()
                if len(variants) > 1
            }
            chosen = {label: setting for label, setting in chosen.items() if setting in offered.get(label, ())}
        if not chosen:
            return {}, []
        kept: dict[str, dict[str, Any]] = {label: dict(selection["labels"][label]) for label in chosen}
        for label, choice in kept.items():
            choice["told"] = tell_choice(label, choice, selection["on"])
        return {"on": selection["on"], "labels": kept}, []
    except _MALFORMED as error:
        return {}, [Broken(folder / "selection.json", f"cannot be read: {error}")]


def _sort_in(folder: Path, runs: Iterable[Run], asked: _Asked | None, questions: _Questions) -> list[_Question]:
    """Add the runs of a folder to the questions that they answer, and return these."""
    groups: dict[str, tuple[_Question, list[tuple[Run, bool]]]] = {}
    for run in runs:
        key, question, wanted = _find_question(run, asked)
        groups.setdefault(key, (question, []))[1].append((run, wanted))
    found = []
    # What the recipe asks for now comes first.
    for key, (question, members) in sorted(groups.items(), key=lambda group: not any(asks for _, asks in group[1][1])):
        for run, wanted in members:
            question.add(run, asked=wanted)
        states = _find_states(run for run in question.runs if run.status in FINAL)
        settings = {run.config.label: [*_setting(run), run.config.fresh] for run, _ in members}
        alike = questions.setdefault(key, [])
        same = next((other for other in alike if other.is_of(states, settings)), None)
        if same is None:
            alike.append(same := question)
        else:
            for run, wanted in members:
                same.add(run, asked=wanted)
        same.states |= states
        same.settings |= settings
        same.folders[folder] = None
        found.append(same)
    return found


def _find_states(runs: Iterable[Run]) -> _States:
    """Find out of what states of the user's own data and networks runs are; built-in ones need no look at the logs."""
    states: _States = defaultdict(set)
    for run in runs:
        if ":" in run.config.model.name or run.config.data.name not in data.names():
            for key, digest in read_sources(run).items():
                states[key].add(digest)
    return dict(states)


def _find_question(run: Run, asked: _Asked | None) -> tuple[str, _Question, bool]:
    """Say what a run's question is known by, how it begins, and whether the recipe asks for this very run."""
    expected = _expected(asked.recipe, run) if asked else None
    if asked and _is_alike(run, expected or asked.recipe) and (expected is None or expected.fresh == run.config.fresh):
        setting = {name: asked.values[name] for name in SETTING}
        key = json.dumps([asked.values.get("title"), *setting.values()], sort_keys=True)
        order = [entry.label for entry in asked.recipe.methods]
        title = asked.recipe.title or _describe(run)
        question = _Question(title, setting, asked.values, order)
    else:
        setting = dict(zip(SETTING, _setting(run), strict=True))
        key, question = json.dumps(_setting(run), sort_keys=True), _Question(_describe(run), setting)
    return key, question, run.config == expected


def _is_alike(run: Run, asked: RunConfig | Recipe) -> bool:
    return all(getattr(asked, name) == getattr(run.config, name) for name in SETTING)


def _expected(recipe: Recipe, run: Run) -> RunConfig | None:
    """What the recipe asks for under the run's label, with the run's settings and seed."""
    config = run.config
    return next(
        (
            recipe.config(entry, config.methods, config.seed, config.purpose)
            for entry in recipe.methods
            if entry.label == config.label
        ),
        None,
    )


def _setting(run: Run) -> list[Any]:
    return [asdict(getattr(run.config, name)) for name in SETTING]


def _describe(run: Run) -> str:
    config = run.config
    return f"{config.stream.name.replace('_', ' ')} on {config.data} with {config.model}"


def _tell_apart(questions: Sequence[_Question]) -> None:
    """Put what differs into the titles of questions that are of the same stream, data and network by name."""
    of_a_kind: defaultdict[str, list[tuple[_Question, dict[str, str]]]] = defaultdict(list)
    for question in questions:
        if question.setting:
            parts = {name: question.setting[name] for name in SETTING[:3]}
            options = {f"{name}.{key}": value for name, part in parts.items() for key, value in part["options"].items()}
            told = {key: json.dumps(value) for key, value in (options | question.setting["training"]).items()}
            of_a_kind[json.dumps([part["name"] for part in parts.values()])].append((question, told))
    titles = Counter(question.title for question in questions)
    for alike in of_a_kind.values():
        for question, own in alike:
            if question.recipe and titles[question.title] == 1:
                continue  # one that is named is told by its name
            differs = [key for key in own if any(own[key] != other.get(key) for _, other in alike)]
            if differs:
                more = ", …" if len(differs) > _DIFFERENCES else ""
                listed = ", ".join(f"{key}={own[key]}" for key in differs[:_DIFFERENCES])
                question.title += f" ({listed}{more})"


_DIFFERENCES = 4
"""How many of them a title names."""


def _compare_all(questions: _Questions) -> list[Comparison]:
    _tell_apart([question for alike in questions.values() for question in alike])
    for alike in questions.values():
        for question in alike if len(alike) > 1 else ():  # Something was changed between the folders.
            question.title += f" ({', '.join(map(str, question.folders))})"
    return [_compare(question) for alike in questions.values() for question in alike]


def _compare(question: _Question) -> Comparison:
    variants: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    trials = []
    chosen = {label: report["chosen"] for label, report in question.selection.get("labels", {}).items()}
    for run in question.runs:
        label, settings = run.config.variant
        counts = run.config.purpose == "result"
        if counts and chosen.get(label, settings) == settings:
            variants[label, settings].append(run)
        if not counts or (label in chosen and question.selection["on"] == "test"):
            trials.append(run)
    settings_of: defaultdict[str, list[str]] = defaultdict(list)
    for label, settings in variants:
        settings_of[label].append(settings)
    for label, found in settings_of.items():
        if len(found) > 1:  # Nothing was chosen (yet): all of them are contenders, and all were tried.
            trials += [run for settings in found for run in variants[label, settings]]
    configs = [members[0].config for members in variants.values()]
    entries = (question.recipe or {}).get("methods", [])
    plain = dict.fromkeys(config.label for config in configs if not config.methods and not config.fresh)
    plain |= dict.fromkeys(entry["label"] for entry in entries if not entry["parts"] and not entry["fresh"])
    vanilla = _find_vanilla(list(plain))
    rank = {label: place for place, label in enumerate(question.order)}
    contenders = [
        Contender(
            name=label if len(settings_of[label]) == 1 else full_name(label, settings),
            settings=settings,
            role="fresh" if members[0].config.fresh else "vanilla" if label == vanilla else "method",
            label=label,
            runs=tuple(sorted(members, key=lambda run: run.config.seed)),
        )
        for (label, settings), members in variants.items()
    ]
    contenders.sort(key=lambda contender: (rank.get(contender.label, len(rank)), _ROLES.index(contender.role)))
    return Comparison(
        title=question.title,
        headline=(question.recipe or {}).get("headline")
        or _headline([run for contender in contenders for run in contender.runs] or trials),
        contenders=tuple(contenders),
        trials=tuple(trials),
        recipe=question.recipe,
        selection=question.selection,
        folders=tuple(question.folders),
        broken=tuple(question.broken),
        mixed=tuple(
            f"The runs are of {len(digests)} states of {kind} {name}, which was changed between them."
            for (kind, name), digests in question.states.items()
            if len(digests) > 1
        ),
    )


_ROLES: tuple[Role, ...] = ("vanilla", "fresh", "method")


def _find_vanilla(plain: list[str]) -> str | None:
    """Return the label of plain training among those without a method: "vanilla", or the only one.

    A recipe may compare networks instead of methods; then none of them is doing nothing.
    """
    if "vanilla" in plain:
        return "vanilla"
    return plain[0] if len(plain) == 1 else None


def _headline(runs: Sequence[Run]) -> str:
    """The number that decides: what the stream says, or the first that results have."""
    if runs:
        try:
            return streams.stream_class(runs[0].config.stream.name).headline
        except ValueError:
            return next((name for run in runs for name in run.result), "final_test_accuracy")
    return "final_test_accuracy"
