"""Damaged bytes in every reader: a ValueError that names the file, or the very same values. Never a wrong number.

A reader of data that carries no digest (images, .npz, weights, text) may read other values, but raises no other error.
"""

import contextlib
import copy
import gzip
import io
import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tokenizers import Tokenizer, models, trainers

from pliant import data
from pliant.data.hub import read_idx
from pliant.diagnostics.checkpoints import load_weights
from pliant.experiments.archive import pack, unpack
from pliant.experiments.experiment import run_experiment
from pliant.experiments.journal import Journal, write_lines
from pliant.experiments.recipe import RecipeError, make_recipe
from pliant.experiments.recipe_files import load_recipe
from pliant.experiments.report.document import make_report
from pliant.experiments.run import execute
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import (
    last_progress,
    load_recipe_values,
    load_run,
    load_selection,
    read_sources,
)
from tests.data.pictures import picture, write_folder

RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "first": 60},
    "model": {"name": "mlp", "widths": [4]},
    "stream": {"name": "single", "epochs": 2},
    "methods": [{"name": "l2", "grid": {"lam": [0.1, 0.2]}}],
    "selection": {"seeds": 1, "fraction": 0.5},
    "seeds": 1,
}

# Where to damage is drawn as a fraction, so that every place of a file is as likely.
DAMAGE = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
        st.tuples(st.just("insert"), st.floats(0, 1, exclude_max=True), st.integers(0, 255)),
        st.tuples(st.just("double"), st.floats(0, 1, exclude_max=True), st.integers(1, 60)),
    ),
    min_size=1,
    max_size=3,
)
many = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def damaged(content: bytes, damage: list[tuple[str, float, int]]) -> bytes:
    for kind, where, what in damage:
        place = int(where * len(content))
        if kind == "flip" and content:
            content = content[:place] + bytes([content[place] ^ what]) + content[place + 1 :]
        elif kind == "cut":
            content = content[:place]
        elif kind == "insert":
            content = content[:place] + bytes([what]) + content[place:]
        elif kind == "double":
            content = content[:place] + content[place : place + what] + content[place:]
    return content


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experiment")
    recipe = make_recipe(RECIPE)
    run_experiment(recipe, root, lambda configs: {each.id: execute(each, root).status for each in configs})
    return root


def read_run(folder: Path) -> Any:
    """Everything that a run's folder says, in plain types."""
    run = load_run(folder)
    if run is None:
        return None
    return run.config, run.status, run.result, run.error, run.records


def assert_same_or_named(read: Callable[[], Any], expected: Any, name: str) -> None:
    try:
        found = read()
    except ValueError as error:
        assert name in str(error)  # noqa: PT017
    else:
        assert found == expected


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json"])
@given(damage=DAMAGE)
@many
def test_a_damaged_run_is_named_or_the_same(experiment: Path, name: str, damage: Any) -> None:
    folder = sorted((experiment / "runs").iterdir())[0]
    content, expected = (folder / name).read_bytes(), read_run(folder)
    try:
        (folder / name).write_bytes(damaged(content, damage))
        assert_same_or_named(lambda: read_run(folder), expected, name)
        assert 0 <= last_progress(folder) <= 1
    finally:
        (folder / name).write_bytes(content)


@given(damage=DAMAGE)
@many
def test_a_damaged_log_is_named_or_the_same(experiment: Path, damage: Any) -> None:
    folder = sorted((experiment / "runs").iterdir())[0]
    path = folder / "events.jsonl"
    content, run = path.read_bytes(), load_run(folder)
    assert run is not None
    expected, sources = run.events, read_sources(run)
    try:
        path.write_bytes(damaged(content, damage))
        again = load_run(folder)
        assert again is not None
        try:
            events = again.events
        except ValueError as error:
            assert "events.jsonl" in str(error)  # noqa: PT017
        else:  # Lines that were lost at the end leave the log shorter.
            assert events == expected[: len(events)]
        assert read_sources(again) in (sources, {})
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(("name", "read"), [("recipe.json", load_recipe_values), ("selection.json", load_selection)])
@given(damage=DAMAGE)
@many
def test_a_damaged_recipe_or_choice_is_named_or_the_same(
    experiment: Path, name: str, read: Callable[[Path], Any], damage: Any
) -> None:
    content, expected = (experiment / name).read_bytes(), read(experiment)
    try:
        (experiment / name).write_bytes(damaged(content, damage))
        assert_same_or_named(lambda: read(experiment), expected, name)
        if name == "recipe.json":  # It may be edited, so its digest is not asked for: it is checked as a recipe.
            with contextlib.suppress(RecipeError):
                load_recipe(experiment / name)
    finally:
        (experiment / name).write_bytes(content)


@pytest.mark.parametrize("name", ["recipe.json", "selection.json", "result.json", "metrics.jsonl", "events.jsonl"])
@given(damage=DAMAGE)
@few
def test_a_report_on_damaged_files_is_made(experiment: Path, name: str, damage: Any) -> None:
    """Numbers of the runs that are sound do not change; the file that is not is listed."""
    path = next(iter(sorted(experiment.rglob(name))))
    content = path.read_bytes()
    sound = {run.id: run.result for section in make_report(experiment).sections for run in section.comparison.runs}
    try:
        path.write_bytes(damaged(content, damage))
        for section in make_report(experiment).sections:
            assert str(section.answer)
            for run in section.comparison.runs:
                assert run.result in ({}, sound.get(run.id))
    finally:
        path.write_bytes(content)


@given(damage=DAMAGE)
@many
def test_a_damaged_archive_is_refused_or_the_same(
    experiment: Path, tmp_path_factory: pytest.TempPathFactory, damage: Any
) -> None:
    folder = tmp_path_factory.mktemp("archive")
    pack(experiment, folder / "sound.gz")
    packed = (folder / "sound.gz").read_bytes()
    unpack(folder / "sound.gz", folder / "sound")
    expected = [read_run(path) for path in sorted((folder / "sound" / "runs").iterdir())]
    inside = gzip.compress(damaged(gzip.decompress(packed), damage), mtime=0)
    for number, content in enumerate((damaged(packed, damage), inside)):
        (folder / "bad.gz").write_bytes(content)
        try:
            unpack(folder / "bad.gz", folder / str(number))
        except ValueError as error:
            assert "bad.gz" in str(error)  # noqa: PT017
            assert not (folder / str(number)).exists()
        else:
            found = [read_run(path) for path in sorted((folder / str(number) / "runs").iterdir())]
            assert found == expected


SCALARS = st.none() | st.booleans() | st.sampled_from([0, -1, 0.5, 10**12, 1e308, 5e-324, "", "x", "../x", "\x1b[2J"])
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 99), st.floats(0, 1, exclude_max=True), SCALARS | st.sampled_from([[], {}, [1, 2], "del"])
    ),
    min_size=1,
    max_size=2,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """All tables and lists inside a value, each with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [found for key in keys for found in places(value[key])]


@given(changes=CHANGES)
@many
def test_a_forged_archive_is_refused_or_reported(
    experiment: Path, tmp_path_factory: pytest.TempPathFactory, changes: Any
) -> None:
    """Anything in place of anything, with correct digests."""
    folder = tmp_path_factory.mktemp("forged")
    pack(experiment, folder / "sound.gz")
    lines = Journal(gzip.decompress((folder / "sound.gz").read_bytes())).records()
    for number, where, what in changes:
        found = places(lines[number % len(lines)])
        holder, key = found[int(where * len(found))]
        if what == "del":
            del holder[key]
        else:
            holder[key] = copy.deepcopy(what)  # Else the second change may put it into itself.
    for line in lines[1:]:
        with contextlib.suppress(Exception):
            line["id"] = RunConfig.from_dict(line["config"]).id
    (folder / "bad.gz").write_bytes(gzip.compress(write_lines(lines)[0]))
    try:
        unpack(folder / "bad.gz", folder / "got")
    except ValueError as error:
        assert "bad.gz" in str(error)  # noqa: PT017
        return
    report = make_report(folder / "got")
    assert str(report)
    for ending in ("md", "csv", "tex"):
        report.save(folder / f"report.{ending}")
    with contextlib.suppress(ValueError):
        pack(folder / "got", folder / "again.gz")


@given(content=st.one_of(st.binary(max_size=300), st.text(max_size=300).map(str.encode)))
@many
def test_any_bytes_are_no_journal(content: bytes) -> None:
    journal = Journal(content)
    assert b"".join(journal.lines) == content[: sum(map(len, journal.lines))]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(changes=st.dictionaries(st.sampled_from([*RECIPE, "start", "old_data", "title", "more"]), VALUES, max_size=3))
@many
def test_any_recipe_is_accepted_or_explained(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("recipe") / "r.json"
    path.write_text(json.dumps(RECIPE | changes))
    try:
        load_recipe(path)
    except RecipeError as error:
        assert str(error)  # noqa: PT017


def image_bytes() -> bytes:
    file = io.BytesIO()
    picture(0).save(file, "PNG")
    return file.getvalue()


def npz_bytes() -> bytes:
    file = io.BytesIO()
    numpy.savez(file, x=numpy.zeros((20, 3), numpy.float32), y=numpy.arange(20) % 2)
    return file.getvalue()


def weights_bytes() -> bytes:
    file = io.BytesIO()
    torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, file)
    return file.getvalue()


def idx_bytes() -> bytes:
    return gzip.compress(struct.pack(">HBBII", 0, 8, 2, 3, 4) + bytes(12))


def old_weights_bytes() -> bytes:
    file = io.BytesIO()
    torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def parquet_bytes() -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["some text of a user", "and more of it"] * 9}), file)
    return file.getvalue()


def tokenizer_bytes() -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(["some text of a user"], trainers.BpeTrainer(vocab_size=30, show_progress=False))
    return str(tokenizer.to_str()).encode()


def load_with_tokenizer(path: Path) -> Any:
    text = path.with_name("read.txt")
    text.write_text("some text of a user, and more of it\n" * 9)
    return data.load(str(text), window=8, vocabulary=str(path))


READERS: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "x.npz": (npz_bytes(), lambda path: data.load(str(path))),
    "x.txt": (b"some text of a user, and more of it\n" * 9, lambda path: data.load(str(path), window=8)),
    "x.parquet": (parquet_bytes(), lambda path: data.load(str(path), window=8)),
    "tokenizer.json": (tokenizer_bytes(), load_with_tokenizer),
    "weights.pt": (weights_bytes(), load_weights),
    "old_weights.pt": (old_weights_bytes(), load_weights),
    "weights.safetensors": (save(torch.nn.Linear(3, 2).state_dict()), load_weights),
    "x-idx2-ubyte.gz": (idx_bytes(), read_idx),
}


@pytest.mark.parametrize("name", READERS)
@given(damage=DAMAGE)
@many
def test_readers_of_foreign_files_raise_value_errors_only(
    tmp_path_factory: pytest.TempPathFactory, name: str, damage: Any
) -> None:
    content, read = READERS[name]
    path = tmp_path_factory.mktemp("foreign") / name
    path.write_bytes(damaged(content, damage))
    try:
        with warnings.catch_warnings(action="ignore"):
            read(path)
    except ValueError as error:
        assert str(error)  # noqa: PT017


@given(damage=DAMAGE)
@few
def test_damaged_images_are_named(tmp_path_factory: pytest.TempPathFactory, damage: Any) -> None:
    root = write_folder(tmp_path_factory.mktemp("images") / "zoo", per_class=2)
    (root / "cat" / "0.png").write_bytes(damaged(image_bytes(), damage))
    try:
        with warnings.catch_warnings(action="ignore"):
            data.load(str(root), size=6)
    except ValueError as error:
        assert "0.png" in str(error)  # noqa: PT017
