"""Text as a data set: tokens, cut into windows; the target of every token is the next one.

A text is a `.txt` file, a Parquet file with a column of texts, a file on the hub, or Python's own reference. Tokens are
characters, or byte pairs (BPE) of Hugging Face's `tokenizers`. A folder of `.txt` files holds several texts, and `then`
adds one: streams may train on one text after the other.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pliant._files import check_expansion, open_regular, read_regular
from pliant._importing import naming_extra
from pliant._validation import check_positive_int
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
}
"""Texts by name: a summary, and the files on the hub."""

_ROWS = 256
"""How many rows of a Parquet file are decoded at once."""

Encode = Callable[[str], list[int]]


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
    texts = [text for each in (name, then) if each is not None for text in read_texts(each, column)]
    if characters is not None:
        check_positive_int("characters", characters)
        texts = [text[:characters] for text in texts]
    shown = Path(name).name if then is None else f"{Path(name).name}, then {Path(then).name}"
    return cut_windows(shown, texts, window, vocabulary)


def read_texts(name: str, column: str = "text") -> list[str]:
    """Read the texts that a name stands for; see `load_text`.

    Raises:
        ValueError: If the name is not a text, or a file cannot be read.
    """
    if not is_text(name):
        raise ValueError(
            f"data {name!r} is not a text; it must be a .txt or .parquet file, or one of {', '.join(TEXTS)}"
        )
    if name == "python_docs":
        from pydoc_data.topics import topics

        return ["\n".join(topics[topic] for topic in sorted(topics))]
    if name in TEXTS:
        return ["".join(text for file in TEXTS[name][1] for text in read_texts(file))]
    if name.startswith("hub:"):
        owner, _, rest = name.removeprefix("hub:").partition("/")
        repository, _, file = rest.partition("/")
        if not file.endswith(".parquet"):
            raise ValueError(f"data {name!r} is not a file on the hub; it must be hub:OWNER/NAME/FILE.parquet")
        return [_read_column(download(f"{owner}/{repository}", file), column)]
    path = Path(name)
    if path.suffix == ".parquet":
        return [_read_column(path, column)]
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        return [read_regular(file).decode("utf8") for file in files]
    except UnicodeDecodeError as error:
        raise ValueError(f"data {name!r}: a text must be UTF-8; {error.reason} at byte {error.start}") from error


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
    """Return the tokens by their codes, and the function that turns a text into codes; see `load_text`.

    Example:
        >>> tokens, encode = make_vocabulary(["abba"], None)
        >>> tokens, encode("bab")
        (('a', 'b'), [1, 0, 1])
    """
    if vocabulary is None:
        tokens = tuple(sorted(set().union(*texts)))
        codes = {character: code for code, character in enumerate(tokens)}
        return tokens, lambda text: [codes[character] for character in text]
    with naming_extra("a vocabulary of byte pairs", "language"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    if isinstance(vocabulary, str):
        if not Path(vocabulary).is_file():
            raise ValueError(f"vocabulary is {vocabulary!r}; it must be a size, or an existing tokenizer.json")
        content = read_regular(Path(vocabulary))
        with _naming_vocabulary(vocabulary):
            tokenizer = Tokenizer.from_str(content.decode("utf8"))
            if sorted(tokenizer.get_vocab().values()) != list(range(tokenizer.get_vocab_size())):
                raise ValueError("the codes of its tokens are not 0, 1, … without gaps")
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

    def encode(text: str) -> list[int]:
        with _naming_vocabulary(vocabulary):
            codes: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return codes

    return tokens, encode


@contextlib.contextmanager
def _naming_vocabulary(vocabulary: int | str) -> Iterator[None]:
    """Name the vocabulary in whatever `tokenizers` raises: it has no errors of its own."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"vocabulary is {vocabulary!r}, which is not a tokenizer that works: {error}") from error


def cut_windows(name: str, texts: Sequence[str], window: int, vocabulary: int | str | None = None) -> Dataset:
    """Cut texts into windows without overlap, each with the next token of every token as target; see `load_text`."""
    check_positive_int("window", window)
    classes, encode = make_vocabulary(texts, vocabulary)
    trains, tests = [], []
    for place, text in enumerate(texts):
        tokens = torch.tensor(encode(text))
        count = (len(tokens) - 1) // window
        if count < 2:
            which = f", text {place + 1}" if len(texts) > 1 else ""
            unit = "characters" if len(tokens) == len(text) else "tokens"
            raise ValueError(f"data {name}{which}: {len(tokens)} {unit}; two windows of {window} need {2 * window + 1}")
        x, y = (tokens[shift : shift + count * window].view(count, window) for shift in (0, 1))
        held_out = max(1, count // 10)
        source = torch.full((count,), place)
        trains.append((x[:-held_out], y[:-held_out], source[:-held_out]))
        tests.append((x[-held_out:], y[-held_out:], source[-held_out:]))
    digest = hashlib.sha256("\0".join([*texts, *classes]).encode())
    return Dataset(name, train=_join(trains), test=_join(tests), classes=classes, fingerprint=digest.hexdigest())


def _join(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Examples:
    x, y, source = (torch.cat(each) for each in zip(*parts, strict=True))
    return Examples(x, y, source=source)


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
