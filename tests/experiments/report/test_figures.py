"""Charts have the ticks that a reader needs."""

from typing import Any

import numpy as np
import pytest

from pliant.experiments.report.chart_style import Series
from pliant.experiments.report.figures import lines
from pliant.experiments.report.histories import Curve


def draw(x: list[float], y: list[float], **settings: Any) -> dict[str, Any]:
    """The encoding of a chart of one curve."""
    places, none = np.arange(len(x)), np.full(len(x), np.nan)
    curve = Curve(np.array(x, float), places, places, np.array(y, float), none, none)
    series = [Series("c0", "vanilla", "vanilla", (1, 0), True)]
    chart = lines({"c0": curve}, series, x_title="task", y_title="y", metric="loss", **settings).to_dict()
    return next(layer["encoding"] for layer in chart["layer"] if {"x", "y"} <= layer.get("encoding", {}).keys())


@pytest.mark.parametrize("last", [2, 3, 8])
def test_a_short_axis_has_all_whole_numbers(last: int) -> None:
    x = list(range(1, last + 1))
    assert draw(x, [0.5] * last)["x"]["axis"]["values"] == x


def test_a_long_axis_has_few_ticks() -> None:
    axis = draw(list(range(1, 51)), [0.5] * 50)["x"]["axis"]
    assert "values" not in axis
    assert axis["tickCount"] == 8


def test_a_logarithmic_axis_has_at_least_two_ticks() -> None:
    wide = draw([1, 2], [0.03, 3.0], log=True)["y"]
    assert wide["scale"]["type"] == "log"
    assert wide["axis"]["values"] == pytest.approx([0.1, 1.0])
    narrow = draw([1, 2], [1.2, 1.6], log=True)["y"]
    assert "type" not in narrow["scale"]
    assert "values" not in narrow["axis"]
