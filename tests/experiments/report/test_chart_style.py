"""Colors are distinguishable on both backgrounds, also with color vision deficiencies."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pliant.experiments.report.chart_style import DARK, LIGHT, assign_series
from pliant.experiments.report.comparison import Contender
from pliant.experiments.report.grouping import compare_folders
from tests.experiments.report.stores import write_results

# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(color: str) -> np.ndarray:
    coded = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    relative = TO_XYZ @ rgb.clip(0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(relative > 0.008856, np.cbrt(relative), 7.787 * relative + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(color)) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_any_two_colors_are_distinguishable(theme: dict[str, Any], vision: str) -> None:
    colors = [theme["vanilla"], theme["fresh"], *theme["hues"]]
    seen = {color: lab(np.asarray(VISION[vision]) @ linear(color)) for color in colors}
    for a, b in itertools.combinations(colors, 2):
        assert np.linalg.norm(seen[a] - seen[b]) >= 16, (a, b)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_contrast_with_the_background(theme: dict[str, Any]) -> None:
    for mark in (theme["vanilla"], theme["fresh"], *theme["hues"], theme["good"], theme["warn"]):
        assert contrast(mark, theme["page"]) >= 3, mark  # WCAG 2.2, 1.4.11
    for word in (theme["ink"], theme["muted"], theme["accent"]):
        assert contrast(word, theme["page"]) >= 4.5, word  # WCAG 2.2, 1.4.3
        assert contrast(word, theme["soft"]) >= 4.5, word
    assert contrast(theme["page"], theme["good"]) >= 4.5


def contenders(root: Path, methods: int) -> tuple[Contender, ...]:
    labels = ["vanilla", "fresh", *(f"m{i:02}" for i in range(methods))]
    (comparison,) = compare_folders([write_results(root, {label: [0.5] for label in labels})])
    return comparison.contenders


def test_sixty_contenders_use_all_colors_and_patterns(tmp_path: Path) -> None:
    series = assign_series(contenders(tmp_path, 58))
    looks = [(each.slot, each.dash) for each in series]
    assert len(set(looks)) == 2 + 30
    assert [each.name for each in series if each.shown] == ["vanilla", "fresh", *(f"m{i:02}" for i in range(6))]
    assert len(set(looks[:32])) == 32


def test_few_contenders_are_all_shown(tmp_path: Path) -> None:
    assert all(each.shown for each in assign_series(contenders(tmp_path, 8)))
