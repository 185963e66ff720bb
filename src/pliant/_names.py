"""Names and what they stand for: what is allowed, what was probably meant, what a docstring says."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any


def check_names(where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise a ValueError that names the first of these names that is not allowed.

    Args:
        where: What they are names in.
        given: The names.
        allowed: What they may be.
    """
    allowed = list(allowed)
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
    """Return what a docstring says about each argument, in a line.

    Example:
        >>> read_arguments(suggest)["word"]
        'What was given.'
    """
    section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{inspect.getdoc(documented) or ''}\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def suggest(word: str, allowed: Iterable[str]) -> str:
    """Say which words are allowed, the likely one first.

    Args:
        word: What was given.
        allowed: What could have been given.

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
