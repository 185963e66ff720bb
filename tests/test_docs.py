"""All code in README and docs runs, and what they list is what there is."""

import re
from pathlib import Path

import pytest
from benchmarks.pictures import PICTURES

from pliant import methods

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```python file=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_SITE = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=[str(page.relative_to(ROOT)) for page in WITH_CODE])
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run from top to bottom in one namespace, in a folder with the files that it names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / ".cache"))
    namespace: dict[str, object] = {"__name__": "page"}
    text = page.read_text()
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content)
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], str(page), "exec"), namespace)
    assert namespace.keys() > {"__name__", "__builtins__"}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


def anchors(page: Path) -> list[str]:
    """The names by which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_index_lists_every_method() -> None:
    row = r"^\| \[`(\w+)`\]\((\w+)\.md\) \| `(\w+)` \| (.+?) \| .+ \| (.+?) \|$"
    page = (ROOT / "docs" / "methods" / "index.md").read_text()
    rows = re.findall(row, page, re.MULTILINE)
    infos = [methods.info(name) for name in methods.names()]
    assert sorted(rows) == sorted((info.name, info.name, info.cls.__name__, info.acts, info.paper) for info in infos)
    assert page.count(f"{len(infos)} published methods") == 1
    assert f"[{len(infos)} methods](docs/methods/index.md)" in (ROOT / "README.md").read_text()


def test_readme_is_short() -> None:
    """One screen, then one command and one picture for each thing that a user does."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    assert len(text.split()) < 1000
    for picture in PICTURES:
        assert text.count(f"(docs/images/{picture}.svg)") == 1


def test_every_card_is_of_a_method() -> None:
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}
    assert pages == {"index", *methods.names()}


def count_words(text: str) -> int:
    """Count the words of a page outside code and generated blocks."""
    written = re.sub(r"^```.*?^```|<!-- (?!end)[^>]*-->.*?<!-- end[^>]*-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in written.split())


def test_words_are_counted_outside_code_and_generated_blocks() -> None:
    page = "# Two words\n\n| a | – |\n\n```python\nx = 1\n```\n\n<!-- zoo -->\nmany words\n<!-- end zoo -->\nlast\n"
    assert count_words(page) == 4


@pytest.mark.parametrize("page", OF_SITE, ids=[str(page.relative_to(ROOT)) for page in OF_SITE])
def test_pages_are_short(page: Path) -> None:
    assert count_words(page.read_text()) <= (1100 if page.parent.name == "methods" else 1500)
