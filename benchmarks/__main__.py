"""Run the benchmarks and keep their output: `python -m benchmarks [NAME …]`.

Each module with a `main()` prints a table of ratios, which is kept in `results/NAME.txt`.
"""

import argparse
import contextlib
import importlib
import io
import pkgutil
import platform
import sys
from pathlib import Path

import torch

import benchmarks

RESULTS = Path(__file__).parent / "results"


class Tee(io.StringIO):
    """A buffer that also prints."""

    def write(self, text: str) -> int:
        """Print and keep the text."""
        sys.__stdout__.write(text)
        sys.__stdout__.flush()
        return super().write(text)


def names() -> list[str]:
    """Return the names of the benchmarks: the modules that have a `main()`."""
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name != "__main__"]
    return [name for name in found if hasattr(importlib.import_module(f"benchmarks.{name}"), "main")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"the benchmarks to run; all by default: {', '.join(names())}"
    )
    chosen = parser.parse_args().names or names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names())}")
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    for name in chosen:
        kept = Tee()
        with contextlib.redirect_stdout(kept):
            print(f"# python -m benchmarks {name}   (torch {torch.__version__}, {platform.machine()}, one thread)\n")
            importlib.import_module(f"benchmarks.{name}").main()
            print()
        (RESULTS / f"{name}.txt").write_text(kept.getvalue())


if __name__ == "__main__":
    main()
