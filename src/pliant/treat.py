"""Which remedy works best from a checkpoint, on new data: `pliant.treat`, and what it returns.

Settings of many methods compete in rounds on held-out data (`pliant.experiments.halving`). The winner is then compared
with continuing and with training from scratch, on seeds and test data that chose nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pliant._duration import parse_duration, write_duration
from pliant._files import is_foreign, read_regular, set_aside, write_atomically
from pliant._importing import naming_extra
from pliant._json import seal, unseal
from pliant._validation import check_positive_int
from pliant.compare import make_values

if TYPE_CHECKING:
    import pandas
    from rich.console import Console

    from pliant.experiments.engines import Engine
    from pliant.experiments.halving import Tried
    from pliant.experiments.recipe import Entry, Recipe
    from pliant.experiments.report.document import Report
    from pliant.experiments.report.treatment import Action, TreatmentSection
    from pliant.experiments.run_config import RunConfig
    from pliant.experiments.store import Status

AUTO = ("shrink_perturb", "fire", "head_reset", "dash", "redo", "l2_init", "spectral", "swr")
"""The methods that are tried by default, most likely to help first: a short budget drops the last ones."""

_NOT_TRIED = ("full_reset", "hare_tortoise", "trac")
"""Methods that "all" leaves out: a full reset is training from scratch, and the average of Hare & Tortoise and the
reference of TRAC would be an untrained network.
"""

_FEWEST_SEEDS = 3
_HELD_OUT = 0.2
_NAMED = 8
"""How many of the settings that the budget leaves out the answer names."""
_SLOWER = 1.25
"""How much longer a run with a method is assumed to take, until runs have been timed."""
_STARTUP = 2.0
"""Seconds that a run takes to load its data and build its network."""


class Treatment:
    """What to do with a checkpoint, and the runs behind it; a notebook shows it as a page.

    Args:
        folder: The folder of the runs.
        section: The analysis.
        statuses: How each run ended, by its id.
        seconds: The time that the call took.
    """

    def __init__(self, folder: Path, section: TreatmentSection, statuses: Mapping[str, Status], seconds: float) -> None:
        self.folder = folder
        self.statuses = dict(statuses)
        self.seconds = seconds
        self._section = section

    @property
    def action(self) -> Action:
        """What to do: "apply" the remedy, train from "scratch", "continue"; "none" if runs are missing."""
        return self._section.action

    @property
    def remedy(self) -> str:
        """The best remedy with its settings, advised or not."""
        return self._section.remedy

    @property
    def answer(self) -> str:
        """What to do, by how much it is better, and how sure that is."""
        return str(self._section.answer)

    @property
    def code(self) -> str:
        """Python code that does what the answer says: a function `prepare(batches)`."""
        return self._section.code

    @property
    def tried(self) -> list[Tried]:
        """Every setting that was tried, with its accuracy on held-out data in each round; the best first."""
        return self._section.all_tried

    @cached_property
    def table(self) -> pandas.DataFrame:
        """Continuing, the remedy and training from scratch: means over seeds, and the time relative to scratch."""
        import pandas

        return pandas.DataFrame(self._section.rows()).set_index("method")

    @cached_property
    def report(self) -> Report:
        """The page as a report."""
        from pliant.experiments.report.document import Report

        return Report([self._section])

    def save(self, path: str | Path) -> list[Path]:
        """Write the report: html, md, csv or tex by the ending of the path.

        Returns:
            The files written.
        """
        return self.report.save(path)

    def __str__(self) -> str:
        from pliant._console import SafeConsole

        text = io.StringIO()
        self.report.print(SafeConsole(file=text, width=120))
        return f"{text.getvalue().rstrip()}\n\n{self.code}".rstrip("\n")

    def __repr__(self) -> str:
        return f"Treatment({str(self.folder)!r}, {self.action!r}, {len(self.statuses)} runs)"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def treat(
    checkpoint: str | PathLike[str],
    *,
    model: str | Mapping[str, Any] | Callable[..., Any],
    data: str | PathLike[str] | Mapping[str, Any] | Callable[..., Any],
    old_data: str | PathLike[str] | Mapping[str, Any] | Callable[..., Any] | None = None,
    methods: str | Sequence[str] = "auto",
    budget: str | float | None = "30m",
    seeds: int = 5,
    epochs: int = 10,
    scratch_epochs: int | None = None,
    training: Mapping[str, Any] | None = None,
    key: str = "",
    optimizer_state: str = "",
    out: str | PathLike[str] | None = None,
    workers: int | None = None,
    engine: Engine | None = None,
    device: str = "cpu",
    checkpoint_seconds: float = 30.0,
    progress: bool | Console = True,
) -> Treatment:
    """Find out what to do with a checkpoint before it learns new data: continue, apply a remedy, or start over.

    Runs are saved in a folder. The same call resumes what was interrupted, with the same answer.

    Args:
        checkpoint: The weights: a safetensors file, or a file written by `torch.save`.
        model: The network: a name (`pliant.models.names()`), a function `(shape, classes) -> Module`, or
            "file.py:function"; a table adds options.
        data: The data to train on: a name (`pliant.data.names()`), a folder of images, an .npz file or a function, as
            for `pliant.compare`. A fifth of data without a test set is held out for testing.
        old_data: Data that the checkpoint has learned. Its test examples show what is forgotten. New examples that are
            among its training examples neither choose nor test a remedy.
        methods: "auto" for eight methods, "all" for every method that a trained network can get, or the methods to
            try, separated by commas: "shrink_perturb,l2_init:lam=1e-2|1e-3,swr+l2". A method without settings is tried
            with its default and its published sweep.
        budget: About how long it may take, e.g. "30m"; as many settings are tried as fit. None tries all.
        seeds: The number of seeds that test the winner; three or more.
        epochs: Epochs of training on the new data.
        scratch_epochs: Epochs of training from scratch, which may need more; by default `epochs`.
        training: Settings of the training, e.g. `{"lr": 1e-3}`: see `pliant.training.Settings`. Batches have 64
            examples by default.
        key: The place of the weights in the checkpoint; see `pliant.diagnose`.
        optimizer_state: The place of the optimizer's state in the checkpoint, e.g. "optimizer". By default all runs
            start with a new optimizer.
        out: The folder of the runs; by default `runs/treat-CHECKPOINT-DATA`.
        workers: The number of processes; by default the number of cores.
        engine: Where to run instead of processes. It is closed at the end.
        device: Where to compute.
        checkpoint_seconds: Seconds between two checkpoints of a run.
        progress: Whether to print progress, or the rich console to print it to.

    Returns:
        The answer: `print()` it, or see `action`, `answer`, `code`, `table` and `save()`.

    Raises:
        ValueError: If an argument is wrong, the checkpoint does not fit the network, or the budget is too short for
            even one setting. Nothing is trained then.
        ImportError: If the extra `pliant[report]` is not installed.
    """
    with naming_extra("a treatment", "report"):
        import altair as altair
        import jinja2 as jinja2
        import pandas as pandas
        from rich.console import Console

        from pliant._console import SafeConsole
        from pliant.experiments.engines import ProcessEngine
        from pliant.experiments.experiment import check_device

    begun = time.monotonic()
    if check_positive_int("seeds", seeds) < _FEWEST_SEEDS:
        raise ValueError(f"seeds is {seeds}; it must be {_FEWEST_SEEDS} or more, which an interval needs")
    if not Path(checkpoint).is_file():
        raise ValueError(f"checkpoint: there is no file {str(checkpoint)!r}")
    limit = None if budget is None else parse_duration("budget", budget)
    if engine is not None and workers is not None:
        raise ValueError(f"workers is {workers}, but an engine is given, which has its own; pass one of the two")
    console = progress if isinstance(progress, Console) else SafeConsole(quiet=not progress)
    names, values = make_values(
        data=data,
        model=model,
        stream={"name": "single", "epochs": check_positive_int("epochs", epochs)},
        start={"path": str(checkpoint), "key": key, "optimizer": optimizer_state},
        old_data=old_data,
        training={"batch_size": 64, **(training or {})},
        device=device,
        seeds=seeds,
        selection={"fraction": _HELD_OUT},
    )
    stem = Path(checkpoint).stem
    values["title"] = f"What to do with {Path(checkpoint).name} before it learns {names['data']}"
    folder = Path(out or Path("runs") / f"treat-{stem}-{names['data']}".replace(":", "_"))
    place = engine or ProcessEngine(workers)
    if isinstance(place, ProcessEngine):
        check_device(device)
    try:
        search = _Search(values, folder, console, scratch_epochs or epochs)
        search.prepare(methods, limit, place.capacity())
        section, statuses = search.run(place, checkpoint_seconds)
    finally:
        place.close()
    return Treatment(folder, section, statuses, time.monotonic() - begun)


class _Search:
    """The search for the best remedy: prepared once, done round by round, resumed from its folder.

    Args:
        values: The recipe without its methods.
        folder: The folder of the runs.
        console: Where to print.
        scratch_epochs: Epochs of training from scratch.
    """

    def __init__(self, values: dict[str, Any], folder: Path, console: Console, scratch_epochs: int) -> None:
        from pliant.experiments.report.treatment import CONTINUE, SCRATCH

        self.values, self.folder, self.console = values, folder, console
        self.baselines: list[dict[str, Any]] = [
            {"label": CONTINUE, "parts": []},
            {"label": SCRATCH, "parts": [], "fresh": True, "stream": {"epochs": scratch_epochs}},
        ]
        self.left_out: list[str] = []

    def tell(self, line: str) -> None:
        """Print a line as it is."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def prepare(self, methods: str | Sequence[str], budget: float | None, workers: int) -> None:
        """Check everything, list the settings to try, and plan the rounds; nothing is trained."""
        from pliant import data
        from pliant.experiments.experiment import find_outdated, rehearse
        from pliant.experiments.run import make_stream

        self.tell("preparing: reading the data, loading the checkpoint, building the network")
        base = self._recipe([])
        present = rehearse(base)
        for warning in (data.tell_namesake(base.data.name), *find_outdated(self.folder, present)):
            if warning:
                self.tell(f"warning: {warning}")
        self.config = base.config(base.methods[0], (), base.seeds[0], "result")
        self.stream = make_stream(self.config)
        self.asked = self._recipe(_interleave(self._list_entries(methods)))
        self._plan([entry.label for entry in self.asked.methods[2:]], budget, workers)

    def _recipe(self, entries: Sequence[Mapping[str, Any]]) -> Recipe:
        from pliant.experiments.recipe import make_recipe

        return make_recipe({**self.values, "methods": [*self.baselines, *entries]})

    def _list_entries(self, methods: str | Sequence[str]) -> list[Entry]:
        """Return the methods to try, each with the grid of its settings."""
        from pliant import methods as registry
        from pliant.experiments.recipe import BASELINES, RecipeError
        from pliant.experiments.run import make_methods, make_model, take_example

        given = methods.split(",") if isinstance(methods, str) else list(methods)
        texts = [text.strip() for text in given if text.strip() not in BASELINES]
        automatic = texts in (["auto"], ["all"])
        if not texts:
            raise ValueError("methods names no method to try; leave it out to try the usual ones, or name some")
        per_epoch = -(-len(self.stream[0].train) // self.config.training.batch_size)
        if automatic:
            more = sorted(set(registry.names()) - {*AUTO, *_NOT_TRIED}) if texts == ["all"] else ["optimizer_reset"]
            keeps_state = bool(self.values["start"]["optimizer"])
            texts = [*AUTO, *(name for name in more if keeps_state or name != "optimizer_reset")]
            texts = [text for text in texts if registry.info(text).kind != "architecture"]
        try:
            recipe = self._recipe([_as_entry(text, per_epoch) for text in texts])
        except RecipeError as error:  # The list is what the user wrote, not its place in a recipe.
            raise ValueError(re.sub(r"^methods\b[\w.]*", "methods", str(error), flags=re.MULTILINE)) from error
        found = []
        model, example = make_model(self.config, self.stream), take_example(self.stream)
        for entry in recipe.methods[2:]:
            try:
                for parts in entry.variants()[: 1 if automatic else None]:
                    make_methods(replace(self.config, methods=parts), copy.deepcopy(model), example)
            except ValueError as error:
                if not automatic:
                    raise ValueError(f"{entry.label}: {error}") from error
                reason = str(error).partition("\n")[0].partition(";")[0]
                self.left_out.append(f"{entry.label} was not tried, because it does not fit this network: {reason}.")
            else:
                found.append(entry)
        return found

    def _plan(self, labels: Sequence[str], budget: float | None, workers: int) -> None:
        """Choose as many settings as fit the budget; a plan that the folder holds already stays."""
        from pliant.experiments.halving import fit_settings, seconds_needed

        self.labels, self.budget, self.workers = list(labels), budget, workers
        self.plan: dict[str, Any] = {"asked": self.asked.model_dump(mode="json"), "budget": budget, "stopped": None}
        kept = self._read_plan()
        if kept is not None and all(kept.get(name) == self.plan[name] for name in ("asked", "budget")):
            self.plan = kept
        else:
            self.plan["seconds"] = self._estimate()
            run, scratch = self.plan["seconds"]
            fitting = len(labels)
            if budget is not None:
                fitting = fit_settings(len(labels), len(self.asked.seeds), run, scratch, workers, budget)
            if fitting == 0:
                needed = seconds_needed(1, len(self.asked.seeds), run, scratch, workers)
                raise ValueError(
                    f"budget is {write_duration(budget or 0)}, but a run takes about {write_duration(run)} here and a "
                    f"single remedy with {len(self.asked.seeds)} seeds needs {write_duration(needed)}; give more time, "
                    "fewer seeds or fewer epochs"
                )
            self.plan["settings"] = fitting
        chosen = self.plan["settings"]
        if chosen < len(labels):
            missing = labels[chosen:]
            more = f" and {len(missing) - _NAMED} more settings" if len(missing) > _NAMED + 1 else ""
            named = ", ".join(missing[: _NAMED if more else None])
            self.left_out.append(f"The budget left no time for {named}{more}.")
        run, scratch = self.plan["seconds"]
        needed = seconds_needed(chosen, len(self.asked.seeds), run, scratch, workers)
        within = "" if budget is None else f", within {write_duration(budget)}"
        self.tell(f"{chosen} of {len(labels)} settings to try, about {write_duration(needed)} in all{within}")

    def _estimate(self) -> tuple[float, float]:
        """Time a few steps; return the seconds of a run with a method and of a run from scratch."""
        from pliant.experiments.timing import time_run

        seconds = time_run(self.config, self.stream)
        scratch = seconds * self.baselines[1]["stream"]["epochs"] / self.stream[0].epochs
        return _SLOWER * seconds + _STARTUP, scratch + _STARTUP

    def run(self, engine: Engine, checkpoint_seconds: float) -> tuple[TreatmentSection, dict[str, Status]]:
        """Do the rounds and the results, and analyze them."""
        from pliant.experiments.experiment import run_experiment
        from pliant.experiments.halving import halve, read_scores, round_sizes
        from pliant.experiments.progress import LiveProgress
        from pliant.experiments.remedy_code import write_code
        from pliant.experiments.report.grouping import compare_folders
        from pliant.experiments.report.treatment import CONTINUE, SCRATCH, TreatmentSection
        from pliant.experiments.run_config import SELECTION_SEEDS
        from pliant.experiments.scheduler import run_all

        self._check_folder()
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        self._write_plan()
        statuses: dict[str, Status] = {}
        entry_of = {entry.label: entry for entry in self.asked.methods}

        def config_of(label: str, seed: int, purpose: Any) -> RunConfig:
            return self.asked.config(entry_of[label], entry_of[label].variants()[0], seed, purpose)

        def run_round(number: int, labels: Sequence[str]) -> None:
            self.tell(f"round {number + 1}: {len(labels)} settings")
            configs = [
                config_of(label, SELECTION_SEEDS + number, "selection") for label in (CONTINUE, SCRATCH, *labels)
            ]
            statuses.update(everything(configs))

        def score(label: str, rounds: int) -> tuple[float, ...]:
            runs = [config_of(label, SELECTION_SEEDS + number, "selection").id for number in range(rounds)]
            return read_scores(self.folder, runs, self.asked.deciding)

        with LiveProgress(self.folder, self.console) as progress:

            def everything(configs: Sequence[RunConfig]) -> dict[str, Status]:
                return run_all(configs, self.folder, engine, progress, checkpoint_seconds=checkpoint_seconds)

            labels = self.labels[: self.plan["settings"]]
            winner, tried = halve(labels, round_sizes(len(labels)), run_round, score, self._has_time)
            self.tell(f"testing {winner} against continuing and training from scratch")
            index = [entry.label for entry in self.asked.methods].index(winner)
            final = self._recipe([_interleave([self.asked.methods[index]])[0]])
            statuses |= run_experiment(final, self.folder, everything, self.tell)
        found = next(each for each in compare_folders([self.folder]) if each.recipe is not None)
        # The folder may also hold the results of an earlier winner.
        asked = [each for each in found.contenders if each.label in (CONTINUE, SCRATCH, winner)]
        comparison = replace(found, contenders=tuple(asked))
        shape, classes = self.stream.dataset.shape, self.stream.classes
        labels_of: dict[Action, str] = {"apply": winner, "scratch": SCRATCH, "continue": CONTINUE}
        code = {
            action: write_code(config_of(label, 0, "result"), shape, classes) for action, label in labels_of.items()
        }
        times = {CONTINUE: 1.0, winner: self._relative_time(config_of(winner, 0, "result"))}
        share = self.stream[0].epochs / self.baselines[1]["stream"]["epochs"]
        times = {label: share * time for label, time in times.items()} | {SCRATCH: 1.0}
        return TreatmentSection(comparison, winner, tried, times, self.left_out, code), statuses

    def _relative_time(self, config: RunConfig) -> float:
        """Return the time of a run relative to one without its methods; measured once and saved."""
        from pliant.experiments.timing import time_methods

        known: dict[str, float] = self.plan.setdefault("times", {})
        if config.label not in known:
            known[config.label] = time_methods(config, self.stream)
            self._write_plan()
        return known[config.label]

    def _has_time(self, number: int) -> bool:
        """Return whether a round may begin; the decision is saved, so that a resumed search decides alike."""
        from pliant.experiments.halving import seconds_needed, seconds_of_runs

        if self.plan["stopped"] is None and self.budget is not None and number not in self.plan.get("begun", []):
            taken = seconds_of_runs(self.folder, _STARTUP)
            mean = sum(taken) / len(taken)
            rest = seconds_needed(self.plan["settings"], len(self.asked.seeds), mean, mean, self.workers, rounds=number)
            if sum(taken) / self.workers + rest > self.budget:
                self.plan["stopped"] = number
            else:
                self.plan["begun"] = [*self.plan.get("begun", []), number]
            self._write_plan()
        stopped = self.plan["stopped"] is not None and number >= self.plan["stopped"]
        if stopped:
            done = "1 round" if number == 1 else f"{number} rounds"
            self.left_out.append(f"Time was short: the choice was made after {done}.")
        return not stopped

    def _check_folder(self) -> None:
        from pliant.experiments.experiment import check_folder

        check_folder(self.asked, self.folder)

    def _read_plan(self) -> dict[str, Any] | None:
        """Return the plan in the folder; None without one, or if it is damaged or no plan of these settings."""
        from pliant.experiments.halving import check_plan

        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return check_plan(unseal(read_regular(self.folder / "treatment.json")), len(self.labels))
        return None

    def _write_plan(self) -> None:
        path = self.folder / "treatment.json"
        if is_foreign(path):
            set_aside(path)
        write_atomically(path, seal(self.plan, indent=1))


def _as_entry(text: str, per_epoch: int) -> Any:
    """Return a method without settings with a grid: its default, then its published sweep."""
    from pliant import methods

    if text not in methods.names():
        return text
    info, settings = methods.info(text), {}
    if info.kind == "recycler" and "every" in methods.options(text):
        settings["every"] = per_epoch  # Once an epoch: the usual thousand steps may never come.
    tunable = next(iter(info.tunables), None)
    if tunable is None or not tunable.sweep:
        return {"name": text, **settings}
    first = [] if tunable.default is None else [tunable.default]
    values = [*first, *(value for value in tunable.sweep if value not in first)]
    return {"name": text, **settings, "grid": {tunable.name: values}}


def _interleave(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return every setting as an entry of its own: the first of each method, then the second of each, and so on."""
    from pliant.experiments.run_config import describe

    def order() -> Iterator[Any]:
        for rank in itertools.zip_longest(*(entry.variants() for entry in entries)):
            yield from (parts for parts in rank if parts is not None)

    return [
        {"label": describe(parts), "parts": [{"name": part.name, "settings": part.options} for part in parts]}
        for parts in order()
    ]
