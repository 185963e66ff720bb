"""The pictures of the README show the kept runs."""

import pytest
from benchmarks.pictures import IMAGES, PICTURES
from benchmarks.reproduction.decisions import decision_block
from benchmarks.reproduction.drawings import digest


@pytest.mark.parametrize("name", PICTURES)
def test_picture_shows_the_kept_runs(name: str) -> None:
    rows = PICTURES[name][0]()
    text = (IMAGES / f"{name}.svg").read_text()
    assert text.startswith(f"<!-- numbers: {digest(rows)} -->"), "python -m benchmarks.pictures draws it"
    assert 'fill="#ffffff"' in text, "a picture without a background cannot be read on a dark page"
    assert len({row["line"] for row in rows}) > 1
    for row in rows:
        assert row.get("low", row["mean"]) <= row["mean"] <= row.get("high", row["mean"])


def test_readme_says_what_its_pictures_show() -> None:
    """The README's captions name the numbers that are drawn."""
    tasks = {(row["line"], row["x"]): row["mean"] for row in PICTURES["plasticity"][0]()}
    assert round(tasks["plain training", 1], 2) == 1.0
    assert round(tasks["plain training", 12], 1) == 0.2
    assert all(value > 0.99 for (line, _), value in tasks.items() if line == "with spectral regularization")
    ends = {row["line"]: round(100 * row["mean"]) for row in PICTURES["treat"][0]()}
    assert ends == {"continue": 38, "apply FIRE, then continue": 43, "train from scratch": 44}


def test_decision_table_names_methods_by_how_they_act() -> None:
    rows = [line.split("|") for line in decision_block("supervised").splitlines()[2:]]
    assert len(rows) == 4
    for row in rows:
        attached, told = row[3], row[4]
        assert "`shrink_perturb`" in told
        assert "`shrink_perturb`" not in attached
        assert "`full_reset`" not in told, "training from scratch is the reference, not a remedy"
