"""The page in a real browser: drawn, quiet, usable by mouse, keyboard and screen reader, on any screen and paper."""

import json
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

import pliant
from pliant.experiments.report.chart_style import DARK, LIGHT
from pliant.experiments.report.document import Report
from tests.experiments.report.stores import NASTY, config, write_results, write_run

pytestmark = pytest.mark.needs_browser


class Page:
    """A page in the browser, and what a reader can do with it."""

    def __init__(self, browser: Chrome) -> None:
        self.browser = browser
        self.run = browser.execute_script

    def open(self, path: Path, width: int = 1440, *, dark: bool = False) -> "Page":
        """Load a page and wait until its charts are drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.emulate("", dark)
        self.browser.get("about:blank")
        self.errors()
        self.requests()
        self.browser.get(path.as_uri())
        self.wait("return document.documentElement.dataset.drawn === 'yes'")
        return self

    def emulate(self, media: str, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme, still]})

    def wait(self, condition: str, *arguments: Any) -> None:
        WebDriverWait(self.browser, 60, 0.05).until(lambda _: self.run(condition, *arguments), condition)

    def errors(self) -> list[str]:
        """What the console has said since the last time."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for since the last time, by its address."""
        events = (json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance"))
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def lines(self, chart: str) -> list[str]:
        """The colors of the lines in a chart that are drawn."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0] + ' .mark-line path')]"
            ".filter(p => (p.getAttribute('d') || '').length > 4).map(p => getComputedStyle(p).stroke)",
            chart,
        )

    def box(self, name: str) -> WebElement:
        """The switch of a contender."""
        return self.browser.find_element(By.XPATH, f"//label[contains(@class, 'key')][span[.='{name}']]/input")


@pytest.fixture(scope="module")
def path(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = report.save(tmp_path_factory.mktemp("page") / "report.html")
    return path


@pytest.fixture
def page(browser: Chrome) -> Iterator[Page]:
    yield Page(browser)
    browser.execute_script("localStorage.clear()")  # Pages from files share it.
    browser.get("about:blank")


def rgb(color: str) -> str:
    return f"rgb({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_the_page_loads_without_errors_or_requests(page: Page, path: Path) -> None:
    page.open(path)
    assert page.errors() == []
    assert [url for url in page.requests() if not url.startswith(("data:", "about:"))] == [path.as_uri()]
    assert path.stat().st_size < 3e6


@pytest.mark.parametrize("width", [390, 1440])
def test_every_chart_is_drawn_within_the_page(page: Page, path: Path, report: Report, width: int) -> None:
    page.open(path, width)
    charts = page.run(
        "return [...document.querySelectorAll('.chart')].map(c => {"
        " const svg = c.querySelector('svg'), box = svg.getBoundingClientRect();"
        " const marks = ['line path', 'symbol path', 'area path', 'rule line'].map(mark => `.mark-${mark}`).join();"
        " const sizes = [...svg.querySelectorAll(marks)].map(m => m.getBoundingClientRect());"
        " const drawn = sizes.filter(b => b.width + b.height > 1);"
        " return {id: c.id, marks: drawn.length, left: box.left, right: box.right, height: box.height,"
        "  label: c.getAttribute('aria-label')} })"
    )
    assert len(charts) == len(report.sections[0].figures)
    for chart in charts:
        assert chart["marks"] > 0, chart
        assert chart["height"] > 50, chart
        assert chart["left"] >= 0, chart
        assert chart["right"] <= width, chart
        assert "The numbers follow as a table." in chart["label"]
    assert page.run("return document.documentElement.scrollWidth") <= width
    # Nothing is cut off at the right but what can be scrolled to.
    wide = page.run(
        "const seen = [...document.querySelectorAll('main *, footer *, header *')];"
        "const free = seen.filter(e => !e.closest('.scroll, svg, .hidden'));"
        "return free.filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []


@pytest.mark.parametrize("ends", [(0.9, 0.5, 0.1), (0.502, 0.501, 0.5), (0.9, 0.101, 0.1), (0.9, 0.899, 0.1)])
def test_labels_are_beside_curve_ends_without_overlap(page: Page, tmp_path: Path, ends: tuple[float, ...]) -> None:
    labels = ("L2", "fresh", "vanilla")
    write_results(tmp_path / "runs", {label: [end] * 3 for label, end in zip(labels, ends, strict=True)})
    (path,) = pliant.report(tmp_path / "runs").save(tmp_path / "report.html")
    page.open(path)
    boxes = page.run(
        "const chart = document.querySelector('#s0-curves-0 svg');"
        "const middle = e => { const b = e.getBoundingClientRect(); return (b.top + b.bottom) / 2 };"
        "const texts = [...chart.querySelectorAll('.mark-text text')].map(e => [e.textContent, middle(e)]);"
        "const lines = [...chart.querySelectorAll('.mark-line path')].map(e => {"
        " const p = e.getPointAtLength(e.getTotalLength()).matrixTransform(e.getScreenCTM()); return p.y });"
        "return [Object.fromEntries(texts), lines.sort((a, b) => a - b), chart.getBoundingClientRect().bottom]"
    )
    places, lines, bottom = boxes
    heights = [places[label] for label in labels]
    assert all(below - above > 11 for above, below in pairwise(heights))
    assert max(heights) < bottom
    crowd = 3 * 14
    for place, line in zip(heights, lines, strict=True):
        alone = sum(abs(line - other) < crowd for other in lines) == 1
        assert abs(place - line) < (3 if alone else crowd)


def test_the_tooltip_lists_all_curves(page: Page, path: Path) -> None:
    page.open(path)
    chart = page.find("#s0-curves-0 svg")
    page.run("arguments[0].scrollIntoView({block: 'center'})", chart)
    tooltip = "#vg-tooltip-element"
    for offset in (-200, -150, -100):  # The pointer has to move to be noticed.
        ActionChains(page.browser).move_to_element_with_offset(chart, offset, 0).perform()
    page.wait(f"return document.querySelector('{tooltip}.visible') !== null")
    rows = [row.text for row in page.browser.find_elements(By.CSS_SELECTOR, f"{tooltip} tr")]
    assert rows[0].startswith("task")
    names = [row.split()[0] for row in rows if "%" in row]
    assert sorted(names) == ["L2", "fresh", "vanilla"]
    values = [float(row.split()[1].rstrip("%")) for row in rows if "%" in row]
    assert values == sorted(values, reverse=True)


def test_checkboxes_hide_and_show_methods_in_all_charts(page: Page, path: Path) -> None:
    page.open(path)
    color = {"L2": rgb(LIGHT["hues"][0]), "fresh": rgb(LIGHT["fresh"]), "vanilla": rgb(LIGHT["vanilla"])}
    charts = ("#s0-curves-0", "#s0-curves-2", "#s0-tasks-0", "#s0-measures-0")
    for chart in charts:
        assert sorted(page.lines(chart)) == sorted(color.values())
    height = page.find("#s0-differences-0 svg").size["height"]
    page.box("L2").click()
    for chart in charts:
        page.wait(f"return document.querySelectorAll('{chart} .mark-line path[d]').length === 2")
        assert sorted(page.lines(chart)) == sorted([color["fresh"], color["vanilla"]])
    assert page.find("#s0-differences-0 svg").size["height"] < height
    assert not page.find("figure[data-contender='c0']").is_displayed()
    assert page.find("figure[data-contender='c2']").is_displayed()
    page.find("[data-show=none]").click()
    page.wait("return document.querySelectorAll('#s0-curves-0 .mark-line path[d]').length === 0")
    page.find("[data-show=first]").click()
    page.wait("return document.querySelectorAll('#s0-curves-0 .mark-line path[d]').length === 3")
    assert page.find("figure[data-contender='c0']").is_displayed()
    assert page.errors() == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_follows_the_system_until_changed(page: Page, path: Path, dark: bool) -> None:
    page.open(path, dark=dark)

    def colors() -> tuple[str, str]:
        background = page.run("return getComputedStyle(document.body).backgroundColor")
        return background, page.lines("#s0-tasks-0")[0]

    def expected(theme: dict[str, Any]) -> tuple[str, str]:
        return rgb(theme["page"]), rgb(theme["hues"][0])

    ours, other = (DARK, LIGHT) if dark else (LIGHT, DARK)
    assert colors() == expected(ours)
    button = page.find("#theme")
    assert button.accessible_name == f"Switch to the {'light' if dark else 'dark'} theme"
    button.click()
    assert colors() == expected(other)
    button.click()
    assert colors() == expected(ours)


def test_print_is_light_and_without_controls(page: Page, path: Path) -> None:
    page.open(path, dark=True)
    page.find("#theme").click()
    page.find("#theme").click()
    page.emulate("print", dark=True)
    assert page.run("return getComputedStyle(document.body).backgroundColor") == rgb(LIGHT["page"])
    assert page.lines("#s0-tasks-0")[0] == rgb(LIGHT["hues"][0])
    for gone in ("#theme", ".jump", ".all", ".numbers"):
        assert not page.find(gone).is_displayed()
    assert page.browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]


def test_all_controls_are_reachable_by_keyboard(page: Page, path: Path) -> None:
    page.open(path)

    def press(key: str) -> WebElement:
        ActionChains(page.browser).send_keys(key).perform()
        return page.browser.switch_to.active_element

    assert press(Keys.TAB).text == "Skip to the answer"
    assert press(Keys.TAB).get_attribute("id") == "theme"
    seen = []
    for _ in range(80):
        element = press(Keys.TAB)
        seen.append((element.tag_name, element.get_attribute("value") or element.text))
        if seen[-1] == ("input", "c2"):
            break
    press(Keys.SPACE)
    page.wait("return document.querySelectorAll('#s0-curves-0 .mark-line path[d]').length === 2")
    assert {tag for tag, _ in seen} >= {"a", "div", "input"}  # Links, tables that scroll, switches.
    page.run("document.querySelector('.numbers summary').focus()")
    press(Keys.ENTER)
    assert page.find(".numbers table").is_displayed()


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_accessibility_violation(page: Page, path: Path, dark: bool) -> None:
    page.open(path, dark=dark)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true })")
    page.run((files("axe_core_python") / "axe.min.js").read_text())
    found = page.browser.execute_async_script("axe.run().then(arguments[0])")
    problems = [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in found["violations"]]
    assert problems == []
    assert len(found["passes"]) > 20


def test_names_are_escaped(page: Page, tmp_path: Path) -> None:
    name = f"{NASTY}<img src=x onerror=window.hacked=1>"
    write_results(tmp_path, {name: [0.5, 0.6], "vanilla": [0.4, 0.5]}, tasks=2)
    write_run(
        tmp_path, config("<b>bold</b>", 0), [0.1], status="failed", error="</pre><script>window.hacked=2</script>"
    )
    (path,) = pliant.report(tmp_path).save(tmp_path / "report.html")
    page.open(path)
    chart = page.find("#s0-differences-0 svg .mark-symbol path")
    page.run("arguments[0].scrollIntoView({block: 'center'})", chart)
    ActionChains(page.browser).move_to_element(chart).perform()
    page.wait("return document.querySelector('#vg-tooltip-element.visible') !== null")
    assert page.find("#vg-tooltip-element tr td.value").text == name
    assert page.run("return window.hacked") is None
    assert page.run("return document.querySelectorAll('img, b').length") == 0
    assert page.errors() == []


def test_sixty_methods_and_two_hundred_tasks(page: Page, tmp_path: Path) -> None:
    for i in range(60):
        write_run(tmp_path, config(f"m{i:02}", 0), [0.3 + 0.005 * i] * 200, epochs=1)
    (path,) = pliant.report(tmp_path).save(tmp_path / "report.html")
    for width in (390, 1440):
        page.open(path, width)
        assert page.errors() == []
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert len(page.lines("#s0-tasks-0")) == 6
    page.find("[data-show=all]").click()
    page.wait("return document.querySelectorAll('#s0-tasks-0 .mark-line path[d]').length === 60")
    assert page.errors() == []


def test_a_notebook_shows_the_page_in_a_frame(page: Page, report: Report, tmp_path: Path) -> None:
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{report._repr_html_()}")
    page.browser.get(path.as_uri())
    page.browser.switch_to.frame(page.find("iframe"))
    page.wait("return document.documentElement.dataset.drawn === 'yes'")
    assert len(page.lines("#s0-curves-0")) == 3
    page.browser.switch_to.default_content()
    assert page.errors() == []
