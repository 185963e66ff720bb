"""The site: `make docs` builds it into docs/_build/html; a warning is an error."""

import re
import sys
import warnings
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

from site_parts import write_api, write_llms  # noqa: E402

from pliant import __version__  # noqa: E402

project = "Pliant"
author = "The Pliant authors"
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_templates", "gallery/*.ipynb", "gallery/*.py", "sg_execution_times.rst"]
html_theme = "pydata_sphinx_theme"
html_title = "Pliant"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sourcelink = False
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "header_links_before_dropdown": 8,
}
html_sidebars = {
    name: []
    for name in ("index", "start", "which-method", "changelog", "security", "results", "leaderboard", "results/*")
}
copyright = "the Pliant authors, Apache-2.0"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autosummary_generate = True
templates_path = ["_templates"]
toc_object_entries_show_parents = "hide"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "/",
    "ignore_pattern": r"__init__\.py",
    "within_subsection_order": "site_parts.by_place",
    "reset_argv": "site_parts.give_arguments",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "show_memory": False,
    "min_reported_time": 10_000,
    "write_computation_times": False,
}
warnings.filterwarnings("ignore", message="FigureCanvasAgg is non-interactive")

write_api(Path(__file__).parent / "api")

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)\)")
_OPTION = re.compile(r"^```(\w+) [^\n]+$", re.MULTILINE)


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Let pages that are written for the repository stand on the site.

    Links to files outside docs/ become their paths, links to examples lead to the gallery, and what the tests read
    after a block's language goes.
    """

    def to_path(match: re.Match[str]) -> str:
        text, up, path = match.groups()
        inside = (Path(app.srcdir) / name).parent / (up + path)
        if inside.resolve().is_relative_to(app.srcdir):
            return match[0]
        shown = inside.resolve().relative_to(ROOT)
        if shown == Path("examples"):
            return f"[{text}]({up.removesuffix('../')}gallery/index.rst)"
        if shown.parent.name == "examples" and shown.suffix == ".py":
            return f"[{text}]({up.removesuffix('../')}gallery/{shown.stem}.rst)"
        return text if f"`{shown}`" in text else f"{text} (`{shown}`)"

    source[0] = _OPTION.sub(r"```\1", _OUTSIDE.sub(to_path, source[0]))


def escape_bars(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escape |x| in docstrings, which reStructuredText would take for a substitution."""
    lines[:] = [line if ">>>" in line else line.replace("|", r"\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", escape_bars)
    app.connect("build-finished", write_llms)
