"""What a GPU would run: the operators that each method adds to a training step, by kind, with the bytes they move.

There is no GPU here. Methods take another path on an accelerator in one case only, where a number would be read back to
the host (`pliant.methods._core.host`). With that question answered "not on the host", a step on the CPU calls the very
operators that a GPU would be given. A dispatch mode sees them all.

- *calls*: operators that start work. Views, sizes and empty tensors start none. A `_foreach_` operator is one call for
  all tensors.
- *bytes*: what the calls read and write, as a multiple of the parameters' bytes. A step of SGD with momentum moves 6.
- *waits*: calls that make the host wait for the device.

The numbers are those of a step with the method minus those of a plain step, after some steps, when nothing is renewed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pliant import methods, models
from pliant.methods._core import host

WAITING = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique2")
_EMPTY = ("empty", "detach", "alias", "lift_fresh")
WARM_UP = 4
SETTINGS: dict[str, dict[str, Any]] = {"feature_rank": {"lam": 1e-4}}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP 3 x 100": (lambda: models.create("mlp", (1, 28, 28), 10, widths=[100, 100, 100]), (1, 28, 28)),
    "CNN": (lambda: models.create("cnn", (3, 32, 32), 10), (3, 32, 32)),
}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that start work, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name.startswith(_EMPTY)):
            self.calls[name] += 1
            leaves = tree_leaves((args, kwargs, out))
            self.bytes += sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
        return out

    @property
    def waits(self) -> dict[str, int]:
        """How often the host would wait, by operator."""
        return {name: count for name, count in self.calls.items() if name in WAITING}


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Let the methods take the path that they take on an accelerator."""
    kept = host.is_on_host
    host.is_on_host = lambda tensor: False
    try:
        yield
    finally:
        host.is_on_host = kept


def count_operators(name: str | None, network: str) -> tuple[Operators, int]:
    """Count the operators of one step with a method, or of a plain step; also return the bytes of the parameters."""
    torch.manual_seed(0)
    build, shape = NETWORKS[network]
    model, x, y = build(), torch.randn(32, *shape), torch.randint(10, (32,))
    with as_on_a_device():
        method = methods.create(name, model, example=x[:2], seed=0, **SETTINGS.get(name, {})) if name else None
        # Adam would read its step counts, which lie on the host also where the parameters do not.
        optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
        if method:
            method.attach(optimizer)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

        for _ in range(WARM_UP):
            step()
        with Operators() as operators:
            step()
    return operators, sum(p.numel() * p.element_size() for p in model.parameters())


def stepping() -> list[str]:
    """Return the methods that act in a step, or change the network."""
    return [name for name in methods.names() if methods.info(name).kind != "reinitializer"]


def added(name: str, network: str, plain: Operators) -> tuple[int, float, dict[str, int]]:
    """Return the calls that a method adds to a step, the bytes by those of the parameters, and the waits."""
    found, size = count_operators(name, network)
    waits = {key: count - plain.waits.get(key, 0) for key, count in found.waits.items()}
    return (
        found.calls.total() - plain.calls.total(),
        (found.bytes - plain.bytes) / size,
        {key: count for key, count in waits.items() if count},
    )


def write_row(name: str, network: str, plain: Operators) -> str:
    """Return the line of a method."""
    calls, moved, waits = added(name, network, plain)
    return f"{name:24}{calls:8}{moved:8.2f}{sum(waits.values()):8}"


def main() -> None:
    """Print the tables."""
    for network in NETWORKS:
        plain, size = count_operators(None, network)
        print(f"\n{network}; a plain step: {plain.calls.total()} calls, {plain.bytes / size:.1f} times the parameters")
        print(f"{'':24}{'calls':>8}{'bytes':>8}{'waits':>8}")
        for name in stepping():
            print(write_row(name, network, plain), flush=True)


if __name__ == "__main__":
    main()
