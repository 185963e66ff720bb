"""Text: windows of characters, from a file, a folder, and Python's own reference."""

from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pliant import data
from pliant.data import cache, text
from pliant.data.text import cut_windows, decode


def test_the_target_of_a_character_is_the_next_one() -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 4
    dataset = cut_windows("text", [text], 5)
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


def test_the_texts_of_a_folder_and_then_another_stay_apart(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for letter in "ab":
        (folder / f"{letter}.txt").write_text(letter * 50)
    (tmp_path / "more.txt").write_text("c" * 30)
    dataset = data.load(str(folder), window=5, then=str(tmp_path / "more.txt"), characters=41)
    assert [decode(dataset.train.from_source(n).batch(torch.tensor([0]))[0][0], dataset) for n in range(3)] == [
        "aaaaa", "bbbbb", "ccccc",
    ]  # fmt: skip
    assert dataset.train.source.bincount().tolist() == [7, 7, 4]
    assert dataset.test.source.bincount().tolist() == [1, 1, 1]
    assert dataset.name == "texts, then more.txt"
    with pytest.raises(ValueError, match=r"data 'nowhere' is not a text; it must be a .txt or .parquet file"):
        data.load(str(folder), then="nowhere")


def test_a_column_of_a_parquet_file_is_a_text(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one ", None, "two " * 30], "page": ["x", "y", "z"]})
    parquet.write_table(table, tmp_path / "texts.parquet")
    dataset = data.load(str(tmp_path / "texts.parquet"), window=8)
    assert decode(dataset.train.x[0], dataset) == "one two "
    with pytest.raises(ValueError, match=r"column is 'words', which texts.parquet does not have; it has text, page"):
        data.load(str(tmp_path / "texts.parquet"), column="words")
    (tmp_path / "no.parquet").write_text("no table")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        data.load(str(tmp_path / "no.parquet"))
    with pytest.raises(ValueError, match=r"must be hub:OWNER/NAME/FILE.parquet"):
        data.load("hub:Salesforce/wikitext")


def test_byte_pairs_are_learned_or_loaded(tmp_path: Path) -> None:
    text = "the quick brown fox — jumps over the lazy dog. " * 40
    (tmp_path / "text.txt").write_text(text, encoding="utf8")
    learned = data.load(str(tmp_path / "text.txt"), window=8, vocabulary=300)
    assert len(learned.classes) <= 300
    whole = torch.cat([learned.train.x, learned.test.x]).flatten()
    assert text.startswith(decode(whole, learned))
    assert len(whole) < len(text) / 2, "a token holds several characters"
    tokenizer = Tokenizer(BPE({"[UNK]": 0, "t": 1, "h": 2, "th": 3}, [("t", "h")], unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = data.load(str(tmp_path / "text.txt"), window=8, vocabulary=str(tmp_path / "tokenizer.json"))
    assert loaded.classes == ("[UNK]", "t", "h", "th")
    assert int(loaded.train.x[0, 0]) == 3
    with pytest.raises(ValueError, match="vocabulary is 100; byte pairs need at least the 256 bytes"):
        data.load(str(tmp_path / "text.txt"), vocabulary=100)
    with pytest.raises(ValueError, match=r"vocabulary is 'no.json'; it must be a size, or an existing tokenizer.json"):
        data.load(str(tmp_path / "text.txt"), vocabulary="no.json")


def test_windows_are_memory_mapped_and_encoded_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    encoded = []
    make = text.make_vocabulary
    monkeypatch.setattr(text, "make_vocabulary", lambda *args: encoded.append(args) or make(*args))
    first, again = (data.load(str(file), window=8) for _ in range(2))
    assert len(encoded) == 1
    assert first.fingerprint == again.fingerprint
    (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
    assert str(entry / "train.x") in Path("/proc/self/maps").read_text()
    part = again.train.from_source(0)
    assert part.y.untyped_storage().data_ptr() == part.x.untyped_storage().data_ptr()
    in_memory = cut_windows("text.txt", [file.read_text()], 8)
    for stored, made in ((again.train, in_memory.train), (again.test, in_memory.test)):
        for name in ("x", "y", "source", "characters"):
            assert torch.equal(getattr(stored, name), getattr(made, name)), name
    assert again.classes == in_memory.classes
    encoded.clear()
    data.load(str(file), window=9)
    assert len(encoded) == 1
    file.write_text("another text " * 40)
    assert decode(data.load(str(file), window=8).train.x[0], data.load(str(file), window=8)) == "another "


def test_a_damaged_text_in_the_cache_is_encoded_again(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    before = data.load(str(file), window=8).train.x.clone()
    (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
    content = bytearray((entry / "train.x").read_bytes())
    content[0] ^= 1
    (entry / "train.x").write_bytes(content)
    assert cache.check(entry) == [f"{entry / 'train.x'}: the content does not match its checksum"]
    with pytest.warns(UserWarning, match="the data is decoded again"):
        assert torch.equal(data.load(str(file), window=8).train.x, before)


def test_byte_pairs_of_pieces_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "One line\nanother's\n\n  indented \n 'quoted'\nStraße — 7 €\r\nend\n"
    whole = cut_windows("text", [lines * 30], 8, 280)
    pieces: list[str] = []
    cut = text._cut
    monkeypatch.setattr(text, "_cut", lambda each: (pieces.append(p) or (s, p) for s, p in cut(each)))
    monkeypatch.setattr(text, "_PIECE", 5)
    cut_whole = cut_windows("text", [lines * 30], 8, 280)
    assert "".join(pieces) == lines * 30
    assert len(pieces) > 30
    for part in ("train", "test"):
        assert torch.equal(getattr(cut_whole, part).x, getattr(whole, part).x)
        assert torch.equal(getattr(cut_whole, part).characters, getattr(whole, part).characters)


def test_the_characters_of_targets_are_counted() -> None:
    sentence = "the quick brown fox jumps over the lazy dog. "
    letters = cut_windows("text", [sentence * 10], 8)
    assert set(letters.train.characters.tolist()) == {8}
    pairs = cut_windows("text", [sentence * 40, sentence.upper() * 40], 8, 300)
    for examples in (pairs.train, pairs.test, pairs.train.from_source(1)):
        counted = [len(decode(row, pairs)) for row in examples.y]
        assert examples.characters.tolist() == counted
    with_dashes = cut_windows("text", ["a — b – c " * 60], 8, 256)  # A dash has three bytes, which are three tokens.
    assert int(with_dashes.train.characters.sum()) < with_dashes.train.y.numel()


def test_a_tokenizer_that_shortens_texts_reads_them_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE({"[UNK]": 0, "t": 1, "h": 2}, [], unk_token="[UNK]"))
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("th" * 50)
    loaded = data.load(str(tmp_path / "text.txt"), window=8, vocabulary=str(tmp_path / "tokenizer.json"))
    assert len(loaded.train) + len(loaded.test) == 99 // 8
