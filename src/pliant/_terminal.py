"""Make text from files harmless for terminals."""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that break lines or set the direction of text, and lone
surrogates, which no file can hold."""


def printable(text: str) -> str:
    r"""Write control characters as escapes, so that a terminal shows them and does not obey them.

    Every output passes here: a name in a file may hold sequences that clear a screen or retitle a window.

    Example:
        >>> print(printable("a\x1b[2Jb"))
        a\x1b[2Jb
    """
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)
