"""Train all cells on their ranks, and print a table of what works and how far it is from one process.

    python -m tests.distributed.sweep > benchmarks/results/cells.txt

`make test-long` checks the same cells. About half an hour on two cores.
"""

import sys
import tempfile
from pathlib import Path

from pliant import methods
from tests.distributed.cells import cells
from tests.distributed.launching import launch
from tests.distributed.test_cells import HOUR, SETTINGS, Cell, Results, distance, wrong


def describe(ranks: list[Results], reference: Results, own: list[Cell]) -> str:
    """Return how many cells of a method work, and their largest distance from one process."""
    working = [cell for cell in own if not any("error" in rank[cell] for rank in ranks)]
    if not working:
        return "raises"
    farthest = max(distance(ranks[0][cell]["final"], reference[cell]["final"]) for cell in working)
    return f"{len(working)} of {len(own)} {farthest:7.1e}"


def main() -> None:
    print("# python -m tests.distributed.sweep\n")
    every = cells()
    results: dict[tuple[str, int], list[Results]] = {}
    with tempfile.TemporaryDirectory() as folder:
        reference: Results = launch(["cells", "single"], 1, Path(folder), limit=HOUR)[0]
        for setting, world in SETTINGS:
            results[setting, world] = launch(["cells", setting], world, Path(folder), limit=HOUR)
            print(f"{setting} on {world} ranks is done", file=sys.stderr)
    faults = [
        f"{setting} on {world} ranks, {line}"
        for (setting, world), ranks in results.items()
        for line in wrong(setting, ranks, reference)
    ]
    print(f"{'method':22} " + "  ".join(f"{f'{setting}, {world} ranks':14}" for setting, world in SETTINGS).rstrip())
    for name in methods.names():
        own = [cell for cell in every if cell[0] == name]
        shown = [describe(ranks, reference, own) for ranks in results.values()]
        print(f"{name:22} " + "  ".join(f"{each:14}" for each in shown).rstrip())
    errors = [
        (setting, cell[0], ranks[0][cell]["error"])
        for (setting, _), ranks in results.items()
        for cell in every
        if "error" in ranks[0][cell]
    ]
    print()
    for error in dict.fromkeys(errors):
        print(f"{errors.count(error)} cells: {': '.join(error)}")
    print("\n".join(faults), end="\n\n" if faults else "")
    print(f"{len(errors)} of the {len(every) * len(SETTINGS)} cells raise, {len(faults)} are wrong")


if __name__ == "__main__":
    main()
