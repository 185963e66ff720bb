"""Train all cells on their ranks, and print a table of what works and how far it is from one process.

    python -m tests.distributed.sweep FOLDER [few] > benchmarks/results/cells.txt

The ranks save to FOLDER; another call with the same folder does not train again what is there. "few" trains one cell of
each method in the settings that are not there yet. `make test-long` checks the same cells.
"""

import sys
from pathlib import Path

import torch

from pliant import methods
from tests.distributed.launching import launch
from tests.distributed.test_cells import HOUR, SETTINGS, Results, distance, wrong


def describe(ranks: list[Results], reference: Results, method: str) -> str:
    """Return how many cells of a method work, and their largest distance from one process."""
    own = [cell for cell in ranks[0] if cell[0] == method]
    working = [cell for cell in own if not any("error" in rank[cell] for rank in ranks)]
    if not working:
        return "raises"
    farthest = max(distance(ranks[0][cell]["final"], reference[cell]["final"]) for cell in working)
    return f"{len(working)} of {len(own)} {farthest:7.1e}"


def train(setting: str, world: int, folder: Path, *chosen: str) -> list[Results]:
    """Return what each rank ends with, from the folder if it is there."""
    files = [folder / f"{setting}.{world}.{rank}.pt" for rank in range(world)]
    if not all(file.exists() for file in files):
        (folder / f"{setting}.{world}.rendezvous").unlink(missing_ok=True)
        return launch(["cells", setting], world, folder, *chosen, limit=HOUR)
    return [torch.load(file, weights_only=True) for file in files]


def main(folder: Path, *chosen: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (reference,) = train("single", 1, folder, *chosen)
    results = {(setting, world): train(setting, world, folder, *chosen) for setting, world in SETTINGS}
    faults = [
        f"{setting} on {world} ranks, {line}"
        for (setting, world), ranks in results.items()
        for line in wrong(setting, ranks, {cell: reference[cell] for cell in ranks[0]})
    ]
    print(f"# python -m tests.distributed.sweep FOLDER   (torch {torch.__version__})\n")
    print(f"{'method':22} " + "  ".join(f"{f'{setting}, {world} ranks':14}" for setting, world in SETTINGS).rstrip())
    for name in methods.names():
        shown = [describe(ranks, reference, name) for ranks in results.values()]
        print(f"{name:22} " + "  ".join(f"{each:14}" for each in shown).rstrip())
    errors = [
        (setting, cell[0], ranks[0][cell]["error"])
        for (setting, _), ranks in results.items()
        for cell in ranks[0]
        if "error" in ranks[0][cell]
    ]
    print()
    for error in dict.fromkeys(errors):
        print(f"{errors.count(error)} cells: {': '.join(error)}")
    print("\n".join(faults), end="\n\n" if faults else "")
    count = sum(len(ranks[0]) for ranks in results.values())
    print(f"{len(errors)} of the {count} cells raise, {len(faults)} are wrong")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
