"""Pieces of Markdown."""


def write_table(rows: list[list[str]]) -> str:
    """Write a Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
