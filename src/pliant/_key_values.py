"""What command lines say of the form `key=value`."""

import datetime
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


def read_options(assignments: Iterable[str], *tables: str) -> dict[str, dict[str, Any]]:
    """Read assignments to what lies inside these tables, and to nothing else.

    Example:
        >>> read_options(["data.size=32"], "data", "model")
        {'data': {'size': 32}, 'model': {}}
    """
    values = override({}, assignments)
    for key, value in values.items():
        if key not in tables or not isinstance(value, dict):
            allowed = " or ".join(f"'{table}.'" for table in tables)
            raise ValueError(f"--set {key}: only what begins with {allowed} has a meaning here")
    return {table: values.get(table, {}) for table in tables}


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
    """Read a value as TOML, and as plain text where it is none, or a date."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, datetime.date | datetime.time) else value
