"""The frame and the tables that all HTML pages share."""

from pliant._html import DARK, LIGHT, render_page, render_table


def test_page_holds_title_body_and_both_themes() -> None:
    page = render_page("a <b>", "<p>body</p>", LIGHT | {"mine": "red"}, DARK | {"mine": "blue"})
    assert page.startswith("<!doctype html>")
    assert "<title>a &lt;b&gt;</title>" in page
    assert "<p>body</p>\n<script>" in page
    assert "--mine: red;" in page
    assert "--mine: blue;" in page
    assert "http" not in page


def test_themes_name_the_same_colors() -> None:
    assert LIGHT.keys() == DARK.keys()


def test_table_has_headings_and_wraps_sentences() -> None:
    table = render_table("what <it> shows", ["name", "value", "text"], [["a", "<b>1</b>", "long"]], texts=("text",))
    assert 'aria-label="what &lt;it&gt; shows"' in table
    assert '<th scope="col">value</th><th scope="col" class="text">text</th>' in table
    assert '<th scope="row">a</th><td><b>1</b></td><td class="text">long</td>' in table
