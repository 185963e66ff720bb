"""The records of the measures, by which listings, reports and the documentation go."""

import re
from pathlib import Path

import pytest

from pliant.diagnostics import measures


def test_records_are_complete() -> None:
    for name in measures.names():
        record = measures.info(name)
        assert record.name == name
        assert record.definition
        assert record.source
        assert record.needs
        if record.sign is not None:
            assert record.sign.explains
            assert record.sign.factor or record.sign.amount


def test_names_are_given_in_a_list() -> None:
    with pytest.raises(ValueError, match=r"measures: 'loss' is a string; it must be a list of names, \['loss'\]"):
        measures.select("loss")
    assert [record.name for record in measures.select(["loss"])] == ["loss"]


def test_the_docs_list_every_measure_as_its_record_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    records = map(measures.info, measures.names())
    assert rows == [
        (r.name, r.definition.replace("|", "\\|"), ", ".join(sorted(r.needs)), r.cost, r.source) for r in records
    ]
