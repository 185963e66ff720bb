"""Assignments on the command line change values inside tables, and are read as TOML where they are TOML."""

import pytest

from pliant._key_values import override, parse_value


def test_overrides() -> None:
    values = override({"stream": "single", "seeds": 3}, ["stream.epochs=5", "training.lr=1e-2", "seeds=[1]"])
    assert values == {"stream": {"name": "single", "epochs": 5}, "training": {"lr": 0.01}, "seeds": [1]}
    with pytest.raises(ValueError, match="'seeds' must be of the form key=value"):
        override({}, ["seeds"])
    with pytest.raises(ValueError, match="'seeds' is not a table"):
        override({"seeds": 3}, ["seeds.first=1"])


def test_values() -> None:
    assert [parse_value(text) for text in ("1e-3", "true", "[1, 2]", "mnist", '"1"')] == [
        0.001,
        True,
        [1, 2],
        "mnist",
        "1",
    ]


def test_a_date_is_the_text_that_was_written() -> None:
    assert [parse_value(text) for text in ("2024-03-01", "07:32:00")] == ["2024-03-01", "07:32:00"]
