"""From run folders to comparisons: which runs belong together, what each contender is called, what is broken.

Everything comes from the folders alone, at any moment: finished, under way, interrupted or damaged.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pliant import streams
from pliant.experiments.recipe import Recipe, RecipeError, make_recipe
from pliant.experiments.store import Run, load_recipe, load_run, load_selection

Role = Literal["vanilla", "fresh", "method"]


@dataclass(frozen=True)
class Contender:
    """A row of the comparison: one method with one setting, or a baseline.

    Args:
        name: What the report calls it.
        settings: Its methods with their settings.
        role: "vanilla": plain training; "fresh": an untrained network at every task; else "method".
        label: What the recipe calls it.
        runs: Its runs, however they ended, in order of their seeds.
    """

    name: str
    settings: str
    role: Role
    label: str
    runs: tuple[Run, ...]

    def values(self, metric: str) -> dict[int, float]:
        """A number of the results for each seed that finished."""
        return {run.config.seed: run.result[metric] for run in self.runs if metric in run.result}

    @property
    def diverged(self) -> int:
        """How many seeds have diverged."""
        return sum(run.status == "diverged" for run in self.runs)


@dataclass(frozen=True)
class Broken:
    """A folder that cannot be read.

    Args:
        path: Where it is.
        reason: What is wrong with it.
    """

    path: Path
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Runs that answer one question.

    Args:
        title: What it is called.
        headline: The number of a run's result that decides.
        contenders: What is compared, in the recipe's order.
        trials: Runs with settings that were tried, chosen or not.
        recipe: What was asked for; None if the folder does not tell.
        selection: Which settings were chosen, and by what; empty if there was nothing to choose.
        folders: Where the runs lie.
        broken: What could not be read there.
    """

    title: str
    headline: str
    contenders: tuple[Contender, ...]
    trials: tuple[Run, ...] = ()
    recipe: dict[str, Any] | None = None
    selection: dict[str, Any] = field(default_factory=dict)
    folders: tuple[Path, ...] = ()
    broken: tuple[Broken, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """All runs of the contenders."""
        return [run for contender in self.contenders for run in contender.runs]

    def baseline(self, role: Role) -> Contender | None:
        """The contender in this role, the first if there are several."""
        return next((contender for contender in self.contenders if contender.role == role), None)

    @property
    def metrics(self) -> list[str]:
        """The numbers that results have, the headline first."""
        names = dict.fromkeys([self.headline])
        for run in self.runs:
            names |= dict.fromkeys(run.result)
        return [name for name in names if any(name in run.result for run in self.runs)]


@dataclass
class _Question:
    """A comparison in the making."""

    title: str
    recipe: dict[str, Any] | None
    order: list[str]
    selection: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    folders: dict[Path, None] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)


def read_folders(folders: Sequence[Path]) -> list[Comparison]:
    """Read the experiments in folders and bring together what belongs together.

    Runs of one recipe are one comparison, wherever they lie; runs that the folder's recipe does not account for
    (it was changed since) are compared with those of the same data, model, stream and training.

    Args:
        folders: Experiments' folders.

    Raises:
        ValueError: If one of them is no experiment's folder, or none of them holds a run.
    """
    questions: dict[str, _Question] = {}
    for folder in map(Path, folders):
        runs, broken = _read_runs(folder)
        recipe, problems = _read_recipe(folder)
        first = None
        for run in runs:
            question = _question_of(run, recipe, questions)
            first = first or question
            question.runs[run.id] = _better(run, question.runs.get(run.id))
            question.folders[folder] = None
        if first is None:
            if not (broken or problems):
                continue
            first = questions.setdefault(str(folder), _Question(folder.resolve().name, None, []))
            first.folders[folder] = None
        first.broken += broken + problems
        try:
            first.selection = first.selection or load_selection(folder)
        except ValueError as error:
            first.broken.append(Broken(folder / "selection.json", f"cannot be read: {error}"))
    if not questions:
        raise ValueError(f"there are no runs in {', '.join(map(str, folders))}")
    return [_compare(question) for question in questions.values()]


def read_runs(runs: Iterable[Run]) -> list[Comparison]:
    """Bring runs together that are at hand already, by data, model, stream and training."""
    questions: dict[str, _Question] = {}
    for run in runs:
        question = _question_of(run, None, questions)
        question.runs[run.id] = _better(run, question.runs.get(run.id))
        question.folders[run.path.parent.parent] = None
    if not questions:
        raise ValueError("runs is empty; there must be at least one")
    return [_compare(question) for question in questions.values()]


def _read_runs(folder: Path) -> tuple[list[Run], list[Broken]]:
    if not (folder / "runs").is_dir():
        raise ValueError(f"{folder} holds no experiment: there is no folder 'runs' in it")
    runs, broken = [], []
    for entry in sorted(os.scandir(folder / "runs"), key=lambda entry: entry.name):
        path = Path(entry.path)
        if not entry.is_dir():
            continue
        try:
            run = load_run(path)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            broken.append(Broken(path, f"{type(error).__name__}: {error}"))
        else:
            if run is not None:
                runs.append(run)
            elif any(path.iterdir()):
                broken.append(Broken(path, "holds neither config.json nor result.json"))
    return runs, broken


def _read_recipe(folder: Path) -> tuple[Recipe | None, list[Broken]]:
    path = folder / "recipe.json"
    if not path.exists():
        return None, []
    try:
        return make_recipe(load_recipe(folder)), []
    except (RecipeError, ValueError) as error:
        return None, [Broken(path, str(error))]


def _question_of(run: Run, recipe: Recipe | None, questions: dict[str, _Question]) -> _Question:
    if recipe is not None and _accounts_for(recipe, run):
        asked = recipe.model_dump(mode="json")
        key = json.dumps([asked[name] for name in ("title", "data", "model", "stream", "training")], sort_keys=True)
        order = [entry.label for entry in recipe.methods]
        title = recipe.title or _describe(run)
        return questions.setdefault(key, _Question(title, asked, order))
    return questions.setdefault(json.dumps(_setting(run), sort_keys=True), _Question(_describe(run), None, []))


def _accounts_for(recipe: Recipe, run: Run) -> bool:
    """Whether the recipe asks for the run, but for its methods' settings and its seed."""
    config = run.config
    for entry in recipe.methods:
        if entry.label == config.label:
            asked = recipe.config(entry, config.methods, config.seed, config.purpose)
            return all(getattr(asked, name) == getattr(config, name) for name in (*_SETTING, "fresh"))
    return False


_SETTING = ("data", "model", "stream", "training")


def _setting(run: Run) -> list[Any]:
    return [asdict(getattr(run.config, name)) for name in _SETTING]


def _describe(run: Run) -> str:
    config = run.config
    return f"{config.stream.name.replace('_', ' ')} on {config.data} with {config.model}"


def _better(run: Run, other: Run | None) -> Run:
    """Of two copies of a run, the one that is further."""
    if other is None or (other.status == "unfinished" and run.status != "unfinished"):
        return run
    return other


def _compare(question: _Question) -> Comparison:
    variants: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    trials = []
    chosen = {label: report["chosen"] for label, report in question.selection.get("labels", {}).items()}
    for run in question.runs.values():
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
    vanilla = _find_vanilla({label: members[0] for (label, _), members in variants.items()})
    rank = {label: place for place, label in enumerate(question.order)}
    contenders = [
        Contender(
            name=label if len(settings_of[label]) == 1 else _full_name(label, settings),
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
    )


_ROLES: tuple[Role, ...] = ("vanilla", "fresh", "method")


def _find_vanilla(runs: dict[str, Run]) -> str | None:
    """Return the label of plain training: "vanilla", or the only entry without a method.

    A recipe may compare networks instead of methods; then none of them is doing nothing.
    """
    plain = [label for label, run in runs.items() if not run.config.methods and not run.config.fresh]
    if "vanilla" in plain:
        return "vanilla"
    return plain[0] if len(plain) == 1 else None


def _full_name(label: str, settings: str) -> str:
    return settings if settings.startswith(label) else f"{label}: {settings}" if settings else label


def _headline(runs: Sequence[Run]) -> str:
    """The number that decides: what the stream says, or the first that results have."""
    if runs:
        try:
            return streams.stream_class(runs[0].config.stream.name).headline
        except ValueError:
            return next((name for run in runs for name in run.result), "final_test_accuracy")
    return "final_test_accuracy"
