"""What command lines say of the form `key=value`."""

import tomllib
from collections.abc import Iterable
from typing import Any


def override(values: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Change values in place by assignments such as `seeds=3` or `stream.epochs=5`.

    Args:
        values: What is changed; tables are dictionaries. A table that is a text is that table's `name`.
        assignments: Each `key=value`, with dots in the key for what lies inside tables; the value as in TOML.

    Returns:
        The values.

    Raises:
        ValueError: If an assignment has no =, or goes into what is no table.

    Example:
        >>> override({"stream": "single"}, ["stream.epochs=5", "seeds=[1, 2]"])
        {'stream': {'name': 'single', 'epochs': 5}, 'seeds': [1, 2]}
    """
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign:
            raise ValueError(f"{assignment!r} must be of the form key=value")
        _assign(values, key.split("."), parse_value(text))
    return values


def _assign(values: dict[str, Any], keys: list[str], value: Any) -> None:
    *tables, last = keys
    for key in tables:
        inner = values.setdefault(key, {})
        if isinstance(inner, str):
            inner = values[key] = {"name": inner}
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(keys)}: {key!r} is no table")
        values = inner
    values[last] = value


def parse_value(text: str) -> Any:
    """Read a value as TOML, and as plain text where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
