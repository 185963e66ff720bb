"""The site is whole: every link leads somewhere, every public name has a page, search finds, axe is content."""

import re
import sys
from html import unescape
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait

from tests.site.conftest import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import site_parts

MAIN = (
    "index", "start", "which-method", "questions", "howto-training-loop", "plasticity-or-forgetting", "methods/index",
    "methods/spectral", "gallery/index", "gallery/attach", "results", "leaderboard",
    "api/names/pliant.methods.SpectralRegularization", "changelog",
)  # fmt: skip
"""The pages that axe reads."""
QUESTIONS = {
    "which method": "which-method",
    "resume": "howto-training-loop",
    "agent stopped learning": "howto-agents",
    "own images": "howto-own-data",
    "forgetting": "plasticity-or-forgetting",
    "frozen layers LoRA": "questions",
    "pretrained weights": "questions",
    "mixed precision": "questions",
    "learning-rate scheduler": "questions",
    "regression loss": "questions",
    "license": "questions",
}
"""What a newcomer types into the search, and the page that answers."""


def test_links_lead_somewhere(site: Path) -> None:
    """Links within the site, with their anchors; there is no network for the others."""
    found = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    pages = {page: page.read_text(encoding="utf-8") for page in found}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        if "_modules" in page.parts or page.name in ("search.html", "genindex.html", "py-modindex.html"):
            continue
        for link in map(unescape, re.findall(r'<(?:a|img|link|script)\b[^>]*?(?:href|src)="([^"]+)"', text)):
            if re.match(r"[a-z]+:|//|\?", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            path = path.partition("?")[0]
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target in anchors and anchor not in anchors[target]):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_every_public_name_has_a_page(site: Path) -> None:
    for module in site_parts.PUBLIC:
        names = site_parts.public_names(module)
        assert names
        missing = [name for name in names if not (site / "api" / "names" / f"{module}.{name}.html").exists()]
        assert missing == []


def test_every_module_that_docs_and_examples_import_is_in_the_reference() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    text = "\n".join(page.read_text() for page in pages)
    imported = set(re.findall(r"^from (pliant[\w.]*) import", text, re.MULTILINE))
    assert len(imported) > 8
    assert imported - set(site_parts.PUBLIC) == set()


def test_llms_txt_lists_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Pliant\n\n> ")
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    assert all((site / page).exists() for page in listed)
    written = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    written = {page for page in written if not page.startswith(("api/", "gallery/", "_build/"))}
    assert written - {"index.html"} <= set(listed)
    assert listed[0] == "start.html"


def test_examples_can_be_downloaded_as_notebooks(site: Path) -> None:
    notebooks = {path.stem for path in (site / "_downloads").rglob("*.ipynb")}
    assert {Path(name).stem for name in site_parts.EXAMPLES} == notebooks


@pytest.mark.needs_browser
def test_search_finds(browser: Chrome, served: str) -> None:
    browser.get(f"{served}/search.html?q=SpectralRegularization")
    WebDriverWait(browser, 60, 0.1).until(
        lambda _: (
            "SpectralRegularization" in browser.execute_script("return document.body.innerText")
            and browser.execute_script("return document.querySelectorAll('ul.search li').length") > 2
        )
    )


@pytest.mark.needs_browser
def test_search_leads_a_newcomer_to_the_answer(browser: Chrome, served: str) -> None:
    """The page that answers is among the first three."""
    found = {}
    for asked in QUESTIONS:
        browser.get(f"{served}/search.html?q={quote(asked)}")
        WebDriverWait(browser, 60, 0.1).until(
            lambda _: "Search finished" in browser.execute_script("return document.body.innerText")
        )
        links = "document.querySelectorAll('ul.search > li > a:first-of-type')"
        found[asked] = browser.execute_script(f"return [...{links}].slice(0, 3).map((link) => link.pathname)")
    missed = {asked: found[asked] for asked, page in QUESTIONS.items() if f"/{page}.html" not in found[asked]}
    assert missed == {}


@pytest.mark.needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_no_accessibility_violation(browser: Chrome, served: str, width: int, dark: bool) -> None:
    axe = (files("axe_core_python") / "axe.min.js").read_text()
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme, still]})
    problems = []
    for page in MAIN:
        browser.get(f"{served}/{page}.html")
        assert browser.execute_script("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        if wide > width:
            problems.append((page, "wider than the screen", wide))
        browser.execute_script(axe)
        found = browser.execute_async_script("axe.run().then(arguments[0])")
        assert len(found["passes"]) > 20
        problems += [
            (page, rule["id"], [node["html"][:160] for node in rule["nodes"]][:3]) for rule in found["violations"]
        ]
    assert problems == []
