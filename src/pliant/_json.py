"""JSON that is parsed with bounds, and JSON that carries a digest of itself."""

import contextlib
import hashlib
import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

_DEEPEST = 50
"""The most levels of nesting. Pliant's own files have fewer than ten."""
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
"""The whole numbers that are read: larger ones overflow where they meet a float."""
_HUGE_POWER = re.compile(r'[eE]\+?[0-9]{3}(?![0-9a-f]*")')
"""A power of ten beyond the floats; what a quote ends, as most digests that look like one, is not a number."""
_SEAL = re.compile(rb',\s*"digest": "([0-9a-f]{16})"\s*\}\s*\Z')
_LONGEST_SEAL = 64


_BETWEEN = secrets.token_hex(8)
"""What stands between lines that are parsed together: no file can hold it, so each line must be whole."""


def parse_json(content: bytes | str) -> Any:
    """Parse JSON; whatever is wrong with it is a ValueError.

    Example:
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
        ValueError: it is nested more than 50 levels deep
    """
    # What `json.loads` does, with decoders made once: making one takes longer than parsing a short line.
    text = content if isinstance(content, str) else content.decode(json.detect_encoding(content), "surrogatepass")
    decoder = _WITH_POWERS if _HUGE_POWER.search(text) else _DECODER  # Only 1e999 and the like become infinite.
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from None
    if text.count("[") + text.count("{") > _DEEPEST:
        check_depth(value)  # Most texts open too few tables and lists to need it.
    return value


def parse_lines(lines: Sequence[bytes]) -> list[Any]:
    """Parse lines of JSON, which is faster together than one by one.

    Example:
        >>> parse_lines([b'{"epoch": 1}', b'{"epoch": 2}'])
        [{'epoch': 1}, {'epoch': 2}]
    """
    # A line is parsed alone if it may be too deep or holds 1e999 or the like.
    if all(line.count(b"[") + line.count(b"{") <= _DEEPEST for line in lines):
        with contextlib.suppress(ValueError):
            text = "[" + f',"{_BETWEEN}",'.join([line.decode() for line in lines]) + "]"
            values: list[Any] = [] if _HUGE_POWER.search(text) else _DECODER.decode(text)
            if len(values) == 2 * len(lines) - 1 and all(value == _BETWEEN for value in values[1::2]):
                return values[::2]
    return [parse_json(line) for line in lines]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a finite number")


def _read_int(digits: str) -> int:
    if _SMALLEST <= (value := int(digits)) <= _LARGEST:
        return value
    raise ValueError(f"{digits[:20]}… does not fit into 64 bits")


def _read_float(digits: str) -> float:
    return value if math.isfinite(value := float(digits)) else _refuse(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_read_int)
_WITH_POWERS = json.JSONDecoder(parse_constant=_refuse, parse_int=_read_int, parse_float=_read_float)


def check_depth(value: Any) -> None:
    """Raise a ValueError if tables and lists are nested too deeply for code that recurses into them."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in _contents(each) if isinstance(inner, Mapping | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def without_infinities(value: Any) -> Any:
    """Return plain types with None in place of numbers that JSON cannot hold.

    Example:
        >>> without_infinities({"steps": math.inf, "values": (1.0, math.nan)})
        {'steps': None, 'values': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: without_infinities(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seal(record: Mapping[str, Any], previous: str = "", indent: int | None = None) -> bytes:
    """Write a table as JSON whose last key is a digest of the text before it.

    Args:
        record: The table; not empty.
        previous: The digest of the line before, which then guards that line too.
        indent: Spaces of each level; None for one line.

    Example:
        >>> seal({"loss": 0.5})
        b'{"loss": 0.5, "digest": "7ef6f925a7c46140"}'
    """
    if not record:
        raise ValueError("an empty table has no digest")
    body = json.dumps(record, allow_nan=False, indent=indent)[:-1].rstrip().encode()
    comma, end = (b", ", b"}") if indent is None else (b",\n" + b" " * indent, b"\n}")
    return body + comma + f'"digest": "{_digest(body, previous)}"'.encode() + end


def unseal(content: bytes, previous: str = "") -> dict[str, Any]:
    """Parse what `seal` wrote, without its digest.

    Raises:
        ValueError: If the content is not what was written.

    Example:
        >>> unseal(seal({"loss": 0.5}))
        {'loss': 0.5}
        >>> unseal(seal({"loss": 0.5}).replace(b"5,", b"6,"))
        Traceback (most recent call last):
        ValueError: the content does not match its digest
    """
    read_seal(content, previous)
    record: dict[str, Any] = parse_json(content)
    del record["digest"]
    return record


def read_seal(content: bytes, previous: str = "") -> str:
    """Return the digest of a sealed text, and raise a ValueError if the text has another one."""
    found = _SEAL.search(content, max(0, len(content) - _LONGEST_SEAL))
    if found is None:
        raise ValueError("it is cut off, or it has no digest")
    digest = found.group(1).decode()
    if digest != _digest(content[: found.start()], previous):
        raise ValueError("the content does not match its digest")
    return digest


def has_seal(content: bytes) -> bool:
    """Return whether a text ends with a digest, right or not."""
    return _SEAL.search(content, max(0, len(content) - _LONGEST_SEAL)) is not None


def _digest(body: bytes, previous: str) -> str:
    return hashlib.blake2b(previous.encode() + body, digest_size=8).hexdigest()
