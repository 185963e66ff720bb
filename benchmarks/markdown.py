"""Pieces of Markdown."""


def write_table(rows: list[list[str]]) -> str:
    """Write a Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def join(words: list[str]) -> str:
    """Join words as a sentence has them.

    Example:
        >>> join(["a", "b", "c"])
        'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
