"""Train all cells on their ranks, and print a table of what works and how far it is from one process.

    python -m tests.distributed.sweep FOLDER > benchmarks/results/cells.txt

The ranks save to FOLDER; another call with the same folder does not train again what is there. `make test-long` checks
the same cells.
"""

import sys
from pathlib import Path

import torch

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


def train(setting: str, world: int, folder: Path) -> list[Results]:
    """Return what each rank ends with, from the folder if it is there."""
    files = [folder / f"{setting}.{world}.{rank}.pt" for rank in range(world)]
    if not all(file.exists() for file in files):
        (folder / f"{setting}.{world}.rendezvous").unlink(missing_ok=True)
        return launch(["cells", setting], world, folder, limit=HOUR)
    return [torch.load(file, weights_only=True) for file in files]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    every = cells()
    (reference,) = train("single", 1, folder)
    results = {(setting, world): train(setting, world, folder) for setting, world in SETTINGS}
    faults = [
        f"{setting} on {world} ranks, {line}"
        for (setting, world), ranks in results.items()
        for line in wrong(setting, ranks, reference)
    ]
    print(f"# python -m tests.distributed.sweep FOLDER   (torch {torch.__version__})\n")
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
    main(Path(sys.argv[1]))
