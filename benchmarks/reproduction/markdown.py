"""Pieces of Markdown."""


def write_table(rows: list[list[str]], space: str = " ") -> str:
    """Write a Markdown table; the first row is its head. Cells are set apart by bars with `space` around them."""
    bar = f"{space}|{space}"
    lines = [bar.join(["", *row, ""]).strip() for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def link(text: str, target: str) -> str:
    """Write a link."""
    return f"[{text}]({target})"
