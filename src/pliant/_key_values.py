"""Parse `key=value` arguments of the command line."""

import datetime
import tomllib
from collections.abc import Iterable
from typing import Any


def override(values: dict[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """Change values in place by assignments such as `seeds=3` or `stream.epochs=5`.

    Args:
        values: The values to change; tables are dictionaries. A text in the place of a table is its `name`.
        assignments: Texts `key=value`; a dot in the key leads into a table, and the value is TOML.

    Returns:
        The values.

    Raises:
        ValueError: If an assignment has no =, or its key leads into something that is not a table.

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


def read_options(assignments: Iterable[str], *tables: str) -> dict[str, dict[str, Any]]:
    """Parse assignments to keys of these tables; reject all others.

    Example:
        >>> read_options(["data.size=32"], "data", "model")
        {'data': {'size': 32}, 'model': {}}
    """
    values = override({}, assignments)
    for key, value in values.items():
        if key not in tables or not isinstance(value, dict):
            allowed = " or ".join(f"'{table}.'" for table in tables)
            raise ValueError(f"--set {key}: the key must begin with {allowed} here")
    return {table: values.get(table, {}) for table in tables}


def _assign(values: dict[str, Any], keys: list[str], value: Any) -> None:
    *tables, last = keys
    for key in tables:
        inner = values.setdefault(key, {})
        if isinstance(inner, str):
            inner = values[key] = {"name": inner}
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(keys)}: {key!r} is not a table")
        values = inner
    values[last] = value


def parse_value(text: str) -> Any:
    """Parse a value as TOML. Dates, and text that is not TOML, stay text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, datetime.date | datetime.time) else value
