import math
import re

import pytest

from pliant._html_charts import Curves, find_ticks, render_bars, render_curves


def test_curves_reach_the_corners_of_their_plot() -> None:
    text = render_curves("rise", [0, 10], [Curves("a <b>", "red", [[0.0, 1.0]])], "steps")
    assert text.count('points="0.00,100.00 100.00,0.00"') == 2, "the curve, and the mean of one curve"
    assert "a &lt;b&gt;" in text


def test_values_that_are_not_finite_stay_inside_the_plot() -> None:
    text = render_curves("fall", [0, 1], [Curves("a", "red", [[-math.inf, 1.0], [0.0, 1.0]])], "steps")
    heights = [float(y) for y in re.findall(r",(-?[\d.]+|nan|inf)[ \"]", text.replace("nan", "999"))]
    assert all(0 <= y <= 100 for y in heights)


def test_bars_beyond_the_limit_are_marked_and_infinite_ones_fill_the_track() -> None:
    text = render_bars("layers", {"0": 0.5, "2": 4.0, "4": math.inf, "6": -1.0}, 1.0)
    assert re.findall(r'fill( beyond)?" style="display:block;width:([\d.]+)%', text) == [
        ("", "12.5"), (" beyond", "100.0"), (" beyond", "100.0"), ("", "0.0"),
    ]  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.91, 0.93), (-3.0, 250.0), (2.0, 2.0), (1e-6, 2e-6)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = find_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert all(low <= tick <= max(high, low + 1) for tick in ticks)
