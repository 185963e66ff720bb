"""The site: `make docs` builds it into docs/_build/html; a warning is an error."""

import importlib
import re
import sys
from inspect import ismodule
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

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
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_title = "Pliant"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "header_links_before_dropdown": 7,
}
html_sidebars = {"index": [], "results": [], "leaderboard": [], "results/*": []}
copyright = "the Pliant authors, Apache-2.0"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autosummary_generate = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

PUBLIC = (
    "pliant", "pliant.methods", "pliant.diagnostics", "pliant.streams", "pliant.models", "pliant.data",
    "pliant.integrations.transformers", "pliant.integrations.lightning", "pliant.integrations.stable_baselines3",
)  # fmt: skip
"""The modules whose public names the API reference shows."""


def write_api(folder: Path) -> None:
    """Write one page for each public module, with a page of its own for each of its names."""
    folder.mkdir(exist_ok=True)
    listed = "\n".join(PUBLIC)
    (folder / "index.md").write_text(
        f"# API\n\nEvery public name, from its docstring.\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    )
    elsewhere = [
        each for name in ("pliant.methods", "pliant.diagnostics") for each in importlib.import_module(name).__all__
    ]
    for name in PUBLIC:
        module = importlib.import_module(name)
        # `pliant.SWR` is `pliant.methods.SWR`, and has its page there.
        hidden = elsewhere if name == "pliant" else ()
        public = [each for each in module.__all__ if not each.startswith("_") and each not in hidden]
        public = [each for each in public if not ismodule(getattr(module, each))]
        about = (module.__doc__ or "").partition("\n")[0]
        lines = [
            name,
            "=" * len(name),
            "",
            about,
            "",
            ".. autosummary::",
            "   :toctree: names",
            "   :nosignatures:",
            "",
        ]
        (folder / f"{name}.rst").write_text("\n".join([*lines, *(f"   {name}.{each}" for each in public), ""]))


write_api(Path(__file__).parent / "api")

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)\)")
_OPTION = re.compile(r"^```(\w+) [^\n]+$", re.MULTILINE)


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Let pages that are written for the repository stand on the site.

    Links to files outside docs/ become their paths, and what the tests read after a block's language goes.
    """

    def to_path(match: re.Match[str]) -> str:
        text, up, path = match.groups()
        inside = (Path(app.srcdir) / name).parent / (up + path)
        if inside.resolve().is_relative_to(app.srcdir):
            return match[0]
        shown = inside.resolve().relative_to(ROOT)
        return text if f"`{shown}`" in text else f"{text} (`{shown}`)"

    source[0] = _OPTION.sub(r"```\1", _OUTSIDE.sub(to_path, source[0]))


def escape_bars(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escape |x| in docstrings, which reStructuredText would take for a substitution."""
    lines[:] = [line if ">>>" in line else line.replace("|", r"\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("source-read", adapt)
    app.connect("autodoc-process-docstring", escape_bars)
