"""Group runs into comparisons: which runs belong together, and what each contender is called."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pliant import data, streams
from pliant.experiments.recipe import Recipe
from pliant.experiments.report.comparison import Broken, Comparison, Contender, Role
from pliant.experiments.report.folders import PROGRESS, Folder, WrittenRecipe, read_folder
from pliant.experiments.run_config import SETTING, RunConfig, full_name
from pliant.experiments.store import FINAL, Run, read_sources

_Versions = dict[tuple[str, str], set[str]]
"""Digests of the user's own data and networks, by kind and name."""


@dataclass
class _Draft:
    """A comparison that is being assembled."""

    title: str
    setting: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] | None = None
    order: list[str] = field(default_factory=list)
    selection: dict[str, Any] = field(default_factory=dict)
    ranked: dict[tuple[object, ...], tuple[tuple[bool, int], Run]] = field(default_factory=dict)
    folders: dict[Path, None] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    versions: _Versions = field(default_factory=dict)
    settings: dict[str, list[Any]] = field(default_factory=dict)

    def fits(self, versions: _Versions, settings: dict[str, list[Any]]) -> bool:
        """Return whether runs with these versions, and these settings by label, are comparable with this draft's."""
        return all(self.versions.get(key, digests) == digests for key, digests in versions.items()) and all(
            self.settings.get(label, own) == own for label, own in settings.items()
        )

    def add(self, run: Run, *, asked: bool) -> None:
        """Add a run, unless there is a better run of the same variant and seed.

        Two such runs may differ in measures or device; the seed still counts once. The run that the recipe asks for
        wins, then the run that got further.
        """
        key = (*run.config.variant, run.config.purpose, run.config.seed)
        rank = asked, PROGRESS[run.status]
        if key not in self.ranked or rank > self.ranked[key][0]:
            self.ranked[key] = rank, run

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.ranked.values()]


_Drafts = dict[str, list[_Draft]]
"""Drafts by title and setting. A key has several if data, network or settings changed between folders."""


def compare_folders(folders: Sequence[Path]) -> list[Comparison]:
    """Read experiments' folders and group their runs into comparisons.

    Runs of one recipe form one comparison, in whichever folder they are. Runs of methods that the recipe does not name
    (any more) join it if all else agrees. If data, network or a method's settings changed between folders, there is one
    comparison per version. Runs of other recipes are grouped by data, model, stream and training.

    Args:
        folders: Experiments' folders.

    Raises:
        ValueError: If one is not an experiment's folder, or if there are no runs.
    """
    drafts: _Drafts = {}
    for folder in map(read_folder, map(Path, folders)):
        found = _sort_in(folder, drafts)
        # The folder's other files belong to the recipe's comparison, if it has runs.
        main = next((draft for draft in found if draft.recipe), found[0] if found else None)
        if main is None:
            if not folder.broken:
                continue
            main = _Draft(folder.path.resolve().name, folders={folder.path: None})
            drafts.setdefault(str(folder.path), []).append(main)
        main.broken += folder.broken
        if folder.selection and (folder.recipe is None or main.recipe):
            labels = folder.selection["labels"] | main.selection.get("labels", {})
            main.selection = folder.selection | main.selection | {"labels": labels}
    if not drafts:
        raise ValueError(f"there are no runs in {', '.join(map(str, folders))}")
    return _finish_all(drafts)


def compare_runs(runs: Iterable[Run]) -> list[Comparison]:
    """Group loaded runs by data, model, stream and training."""
    folders: defaultdict[Path, list[Run]] = defaultdict(list)
    for run in runs:
        folders[run.path.parent.parent].append(run)
    if not folders:
        raise ValueError("runs is empty; pass at least one run")
    drafts: _Drafts = {}
    for path, members in folders.items():
        _sort_in(Folder(path, members), drafts)
    return _finish_all(drafts)


def _sort_in(folder: Folder, drafts: _Drafts) -> list[_Draft]:
    """Add the runs of a folder to the drafts, and return the drafts that got some."""
    groups: dict[str, tuple[_Draft, list[tuple[Run, bool]]]] = {}
    for run in folder.runs:
        key, draft, asked = _begin_draft(run, folder.recipe)
        groups.setdefault(key, (draft, []))[1].append((run, asked))
    found = []
    # Groups with runs that the recipe asks for come first.
    for key, (draft, members) in sorted(groups.items(), key=lambda group: not any(asked for _, asked in group[1][1])):
        for run, asked in members:
            draft.add(run, asked=asked)
        versions = _find_versions(run for run in draft.runs if run.status in FINAL)
        last = {run.config.label: run for run, _ in members}
        settings = {label: [*_setting(run), run.config.fresh] for label, run in last.items()}
        alike = drafts.setdefault(key, [])
        same = next((other for other in alike if other.fits(versions, settings)), None)
        if same is None:
            alike.append(same := draft)
        else:
            for run, asked in members:
                same.add(run, asked=asked)
        same.versions |= versions
        same.settings |= settings
        same.folders[folder.path] = None
        found.append(same)
    return found


def _find_versions(runs: Iterable[Run]) -> _Versions:
    """Read from the logs which versions of the user's data and networks runs used. Built-in ones have no versions."""
    versions: _Versions = defaultdict(set)
    for run in runs:
        if ":" in run.config.model.name or run.config.data.name not in data.names():
            for key, digest in read_sources(run).items():
                versions[key].add(digest)
    return dict(versions)


def _begin_draft(run: Run, written: WrittenRecipe | None) -> tuple[str, _Draft, bool]:
    """Return the key and an empty draft of a run's comparison, and whether the recipe asks for this very run."""
    expected = _expected(written.recipe, run) if written else None
    if (
        written
        and _has_setting(run, expected or written.recipe)
        and (expected is None or expected.fresh == run.config.fresh)
    ):
        setting = {name: written.values.get(name) for name in SETTING}
        key = json.dumps([written.recipe.title, *setting.values()], sort_keys=True)
        order = [entry.label for entry in written.recipe.methods]
        draft = _Draft(written.recipe.title or _describe(run), setting, written.values, order)
    else:
        parts = _setting(run)
        key, draft = json.dumps(parts, sort_keys=True), _Draft(_describe(run), dict(zip(SETTING, parts, strict=True)))
    return key, draft, run.config == expected


def _has_setting(run: Run, asked: RunConfig | Recipe) -> bool:
    return all(getattr(asked, name) == getattr(run.config, name) for name in SETTING)


def _expected(recipe: Recipe, run: Run) -> RunConfig | None:
    """Return the recipe's configuration for the run's label, method settings and seed."""
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
    parts = (getattr(run.config, name) for name in SETTING)
    return [None if part is None else asdict(part) for part in parts]


def _describe(run: Run) -> str:
    config = run.config
    return f"{config.stream.name.replace('_', ' ')} on {config.data} with {config.model}"


_DIFFERENCES = 4
"""The most differing options that a title lists."""


def _add_differences_to_titles(drafts: Sequence[_Draft]) -> None:
    """Add differing options to the titles of drafts with the same stream, data and network."""
    of_a_kind: defaultdict[str, list[tuple[_Draft, dict[str, str]]]] = defaultdict(list)
    for draft in drafts:
        if draft.setting:
            parts = {name: draft.setting[name] for name in SETTING[:3]}
            options = {f"{name}.{key}": value for name, part in parts.items() for key, value in part["options"].items()}
            written = {key: json.dumps(value) for key, value in (options | draft.setting["training"]).items()}
            of_a_kind[json.dumps([part["name"] for part in parts.values()])].append((draft, written))
    titles = Counter(draft.title for draft in drafts)
    for alike in of_a_kind.values():
        for draft, own in alike:
            if draft.recipe and titles[draft.title] == 1:
                continue  # The recipe's own title is enough.
            differs = [key for key in own if any(own[key] != other.get(key) for _, other in alike)]
            if differs:
                more = ", …" if len(differs) > _DIFFERENCES else ""
                listed = ", ".join(f"{key}={own[key]}" for key in differs[:_DIFFERENCES])
                draft.title += f" ({listed}{more})"


def _finish_all(drafts: _Drafts) -> list[Comparison]:
    _add_differences_to_titles([draft for alike in drafts.values() for draft in alike])
    for alike in drafts.values():
        for draft in alike if len(alike) > 1 else ():  # A version changed between the folders.
            draft.title += f" ({', '.join(map(str, draft.folders))})"
    return [_finish(draft) for alike in drafts.values() for draft in alike]


def _finish(draft: _Draft) -> Comparison:
    variants: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    trials = []
    chosen = {label: report["chosen"] for label, report in draft.selection.get("labels", {}).items()}
    for run in draft.runs:
        label, settings = run.config.variant
        counts = run.config.purpose == "result"
        if counts and chosen.get(label, settings) == settings:
            variants[label, settings].append(run)
        if not counts or (label in chosen and draft.selection["on"] == "test"):
            trials.append(run)
    settings_of: defaultdict[str, list[str]] = defaultdict(list)
    for label, settings in variants:
        settings_of[label].append(settings)
    for label, found in settings_of.items():
        if len(found) > 1:  # No choice was made: every setting is both a contender and a trial.
            trials += [run for settings in found for run in variants[label, settings]]
    configs = [members[0].config for members in variants.values()]
    entries = (draft.recipe or {}).get("methods", [])
    plain = dict.fromkeys(config.label for config in configs if not config.methods and not config.fresh)
    plain |= dict.fromkeys(entry["label"] for entry in entries if not entry["parts"] and not entry.get("fresh"))
    vanilla = _find_vanilla(list(plain))
    rank = {label: place for place, label in enumerate(draft.order)}
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
        title=draft.title,
        headline=(draft.recipe or {}).get("headline")
        or _headline([run for contender in contenders for run in contender.runs] or trials),
        contenders=tuple(contenders),
        trials=tuple(trials),
        recipe=draft.recipe,
        selection=draft.selection,
        folders=tuple(draft.folders),
        broken=tuple(draft.broken),
        mixed=tuple(
            f"The runs used {len(digests)} versions of {kind} {name}, which changed in between."
            for (kind, name), digests in draft.versions.items()
            if len(digests) > 1
        ),
    )


_ROLES: tuple[Role, ...] = ("vanilla", "fresh", "method")


def _find_vanilla(plain: list[str]) -> str | None:
    """Return the label of plain training among the labels without a method: "vanilla", or the only one.

    A recipe may compare networks instead of methods. Then no label is plain training.
    """
    if "vanilla" in plain:
        return "vanilla"
    return plain[0] if len(plain) == 1 else None


def _headline(runs: Sequence[Run]) -> str:
    """Return the stream's headline metric, or the first metric of the results if the stream is unknown."""
    if runs:
        try:
            return streams.stream_class(runs[0].config.stream.name).headline
        except ValueError:
            return next((name for run in runs for name in run.result), "final_test_accuracy")
    return "final_test_accuracy"
