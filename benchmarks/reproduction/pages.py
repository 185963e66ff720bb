"""Make the report of each kept experiment: `python -m benchmarks.reproduction.pages [NAME …]`.

It writes `runs/pages/NAME/report.html` and unpacks the runs beside it, for `pliant report runs/pages/NAME --format …`
and `load_runs`.
"""

import argparse
import shutil
from pathlib import Path

from benchmarks.reproduction.kept import KEPT, find_recipe
from pliant._json import seal
from pliant.experiments.archive import unpack
from pliant.experiments.report.document import make_report

PAGES = Path("runs/pages")


def make_page(name: str, folder: Path) -> Path:
    """Unpack a kept experiment and write its page.

    The page uses the recipe in this repository, because the kept recipe may have only part of the methods or seeds.

    Args:
        name: The recipe, `RECIPE-quick` for its quick scale.
        folder: The folder to replace.

    Returns:
        The page.
    """
    shutil.rmtree(folder, ignore_errors=True)
    unpack(KEPT / f"{name}.jsonl.gz", folder)
    (folder / "recipe.json").write_bytes(seal(find_recipe(name).model_dump(mode="json"), indent=1))
    (page,) = make_report(folder).save(folder / "report.html")
    return page


def run_command() -> None:
    """Make the pages named on the command line."""
    known = sorted(file.name.removesuffix(".jsonl.gz") for file in KEPT.glob("*.jsonl.gz"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduction.pages", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"the experiments; all by default: {', '.join(known)}")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"there are no kept runs of {unknown[0]!r}; there are {', '.join(known)}")
    for name in names or known:
        page = make_page(name, PAGES / name)
        print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    run_command()
