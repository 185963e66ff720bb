"""Text as a data set: characters, cut into windows; the target of every character is the next one."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from pliant._validation import check_positive_int
from pliant.data.dataset import Dataset, Examples


def is_text(path: Path) -> bool:
    """Return whether a path is a `.txt` file, or a folder with such files and without folders."""
    if not path.is_dir():
        return path.suffix == ".txt" and path.is_file()
    return any(path.glob("*.txt")) and not any(child.is_dir() for child in path.iterdir())


def load_text(path: Path, *, window: int = 64, characters: int | None = None) -> Dataset:
    """Read a text file, or all `.txt` files of a folder in the order of their names.

    Args:
        path: The file or folder.
        window: The number of characters of an example.
        characters: Read only the first so many characters; all by default.

    Returns:
        The data set. The last tenth of the windows is the test set.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        text = "".join(file.read_text(encoding="utf8") for file in files)
    except UnicodeDecodeError as error:
        raise ValueError(f"data {str(path)!r}: a text must be UTF-8; {error.reason} at byte {error.start}") from error
    return cut_windows(path.name, text, window, characters)


def load_python_docs(*, window: int = 64, characters: int | None = None) -> Dataset:
    """Load the language reference that comes with Python (`help("topics")`): English text that needs no download.

    Args:
        window: The number of characters of an example.
        characters: Read only the first so many characters; all by default.
    """
    from pydoc_data.topics import topics

    return cut_windows("python_docs", "\n".join(topics[name] for name in sorted(topics)), window, characters)


def cut_windows(name: str, text: str, window: int, characters: int | None) -> Dataset:
    """Cut a text into windows without overlap, each with the next character of every character as target."""
    check_positive_int("window", window)
    if characters is not None:
        text = text[: check_positive_int("characters", characters)]
    count = (len(text) - 1) // window
    if count < 2:
        raise ValueError(f"data {name}: {len(text)} characters; two windows of {window} need {2 * window + 1}")
    vocabulary = tuple(sorted(set(text)))
    codes = {character: code for code, character in enumerate(vocabulary)}
    tokens = torch.tensor([codes[character] for character in text[: count * window + 1]])
    x, y = tokens[:-1].view(count, window), tokens[1:].view(count, window)
    tests = max(1, count // 10)
    return Dataset(
        name,
        train=Examples(x[:-tests], y[:-tests]),
        test=Examples(x[-tests:], y[-tests:]),
        classes=vocabulary,
        fingerprint=hashlib.sha256(text.encode()).hexdigest(),
    )


def decode(tokens: Tensor, dataset: Dataset) -> str:
    """Return the text of a sequence of tokens.

    Example:
        >>> text = cut_windows("abc", "abcabcabc", 3, None)
        >>> decode(text.train.x[0], text)
        'abc'
    """
    return "".join(dataset.classes[code] for code in tokens.tolist())
