"""JSON that is parsed with bounds: many lines at once give what each line gives alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant import _json
from pliant._json import parse_json, parse_lines, seal

LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TABLES = st.dictionaries(st.text(), st.recursive(LEAVES | st.text(), lambda inner: st.lists(inner), max_leaves=5))


@given(st.lists(TABLES))
def test_lines_are_parsed_as_one_by_one(tables: list[dict[str, object]]) -> None:
    import json

    lines = [json.dumps(table).encode() for table in tables]
    assert parse_lines(lines) == [parse_json(line) for line in lines] == tables


@pytest.mark.parametrize(
    "bad",
    [
        b'{"a": 1e999}',
        b'{"a": NaN}',
        b'{"a": 99999999999999999999}',
        b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}",
        b'{"a": 1',
        b'{"a": 1}, {"b": 2}',
        b"",
        b"\xff\xfe",
    ],
)
def test_a_bad_line_is_refused_as_it_is_alone(bad: bytes) -> None:
    with pytest.raises(ValueError) as alone:
        parse_json(bad)
    with pytest.raises(ValueError) as among:
        parse_lines([b'{"a": 1}', bad, b'{"a": 2}'])
    assert str(among.value) == str(alone.value)


def test_digests_that_look_like_powers_of_ten_do_not_slow_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [seal({"step": step}) for step in range(200)]
    assert any(b"e1" in line.rpartition(b'"digest"')[2] for line in lines)

    def refuse(line: bytes) -> None:
        raise AssertionError(f"{line!r} was parsed alone")

    monkeypatch.setattr(_json, "parse_json", refuse)
    assert [record["step"] for record in parse_lines(lines)] == list(range(200))


def test_lines_that_are_tables_only_together_are_refused() -> None:
    """Joined by commas, they would be as many tables."""
    with pytest.raises(ValueError):
        parse_lines([b'{"a": 1}, {"b": [1', b'{"c": 2}]}'])
