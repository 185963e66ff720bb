from html.parser import HTMLParser

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pliant.diagnostics import diagnose
from pliant.diagnostics.diagnosis_page import render_diagnosis
from tests import zoo


class Tags(HTMLParser):
    """Checks that every tag is closed where it must be, and collects the cells of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "span"):
            self.cells.append(data)


def test_page_is_well_formed_complete_and_escaped() -> None:
    model, initial = zoo.build("mlp"), zoo.build("mlp")
    with torch.no_grad():
        model[0].weight *= 5
    found = diagnose(model, zoo.batch("mlp"), cross_entropy, initial)
    text = render_diagnosis(found, "a <b> & c")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "http" not in text, "it needs no other file"
    for key, value in found.values.items():
        assert f"{value:.4g}" in tags.cells, key
    assert 'class="sign"' in text
    assert 'class="sign absent"' in text
    bare = render_diagnosis(diagnose(nn.Linear(2, 2)), "weights alone")
    assert "without a reference" in bare
    assert "it needs a batch" in bare
