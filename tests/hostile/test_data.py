"""Damaged caches, and names that lead to pipes, devices and the kernel instead of files."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from pliant import _files, data
from pliant._files import NotRegularError, open_regular
from pliant.data import hub
from pliant.diagnostics.checkpoints import load_weights
from tests.data.pictures import write_folder
from tests.data.test_hub import fill_hub_cache
from tests.hostile.attacks import flip_bit


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def entry_of(cache: Path) -> Path:
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    return entry


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["train.x", "train.y", "test.x", "test.y", "meta.json"])
@pytest.mark.parametrize("damage", [flip_bit, cut, remove, empty])
def test_a_damaged_cache_is_decoded_again(
    tmp_path: Path, own_cache: Path, name: str, damage: Callable[[Path], None]
) -> None:
    root = write_folder(tmp_path / "zoo")
    before = data.load(str(root))
    kept = before.train.x.clone(), before.test.x.clone()
    damage(entry_of(own_cache) / name)
    if (name, damage) == ("meta.json", remove):  # As if it had never been decoded.
        again = data.load(str(root))
    else:
        with pytest.warns(UserWarning, match=f"{name}.*the data is decoded again"):
            again = data.load(str(root))
    assert torch.equal(again.train.x, kept[0])
    assert torch.equal(again.test.x, kept[1])
    assert again.fingerprint == before.fingerprint
    with warnings.catch_warnings(action="error"):
        data.load(str(root))


def test_a_flip_between_two_processes_is_found_by_the_second(tmp_path: Path, own_cache: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    script = (
        "import sys, warnings; from pliant import data\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always'); dataset = data.load(sys.argv[1])\n"
        "print(int(dataset.train.x.long().sum()), any('decoded again' in str(each.message) for each in told))"
    )

    def load() -> list[str]:
        command = [sys.executable, "-c", script, str(root)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    total = str(int(data.load(str(root)).train.x.long().sum()))
    flip_bit(entry_of(own_cache) / "train.x")
    assert load() == [total, "True"]


def test_a_link_in_place_of_a_data_set_is_replaced(tmp_path: Path, own_cache: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    data.load(str(root))
    entry = entry_of(own_cache)
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    flip_bit(entry / "train.x")
    damaged = (tmp_path / "elsewhere" / "train.x").read_bytes()
    with pytest.warns(UserWarning, match="decoded again"):
        data.load(str(root))
    assert not entry.is_symlink()
    assert (tmp_path / "elsewhere" / "train.x").read_bytes() == damaged


NOT_FILES = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "the kernel": lambda path: path.symlink_to("/proc/self/environ"),
    "the kernel's log": lambda path: path.symlink_to("/proc/kmsg"),
}


@pytest.mark.parametrize("put", NOT_FILES.values(), ids=NOT_FILES)
def test_what_is_not_a_file_is_skipped_with_a_word(
    tmp_path: Path, own_cache: Path, put: Callable[[Path], None]
) -> None:
    root = write_folder(tmp_path / "zoo")
    before = data.load(str(root))
    put(root / "cat" / "x.png")
    with pytest.warns(UserWarning, match=r"x\.png is skipped: it is not a regular file"):
        after = data.load(str(root))
    assert torch.equal(after.train.x, before.train.x)
    with pytest.raises(NotRegularError, match="is not a regular file"):
        open_regular(root / "cat" / "x.png")


@pytest.mark.parametrize("put", NOT_FILES.values(), ids=NOT_FILES)
def test_readers_open_regular_files_only(tmp_path: Path, put: Callable[[Path], None]) -> None:
    for name in ("x.npz", "x.txt", "x.parquet", "weights.pt", "weights.safetensors"):
        put(tmp_path / name)
    for name in ("x.npz", "x.txt", "x.parquet"):
        with pytest.raises(ValueError, match=r"is not a regular file|is neither"):
            data.load(str(tmp_path / name))
    for name in ("weights.pt", "weights.safetensors"):
        with pytest.raises(ValueError, match=r"is not a regular file|there is no file"):
            load_weights(tmp_path / name)


def test_links_to_files_are_read(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "real.npz", x=numpy.zeros((20, 3), numpy.float32), y=numpy.arange(20) % 2)
    (tmp_path / "link.npz").symlink_to(tmp_path / "real.npz")
    assert len(data.load(str(tmp_path / "link.npz")).classes) == 2


def test_a_changed_file_of_the_hub_is_refused(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    source = hub.SOURCES["mnist"]
    fill_hub_cache(tmp_path / "hub", source, dict.fromkeys((*source.train, *source.test), b"PAR1 of a stranger"))
    hub.load_from_hub.cache_clear()
    with pytest.raises(ValueError, match=r"has the SHA-256 .* is known to have beb1514598138db4"):
        data.load("mnist")


def test_npz_and_parquet_files_that_swell_are_refused_before_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small files that would be 2 MB: of zeros, of one row meant 200 times, and of one long text."""
    monkeypatch.setattr(_files, "_FREE", 1_000_000)  # As if memory were small: a test must not write large files.
    numpy.savez_compressed(tmp_path / "a.npz", x=numpy.zeros((20, 1, 320, 320), numpy.uint8), y=numpy.arange(20) % 2)
    parquet.write_table(pyarrow.table({"text": ["x" * 10_000] * 200}), tmp_path / "b.parquet")
    long = pyarrow.table({"text": ["x" * 2_000_000]})
    parquet.write_table(long, tmp_path / "c.parquet", compression="zstd", use_dictionary=False)
    for name in ("a.npz", "b.parquet", "c.parquet"):
        assert (tmp_path / name).stat().st_size < 10_000
        with pytest.raises(ValueError, match=rf"{name}' swells to more than \d+ MB, over 100 times its size"):
            data.load(str(tmp_path / name))


@pytest.mark.parametrize("column", [[1, 2, 3], [[1], [2]], [b"\xff\xfe"]])
def test_a_column_that_is_not_text_is_named(tmp_path: Path, column: list[Any]) -> None:
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"column 'text' of .*a\.parquet' is not readable text"):
        data.load(str(tmp_path / "a.parquet"))


def vocabulary(**changes: Any) -> str:
    model = {"type": "WordLevel", "vocab": {"some": 0, "text": 1, "?": 2}, "unk_token": "?"}
    return json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model | changes})


def characters(merges: list[list[str]] | None = None, dropout: float | None = None, **parts: Any) -> str:
    """A tokenizer of characters, and of the pairs that are merged."""
    letters = [*"abcdefghijklmnopqrstuvwxyz ,", *map("".join, merges or [])]
    model = {"type": "BPE", "vocab": {letter: code for code, letter in enumerate(letters)}, "merges": merges or []}
    return json.dumps({"version": "1.0", "model": model | {"dropout": dropout}, **parts})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "null",
        "[" * 100_000,
        "\udcff",
        vocabulary(type="Evil"),
        vocabulary(vocab={"some": 0, "text": 4_000_000_000}),
        vocabulary(vocab={"some": 0, "text": 0, "?": 1}),
        vocabulary(unk_token="nowhere"),
        # These panic in Rust, which is not an Exception in Python.
        characters(pre_tokenizer={"type": "FixedLength", "length": 0}),
        characters(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        characters(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAP////9h"}),
    ],
)
def test_a_vocabulary_that_does_not_work_is_named(tmp_path: Path, content: str) -> None:
    """A code beyond the vocabulary would be a row that no network has."""
    (tmp_path / "a.txt").write_text("some text, and other " * 50)
    (tmp_path / "tokenizer.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"vocabulary is .*tokenizer\.json', which is not a tokenizer that works"):
        data.load(str(tmp_path / "a.txt"), window=8, vocabulary=str(tmp_path / "tokenizer.json"))


TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 3000},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 4_000_000_000,
    "pad_type_id": 0,
    "pad_token": "x",
}


def test_a_vocabulary_neither_cuts_nor_fills_up_the_text(tmp_path: Path) -> None:
    """Tokenizers are often saved with what suits batches of sentences."""
    (tmp_path / "a.txt").write_text("some text, and other " * 50)
    found = []
    for number, content in enumerate((characters(), characters(truncation=TRUNCATION), characters(padding=PADDING))):
        path = tmp_path / f"{number}.json"
        path.write_text(content)
        found.append(data.load(str(tmp_path / "a.txt"), window=8, vocabulary=str(path)).train.x)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_vocabulary_with_dropout_gives_the_same_tokens_every_time(tmp_path: Path) -> None:
    """A resumed run would learn other tokens."""
    (tmp_path / "a.txt").write_text("some text, and other " * 50)
    for name, dropout in (("plain.json", None), ("random.json", 0.5)):
        (tmp_path / name).write_text(characters([["s", "o"], ["m", "e"], ["t", "h"]], dropout))
    load = [data.load(str(tmp_path / "a.txt"), window=8, vocabulary=str(tmp_path / f"{each}.json")).train.x
            for each in ("plain", "random", "random")]  # fmt: skip
    assert torch.equal(load[0], load[1])
    assert torch.equal(load[1], load[2])


@pytest.mark.parametrize(
    "options", [{"vocabulary": [1]}, {"vocabulary": 1.5}, {"then": 3}, {"column": None, "then": 7}]
)
def test_options_of_text_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "a.txt").write_text("some text, and other " * 50)
    with pytest.raises(ValueError, match=r"vocabulary|then"):
        data.load(str(tmp_path / "a.txt"), window=8, **options)
