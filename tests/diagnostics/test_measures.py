"""The records of the measures, by which listings, reports and the documentation go."""

import re
from pathlib import Path

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


def test_the_docs_list_every_measure_as_its_record_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    records = map(measures.info, measures.names())
    assert rows == [
        (r.name, r.definition.replace("|", "\\|"), ", ".join(sorted(r.needs)), r.cost, r.source) for r in records
    ]
