"""Text: windows of characters, from a file, a folder, and Python's own reference."""

from pathlib import Path

import pytest
import torch

from pliant import data
from pliant.data.text import cut_windows, decode


def test_the_target_of_a_character_is_the_next_one() -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 4
    dataset = cut_windows("text", text, 5, None)
    assert (dataset.shape, len(dataset.classes)) == ((5,), 26)
    assert len(dataset.train) + len(dataset.test) == (len(text) - 1) // 5
    assert decode(dataset.train.x.flatten(), dataset) + decode(dataset.test.x.flatten(), dataset) == text[:100]
    assert torch.equal(dataset.train.x[:, 1:], dataset.train.y[:, :-1])
    assert decode(dataset.train.y[0], dataset) == "bcdef"


def test_a_file_and_a_folder_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("Straße " * 20, encoding="utf8")
    (folder / "a.txt").write_text("first " * 20, encoding="utf8")
    both = data.load(str(folder), window=8)
    assert decode(both.train.x[0], both) == "first fi"
    one = data.load(str(folder / "b.txt"), window=8, characters=50)
    assert decode(one.train.x[0], one) == "Straße S"
    assert (len(one.train) + len(one.test)) * 8 <= 50
    assert both.fingerprint != one.fingerprint


def test_a_folder_of_images_with_a_note_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "README.txt").write_text("cats and dogs")
    with pytest.raises(ValueError, match="image"):
        data.load(str(tmp_path))


def test_bad_text_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(ValueError, match="9 characters; two windows of 64 need 129"):
        data.load(str(short))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(ValueError, match="a text must be UTF-8"):
        data.load(str(binary))


def test_python_brings_its_own_text() -> None:
    dataset = data.load("python_docs", characters=5000, window=32)
    assert (len(dataset.train) + len(dataset.test)) * 32 <= 5000
    assert 30 < len(dataset.classes) < 150
