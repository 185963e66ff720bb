"""Text as a data set: tokens, cut into windows; the target of every token is the next one.

A text is a `.txt` file, a Parquet file with a column of texts, a file on the hub, or Python's own reference. Tokens are
characters, or byte pairs (BPE) of Hugging Face's `tokenizers`. A folder of `.txt` files holds several texts, and `then`
adds one: streams may train on one text after the other.

Windows are cached on disk and memory-mapped. A window holds one token more than its inputs, so inputs and targets are
two views of the same memory.
"""

import contextlib
import functools
import hashlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pliant._files import check_expansion, open_regular, read_regular
from pliant._importing import naming_extra
from pliant._validation import check_positive_int
from pliant.data.cache import Decoded, cached
from pliant.data.dataset import Dataset, Examples
from pliant.data.hub import download

WIKITEXT = "hub:Salesforce/wikitext/{}/train-{}.parquet"
TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "python_docs": ("text: Python's own reference, 460 000 characters; needs no download", ()),
    "wikitext2": (
        "text: articles of Wikipedia, 11 million characters",
        (WIKITEXT.format("wikitext-2-v1", "00000-of-00001"),),
    ),
    "wikitext103": (
        "text: articles of Wikipedia, 540 million characters",
        tuple(WIKITEXT.format("wikitext-103-v1", f"0000{part}-of-00002") for part in range(2)),
    ),
    "openwebtext": (
        "text: pages of the web, the first of 80 files, 500 million characters",
        ("hub:Skylion007/openwebtext/plain_text/train-00000-of-00080.parquet",),
    ),
}
"""Texts by name: a summary, and the files on the hub."""

_ROWS = 256
"""How many rows of a Parquet file are decoded at once."""

_PIECE = 2**20
"""About how many characters a tokenizer gets at once: it needs a hundred times their memory."""
_SAFE_CUT = re.compile(r"\S\n(?=\S)")
"""Between lines without spaces around the break, byte pairs are the same in one text and in two."""
_ENCODER = "1"
"""Part of the cache key. Increase it when reading or encoding changes."""

Part = tuple[Tensor, Tensor]
Encode = Callable[[str], tuple[Tensor, Tensor]]
"""Turns a text into the codes of its tokens, and the place of each token's first character."""


def is_text(name: str) -> bool:
    """Return whether a name is a text: one of `TEXTS`, a file on the hub, a file, or a folder of `.txt` files."""
    path = Path(name)
    if name in TEXTS or name.startswith("hub:"):
        return True
    if not path.is_dir():
        return path.suffix in (".txt", ".parquet") and path.is_file()
    return any(path.glob("*.txt")) and not any(child.is_dir() for child in path.iterdir())


def load_text(
    name: str,
    *,
    window: int = 64,
    characters: int | None = None,
    vocabulary: int | str | None = None,
    column: str = "text",
    then: str | None = None,
) -> Dataset:
    """Load one text or several.

    Args:
        name: One of `TEXTS`; a `.txt` or `.parquet` file; `hub:OWNER/NAME/FILE.parquet`; a folder, whose `.txt` files
            are one text each, in the order of their names.
        window: The number of tokens of an example.
        characters: Read only the first so many characters of each text; all by default.
        vocabulary: None for characters; the size of a byte-pair vocabulary, which is learned from the texts; or the
            `tokenizer.json` of Hugging Face's `tokenizers`.
        column: The column of a Parquet file that holds the texts.
        then: Another text or folder, which follows.

    Returns:
        The data set. The last tenth of each text's windows is the test set.
    """
    for argument, value in {"column": column, "then": then}.items():
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{argument} is {value!r}; it must be a text")
    if characters is not None:
        check_positive_int("characters", characters)
    names = [each for each in (name, then) if each is not None]
    shown = ", then ".join(Path(each).name for each in names)

    def decode() -> Decoded:
        texts = [text[:characters] for each in names for text in read_texts(each, column)]
        return _encode_windows(shown, texts, window, vocabulary)

    files = [file for each in names for file in _find_files(each)]
    if isinstance(vocabulary, str):
        files.append(_check_tokenizer_file(vocabulary))
    stats = [(str(file.resolve()), each.st_size, each.st_mtime_ns) for file in files for each in [file.stat()]]
    python = platform.python_version() if "python_docs" in names else ""
    options = (names, window, characters, vocabulary, column)
    return cached(shown, f"{_ENCODER}|{options}|{stats}|{python}", decode, torch.int64, _from_windows)


def read_texts(name: str, column: str = "text") -> list[str]:
    """Read the texts that a name stands for; see `load_text`.

    Raises:
        ValueError: If the name is not a text, or a file cannot be read.
    """
    if name == "python_docs":
        from pydoc_data.topics import topics

        return ["\n".join(topics[topic] for topic in sorted(topics))]
    files = _find_files(name)
    if name in TEXTS:
        return ["".join(_read_column(file, "text") for file in files)]
    if files and files[0].suffix == ".parquet":
        return [_read_column(file, column) for file in files]
    try:
        return [read_regular(file).decode("utf8") for file in files]
    except UnicodeDecodeError as error:
        raise ValueError(f"data {name!r}: a text must be UTF-8; {error.reason} at byte {error.start}") from error


def _find_files(name: str) -> list[Path]:
    """Return the files of a text, after their download; none for Python's own reference."""
    if not is_text(name):
        raise ValueError(
            f"data {name!r} is not a text; it must be a .txt or .parquet file, or one of {', '.join(TEXTS)}"
        )
    if name in TEXTS:
        return [file for each in TEXTS[name][1] for file in _find_files(each)]
    if name.startswith("hub:"):
        return [_download(name)]
    path = Path(name)
    return sorted(path.glob("*.txt")) if path.is_dir() else [path]


@functools.cache
def _download(name: str) -> Path:
    """Get a file of the hub; the hub is asked once per process."""
    owner, _, rest = name.removeprefix("hub:").partition("/")
    repository, _, file = rest.partition("/")
    if not file.endswith(".parquet"):
        raise ValueError(f"data {name!r} is not a file on the hub; it must be hub:OWNER/NAME/FILE.parquet")
    return download(f"{owner}/{repository}", file)


def _read_column(path: Path, column: str) -> str:
    with naming_extra("reading Parquet files", "data"):
        import pyarrow
        import pyarrow.parquet as parquet
    try:
        file = parquet.ParquetFile(open_regular(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"data {str(path)!r} is not a readable Parquet file: {error}") from error
    if column not in file.schema_arrow.names:
        raise ValueError(
            f"column is {column!r}, which {path.name} does not have; it has {', '.join(file.schema_arrow.names)}"
        )
    parts: list[str] = []
    size = 0
    try:
        for group in range(file.num_row_groups):
            check_expansion(path, file.metadata.row_group(group).total_byte_size)
        for batch in file.iter_batches(_ROWS, columns=[column]):  # One text may be stored once and meant often.
            check_expansion(path, size := size + batch.nbytes)
            parts += (text or "" for text in batch.column(0).to_pylist())
        return "".join(parts)
    except (pyarrow.ArrowException, OSError, TypeError) as error:
        raise ValueError(f"column {column!r} of {str(path)!r} is not readable text: {error}") from error


def make_vocabulary(texts: Sequence[str], vocabulary: int | str | None) -> tuple[tuple[str, ...], Encode]:
    """Return the tokens by their codes, and the function that encodes a text; see `load_text`.

    Example:
        >>> tokens, encode = make_vocabulary(["abba"], None)
        >>> tokens, encode("bab")
        (('a', 'b'), (tensor([1, 0, 1]), tensor([0, 1, 2])))
    """
    if vocabulary is None:
        tokens = tuple(sorted(set().union(*texts)))
        table = torch.zeros(0x110000, dtype=torch.int64)
        table[[ord(token) for token in tokens]] = torch.arange(len(tokens))
        return tokens, lambda text: (table[_code_points(text)], torch.arange(len(text)))
    with naming_extra("a vocabulary of byte pairs", "language"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    if isinstance(vocabulary, str):
        content = read_regular(_check_tokenizer_file(vocabulary))
        with _naming_vocabulary(vocabulary):
            tokenizer = Tokenizer.from_str(content.decode("utf8"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if sorted(tokenizer.get_vocab().values()) != list(range(tokenizer.get_vocab_size())):
                raise ValueError("the codes of its tokens are not 0, 1, … without gaps")
            # Made for batches, they would cut off the text or fill it up. Dropout would draw other tokens each time.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if getattr(tokenizer.model, "dropout", None) is not None:
                tokenizer.model.dropout = None
    else:
        check_positive_int("vocabulary", vocabulary)
        if vocabulary < 256:
            raise ValueError(f"vocabulary is {vocabulary}; byte pairs need at least the 256 bytes")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
    tokens = tuple(tokenizer.id_to_token(code) or "" for code in range(tokenizer.get_vocab_size()))
    splitter = tokenizer.pre_tokenizer
    in_pieces = (
        isinstance(splitter, pre_tokenizers.ByteLevel) and not splitter.add_prefix_space and not tokenizer.normalizer
    )

    def encode(text: str) -> tuple[Tensor, Tensor]:
        codes, places = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        with _naming_vocabulary(vocabulary):
            for start, piece in _cut(text) if in_pieces else [(0, text)]:
                encoding = tokenizer.encode(piece, add_special_tokens=False)
                codes.append(torch.tensor(encoding.ids, dtype=torch.int64))
                places.append(torch.tensor([start + first for first, _ in encoding.offsets], dtype=torch.int64))
        return torch.cat(codes), torch.cat(places)

    return tokens, encode


def _code_points(text: str) -> Tensor:
    content = bytearray(text.encode("utf-32-le", "surrogatepass"))
    return torch.frombuffer(content, dtype=torch.int32).long() if content else torch.zeros(0, dtype=torch.int64)


def _cut(text: str) -> Iterator[tuple[int, str]]:
    """Cut a text into pieces that have the same byte pairs as the whole text; yield each with its place."""
    start = 0
    while start < len(text):
        cut = _SAFE_CUT.search(text, start + _PIECE)
        end = cut.end() if cut else len(text)
        yield start, text[start:end]
        start = end


def _check_tokenizer_file(vocabulary: str) -> Path:
    if not Path(vocabulary).is_file():
        raise ValueError(f"vocabulary is {vocabulary!r}; it must be a size, or an existing tokenizer.json")
    return Path(vocabulary)


@contextlib.contextmanager
def _naming_vocabulary(vocabulary: int | str) -> Iterator[None]:
    """Name the vocabulary in whatever `tokenizers` raises: it has no errors of its own."""
    try:
        yield
    except BaseException as error:
        # A panic of its Rust code is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"vocabulary is {vocabulary!r}, which is not a tokenizer that works: {error}") from error


def cut_windows(name: str, texts: Sequence[str], window: int, vocabulary: int | str | None = None) -> Dataset:
    """Cut texts into windows without overlap, each with the next token of every token as target; see `load_text`."""
    train, test, classes = _encode_windows(name, texts, window, vocabulary)
    digest = hashlib.sha256("\0".join([*texts, *classes]).encode())
    return replace(_from_windows(name, train, test, classes), fingerprint=digest.hexdigest())


def _encode_windows(name: str, texts: Sequence[str], window: int, vocabulary: int | str | None) -> Decoded:
    """Return windows of `window` + 1 tokens, and for each its text and how many characters its targets have."""
    check_positive_int("window", window)
    classes, encode = make_vocabulary(texts, vocabulary)
    trains, tests = [], []
    for place, text in enumerate(texts):
        tokens, starts = encode(text)
        count = (len(tokens) - 1) // window
        if count < 2:
            which = f", text {place + 1}" if len(texts) > 1 else ""
            unit = "characters" if len(tokens) == len(text) else "tokens"
            raise ValueError(f"data {name}{which}: {len(tokens)} {unit}; two windows of {window} need {2 * window + 1}")
        windows = tokens.unfold(0, window + 1, window)
        ends = torch.cat([starts, torch.tensor([len(text)])])[1::window][: count + 1]
        about = torch.stack([torch.full((count,), place), ends.diff()], 1)
        held_out = max(1, count // 10)
        trains.append((windows[:-held_out], about[:-held_out]))
        tests.append((windows[-held_out:], about[-held_out:]))
    return _join(trains), _join(tests), classes


def _join(parts: Sequence[Part]) -> Part:
    windows, about = (torch.cat(each) for each in zip(*parts, strict=True))
    return windows, about


def _from_windows(name: str, train: Part, test: Part, classes: tuple[str, ...]) -> Dataset:
    def examples(windows: Tensor, about: Tensor) -> Examples:
        return Examples(windows[:, :-1], windows[:, 1:], source=about[:, 0], characters=about[:, 1])

    return Dataset(name, train=examples(*train), test=examples(*test), classes=classes)


def decode(tokens: Tensor, dataset: Dataset) -> str:
    """Return the text of a sequence of tokens.

    Example:
        >>> text = cut_windows("abc", ["abcabcabc"], 3)
        >>> decode(text.train.x[0], text)
        'abc'
    """
    words = [dataset.classes[code] for code in tokens.tolist()]
    if all(len(word) == 1 for word in dataset.classes):
        return "".join(words)
    from tokenizers import decoders

    return decoders.ByteLevel().decode(words)
