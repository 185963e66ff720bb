"""What conf.py adds to Sphinx: the gallery's order, the API's pages, and llms.txt."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

PUBLIC = (
    "pliant", "pliant.methods", "pliant.diagnostics", "pliant.anatomy", "pliant.training", "pliant.streams",
    "pliant.models", "pliant.data", "pliant.diagnostics.checkpoints", "pliant.experiments.run_config",
    "pliant.experiments.run", "pliant.experiments.store", "pliant.integrations.transformers",
    "pliant.integrations.lightning", "pliant.integrations.stable_baselines3", "pliant.rl.policies",
)  # fmt: skip
"""The modules whose public names the API reference shows."""
EXAMPLES = (
    "attach.py", "nightly_retraining.py", "diagnose_network.py", "hugging_face_trainer.py", "lightning_trainer.py",
    "agent_learns_again.py", "two_processes.py", "own_method.py", "dqn_reset.py", "sac_reset.py",
)  # fmt: skip
"""The gallery's order."""
SHORT = {
    "dqn_reset.py": ["--steps", "3000", "--reset-every", "2000"],
    "sac_reset.py": ["--steps", "1200", "--reset-every", "700"],
}
"""Arguments that let an example end in seconds."""
LEADING = (
    "start", "which-method", "questions", "trial", "howto", "methods/index", "results", "leaderboard",
    "api/index",
)  # fmt: skip
"""The pages that llms.txt lists first."""


def by_place(name: str) -> int:
    """Return the place of an example in the gallery."""
    return EXAMPLES.index(Path(name).name)


def give_arguments(gallery: dict[str, Any], variables: dict[str, Any]) -> list[str]:
    """Return the command-line arguments of an example."""
    return SHORT.get(Path(variables["src_file"]).name, [])


def public_names(name: str) -> list[str]:
    """Return the public names of a module: `__all__`, or what it defines without an underscore."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        names = list(module.__all__)
    else:
        names = [each for each, thing in vars(module).items() if getattr(thing, "__module__", None) == name]
    public = [each for each in names if not each.startswith("_") and not inspect.ismodule(getattr(module, each))]
    if name != "pliant":
        return public
    # `pliant.SWR` is `pliant.methods.SWR`, and has its page there.
    elsewhere = {each for other in ("pliant.methods", "pliant.diagnostics") for each in public_names(other)}
    return [each for each in public if each not in elsewhere]


def write_api(folder: Path) -> None:
    """Write one page for each public module, with a page of its own for each of its names."""
    folder.mkdir(exist_ok=True)
    about = {name: (importlib.import_module(name).__doc__ or "").partition("\n")[0] for name in PUBLIC}
    rows = "\n".join(f"| [`{name}`]({name}.rst) | {line} |" for name, line in about.items())
    listed = "\n".join(PUBLIC)
    (folder / "index.md").write_text(
        "# API\n\nEvery public name, from its docstring. What is not listed here is internal and may change.\n\n"
        f"| module | what it holds |\n|---|---|\n{rows}\n\n"
        f"```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    )
    for name in PUBLIC:
        lines = [
            name,
            "=" * len(name),
            "",
            about[name],
            "",
            ".. autosummary::",
            "   :toctree: names",
            "   :nosignatures:",
            "",
        ]
        (folder / f"{name}.rst").write_text(
            "\n".join([*lines, *(f"   ~{name}.{each}" for each in public_names(name)), ""])
        )


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt: every page with its title and its first sentence, for readers that are programs."""
    if error is not None or app.builder.name != "html":
        return
    titles = {name: title.astext() for name, title in app.env.titles.items()}
    pages = sorted((name for name in titles if not name.startswith("api/names/") and name != "index"), key=order_pages)
    lines = ["# Pliant", "", "> Keep PyTorch networks able to learn: attach methods, decide, treat, compare.", ""]
    for name in pages:
        about = first_sentence(Path(app.env.doc2path(name)).read_text())
        lines.append(f"- [{titles[name]}]({name}.html)" + (f": {about}" if about else ""))
    (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]))


def order_pages(name: str) -> tuple[int, str]:
    """Order pages: the leading ones, then by name."""
    return (LEADING.index(name) if name in LEADING else len(LEADING), name)


def first_sentence(text: str) -> str:
    """Return the first sentence of the first paragraph of a page."""
    for line in text.splitlines():
        if re.match(r"[A-Z][\w’']*[ ,].*[.:?]", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
            return re.split(r"(?<=[.?])\s", plain, maxsplit=1)[0]
    return ""
