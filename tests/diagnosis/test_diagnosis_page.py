"""The page of a diagnosis."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pliant
from tests import zoo


class Tags(HTMLParser):
    """Checks that every tag is closed where it must be, and collects the cells of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "span"):
            self.cells.append(data)


@pytest.fixture(scope="module")
def found() -> pliant.Diagnosis:
    torch.manual_seed(0)
    inputs = torch.randn(300, 12)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    return pliant.diagnose(model, (inputs, inputs[:, :4].argmax(1)), cross_entropy, steps=60, progress=False)


def test_page_is_well_formed_complete_and_escaped(found: pliant.Diagnosis) -> None:
    text = found.to_html("a <b> & c")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "http" not in text, "it needs no other file"
    for key, value in found.signs.values.items():
        assert f"{value:.4g}" in tags.cells, key


def test_the_verdict_the_curves_the_layers_and_the_code_are_on_the_page(found: pliant.Diagnosis) -> None:
    assert found.trial is not None
    text = found.to_html()
    assert '<p class="verdict">Lost: this network learns the new data worse than a fresh one.</p>' in text
    assert text.count("<polyline") == 2 * len(found.trial.pairs) + 2, "each curve and two means"
    assert '<span class="grade severe">severe</span><b>Units have gone dormant</b>' in text
    assert 'class="bars"' in text
    assert "redo = pliant.ReDo(model, x, every=100)" in text
    assert 'id="theme"' in text


def test_signs_in_the_range_of_healthy_networks_are_folded_away(found: pliant.Diagnosis) -> None:
    before, _, folded = found.to_html().partition("In the range of healthy networks: ")
    folded = folded.partition("</details>")[0]
    noted = [each for each in found.signs.findings() if each.present or each.layers]
    assert before.count('<div class="sign') == len(noted)
    assert folded.count('<div class="sign absent"') == len(found.signs.findings()) - len(noted) > 0


def test_commands_are_written_without_backticks(found: pliant.Diagnosis) -> None:
    assert "run pliant treat, or call pliant.treat." in found.to_html()
    assert "`" not in found.to_html().partition("<main>")[2].partition("</main>")[0]


def test_absent_signs_are_not_written_as_present(found: pliant.Diagnosis) -> None:
    bare = pliant.diagnose(zoo.build("mlp"), measures=["weight_l2", "spectral_norm"])
    text = bare.to_html("weights alone")
    assert "No sign that the weights have grown" in text
    assert '<span class="grade severe">' not in text
    assert "<b>The weights have grown" not in text
    assert "there is no data; give the new data, with labels, to get a verdict" in text
    assert "<polyline" not in text
