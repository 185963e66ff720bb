"""What methods cost on paper for a model of 8 billion parameters that `fully_shard` spreads over 64 ranks.

`python -m benchmarks eight_billion` prints the table and keeps it in `results/eight_billion.txt`. Nothing is run: bytes
and operations follow from the shapes of the parameters, those of Llama 3 8B. `received` is what one rank receives, and
`held` what it holds at a time beyond its shards. Operations are those of one rank if all ranks own equal shares.

A matrix has m rows and n columns, m ≥ n. An iteration of FIRE takes two products of 2mn² operations. One of Muon, which
is quintic, takes 2n³ more; it does five at every step.
"""

from dataclasses import dataclass

from pliant.distributed.ranks import BUCKET

LAYERS, WIDTH, HIDDEN, KEYS, TOKENS = 32, 4096, 14336, 1024, 128256
RANKS, ENTRY, NUMBER = 64, 4, 8
"""The ranks, the bytes of an entry in float32, and those of a reduced number in float64."""
BATCH = 4_000_000
"""Tokens in a training step, of about 6N operations each."""

BLOCK = [(WIDTH, WIDTH)] * 2 + [(KEYS, WIDTH)] * 2 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)]
LINEAR = BLOCK * LAYERS + [(TOKENS, WIDTH)]
MATRICES = [*LINEAR, (TOKENS, WIDTH)]  # with the embedding, which FIRE and Muon leave alone
NORMS = 2 * LAYERS + 1
PARAMETERS = sum(m * n for m, n in MATRICES) + NORMS * WIDTH
TENSORS = len(MATRICES) + NORMS
LARGEST = TOKENS * WIDTH * ENTRY


def product(matrices: list[tuple[int, int]]) -> int:
    """Return the operations of one product of m×n and n×n for every matrix.

    Example:
        >>> product([(4, 3), (3, 4)])
        144
    """
    return sum(2 * max(shape) * min(shape) ** 2 for shape in matrices)


def shard(matrices: list[tuple[int, int]]) -> float:
    """Return the bytes of one rank's shards of matrices."""
    return sum(m * n for m, n in matrices) * ENTRY / RANKS


@dataclass(frozen=True)
class Cost:
    """The cost of an action on one rank.

    Attributes:
        action: The methods.
        formula: The formula of the received bytes.
        received: The bytes that it receives.
        held: The bytes that it holds at a time beyond its shards.
        operations: The products of matrices, or None if there are only sums over entries.
    """

    action: str
    formula: str
    received: float
    held: float
    operations: float | None = None


VECTORS = NUMBER * sum(m + n for m, n in MATRICES)
STEP = 6 * PARAMETERS * BATCH
CUBES = sum(2 * min(shape) ** 3 for shape in LINEAR)
COSTS = [
    Cost("entry by entry (l2, l2_init, …)", "0", 0, 0),
    Cost("swr, nap", "8·matrices", NUMBER * len(MATRICES), 0),
    Cost("upgd, trac", "8·tensors", NUMBER * TENSORS, 0),
    Cost("spectral, spectral_norm", "8·Σ(m+n)", VECTORS, VECTORS),
    Cost("parseval", "3·4·N/R", 3 * shard(MATRICES), 2 * LARGEST, 2 * product(MATRICES) / RANKS),
    Cost("wasserstein", "4·4·N/R", 4 * PARAMETERS * ENTRY / RANKS, 3 * LARGEST),
    Cost("fire, per apply()", "2·4·N/R", 2 * shard(LINEAR), LARGEST, 10 * 2 * product(LINEAR) / RANKS),
    Cost("recyclers, when they act", "2·4·N", 2 * PARAMETERS * ENTRY, 2 * PARAMETERS * ENTRY),
    Cost("making swr, nap, spectral, …", "4·N", PARAMETERS * ENTRY, PARAMETERS * ENTRY),
    Cost(
        "Muon, one matrix, one owner", "2·4·N/R", 2 * shard(LINEAR), LARGEST, 5 * (2 * product(LINEAR) + CUBES) / RANKS
    ),
    Cost("Muon, all on every rank", "4·N", RANKS * shard(LINEAR), LARGEST, 5 * (2 * product(LINEAR) + CUBES)),
    Cost("a step of fully_shard itself", "2·4·N + 4·N/R", (2 + 1 / RANKS) * PARAMETERS * ENTRY, 0, STEP / RANKS),
]


def write_bytes(count: float) -> str:
    """Return a number of bytes with its unit.

    Example:
        >>> write_bytes(1808), write_bytes(2.1e9)
        ('1.81 kB', '2.1 GB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def main() -> None:
    """Print the table."""
    print(f"N = {PARAMETERS:.3g} parameters in {TENSORS} tensors, {len(MATRICES)} of them matrices; R = {RANKS} ranks.")
    print(f"A rank gathers at most {write_bytes(BUCKET)} of whole parameters at a time, or one if it is larger.")
    print(f"A step is one on {BATCH / 1e6:g} million tokens, of 6N operations each.\n")
    print(f"{'':32}{'formula':14}{'received':>10}{'held':>10}{'operations':>12}{'of a step':>11}")
    for cost in COSTS:
        sizes = f"{write_bytes(cost.received):>10}{write_bytes(cost.held):>10}"
        work = (
            "" if cost.operations is None else f"{cost.operations:12.1e}{100 * cost.operations * RANKS / STEP:9.3g} %"
        )
        print(f"{cost.action:32}{cost.formula:14}{sizes}{work}")


if __name__ == "__main__":
    main()
