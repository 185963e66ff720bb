"""Durations such as 30m are read and written."""

import pytest

from pliant._duration import parse_duration, write_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("90", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), (" 2m5s ", 125)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration("budget", text) == seconds


@pytest.mark.parametrize("value", ["", "soon", "-5m", "0s", 0, -1, "30 minutes", "5m1h", True, float("inf"), None])
def test_anything_else_is_rejected_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"^budget is .*; it must be a positive duration: 90s, 30m, 1h30m"):
        parse_duration("budget", value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (7260, "2 h 1 min")]
)
def test_durations_are_written_with_two_units(seconds: float, text: str) -> None:
    assert write_duration(seconds) == text
