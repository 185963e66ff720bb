"""Labels, titles and measures that are Vega expressions or markup, in a real browser: they are shown, never run."""

from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from pliant._terminal import printable
from pliant.experiments.report.document import make_report
from tests.experiments.report.conftest import browser  # noqa: F401
from tests.experiments.report.stores import config, write_recipe, write_run
from tests.experiments.report.test_page import Page

pytestmark = pytest.mark.needs_browser

RUN = "window.hacked = 1"
HOSTILE = [
    f"datum.constructor.constructor('{RUN}')()",
    f"</script><script>{RUN}</script>",
    f'"+({RUN})+"',
    f"{{{{constructor.constructor('{RUN}')()}}}}",
    f"<img src=x onerror='{RUN}'>",
    "a.b[0]['c']\\",
    f"a\n+({RUN})+\n'b",
    f"a\u2028{RUN}\u2028b",
]


def test_hostile_names_are_shown_and_not_run(tmp_path: Path, browser: Chrome) -> None:  # noqa: F811
    methods = [{"label": label, "name": "l2", "lam": 0.1} for label in HOSTILE]
    write_recipe(tmp_path, title=HOSTILE[1], methods=["vanilla", *methods])
    for seed in range(3):
        for number, label in enumerate(["vanilla", *HOSTILE]):
            write_run(
                tmp_path,
                config(label, seed),
                [0.5 + number / 50 + seed / 100] * 3,
                measures={name: [1.0, 2.0, 3.0] for name in (*HOSTILE[:2], "weight_growth")},
                entries=[0.1, 0.2],
            )
    write_run(tmp_path, config(HOSTILE[0], 9), [0.5], status="failed", error=f"ValueError: {HOSTILE[4]}")
    (path,) = make_report([tmp_path]).save(tmp_path / "report.html")
    page = Page(browser).open(path)
    assert page.run("return window.hacked") is None
    assert page.errors() == []
    assert [url for url in page.requests() if not url.startswith(("data:", "about:"))] == [path.as_uri()]
    text = page.run("return document.body.textContent")
    for name in HOSTILE:
        assert printable(name) in text
