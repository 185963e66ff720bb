"""Check names, suggest the nearest allowed one, and read arguments from docstrings."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any


def check_names(where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise a ValueError for the first name that is not allowed.

    Args:
        where: The argument or table that holds the names, for the message.
        given: The names.
        allowed: The allowed names.
    """
    allowed = dict.fromkeys(allowed)
    for name in given:
        if name not in allowed:
            raise ValueError(f"{where}: there is no {name!r}; {suggest(name, allowed)}")


def keyword_options(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword-only arguments of a function with their defaults.

    Example:
        >>> keyword_options(sorted)
        {'key': None, 'reverse': False}
    """
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def read_arguments(documented: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each argument in a docstring, as one line.

    Example:
        >>> read_arguments(suggest)["word"]
        'The word that is not allowed.'
    """
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{inspect.getdoc(documented) or ''}\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def suggest(word: str, allowed: Iterable[str]) -> str:
    """List the allowed words, the most similar one first.

    Args:
        word: The word that is not allowed.
        allowed: The allowed words.

    Returns:
        The end of a sentence.

    Example:
        >>> suggest("SWT", ["l2", "swr"])
        "did you mean 'swr'? Allowed: l2, swr"
    """
    options = list(allowed)
    folded = {option.lower(): option for option in reversed(options)}
    near = [folded[each] for each in difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.5)]
    if not options:
        return "nothing is allowed here"
    listing = f"llowed: {', '.join(options)}"
    return f"did you mean {near[0]!r}? A{listing}" if near else f"a{listing}"
