"""Which parts of a parameter can have a scale of their own.

A parameter is one block unless the model takes it apart: a packed projection whose output is split into queries,
keys and values consists of three weights that were stored as one. To find them, a walk carries for every entry the
set of parameter entries (along one dimension) that it is made of, and looks at what the calls that take tensors apart
keep together.
"""

from collections.abc import Collection, Sequence
from fractions import Fraction

import torch
from torch import Tensor, fx

from pliant.anatomy import labels as lb
from pliant.anatomy.export import ModelGraph
from pliant.anatomy.operators import SPLITS
from pliant.anatomy.plan import Block
from pliant.anatomy.walk import Meaning, Walk

Atom = tuple[str, int]
"""An index of a parameter along the dimension that is looked at."""


class _Atoms(Meaning):
    """Labels that stand for sets of atoms.

    Args:
        dim: The dimension along which parameters are looked at.
        names: The parameters to look at. All of them if None, but then only whether an index is odd or even is
            told apart: enough to see which parameters reach a call that takes tensors apart, and cheap.
    """

    def __init__(self, dim: int, names: Collection[str] | None = None) -> None:
        self.dim = dim
        self.names = names
        self.taken_apart: set[str] = set()
        self.classes: dict[str, list[int]] = {}
        self.read_atoms: set[Atom] = set()
        self._sets: list[frozenset[Atom]] = [frozenset()]
        self._numbers: dict[frozenset[Atom], int] = {frozenset(): lb.ONE}

    def _number(self, atoms: frozenset[Atom]) -> int:
        if atoms not in self._numbers:
            self._numbers[atoms] = len(self._sets)
            self._sets.append(atoms)
        return self._numbers[atoms]

    def parameter(self, name: str, shape: torch.Size) -> Tensor:
        """Label the entries by their index along the dimension, if the parameter has it."""
        if len(shape) <= self.dim or (self.names is not None and name not in self.names):
            return lb.uniform(lb.ONE, shape)
        size = shape[self.dim]
        told_apart = size if self.names is not None else min(size, 2)
        numbers = [self._number(frozenset({(name, index)})) for index in range(told_apart)]
        labels = torch.tensor(numbers, dtype=torch.int64)[torch.arange(size) % told_apart]
        view = [1] * len(shape)
        view[self.dim] = -1
        self.classes.setdefault(name, [0] * size)
        return labels.view(view).expand(shape)

    def multiply(self, left: int, right: int, power: Fraction) -> int:
        """A product is made of what its factors are made of."""
        return self._number(self._sets[left] | self._sets[right])

    def add(self, left: int, right: int, node: fx.Node) -> int:
        """A sum is made of what its terms are made of."""
        return self._number(self._sets[left] | self._sets[right])

    def mix(self, labels: Sequence[int], node: fx.Node) -> int:
        """What is mixed cannot be told apart any more, but for what all of it shares."""
        return self._number(frozenset.intersection(*(self._sets[label] for label in labels)))

    def _atoms(self, labels: Tensor) -> set[Atom]:
        present = torch.unique(lb.compact(labels)).tolist()
        return set().union(*(self._sets[label] for label in present if label != lb.ANY))

    def read(self, labels: Tensor) -> None:
        """Note the entries that reach a computation."""
        self.read_atoms |= self._atoms(labels)

    def split(self, whole: Tensor, pieces: Sequence[Tensor]) -> None:
        """Put the entries of a parameter that go to different pieces into different classes."""
        everything = self._atoms(whole)
        self.taken_apart |= {name for name, _ in everything}
        for piece in pieces if self.names is not None else ():
            kept = self._atoms(piece)
            for name in {name for name, _ in everything - kept} & {name for name, _ in kept}:
                inside = {index for owner, index in kept if owner == name}
                pairs = [(c, i in inside) for i, c in enumerate(self.classes[name])]
                numbers = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
                self.classes[name] = [numbers[pair] for pair in pairs]


Partition = dict[str, tuple[int, list[int]]]
"""Parameters that are more than one block: the dimension, and for each index along it the number of its block."""


def find_partition(graph: ModelGraph) -> Partition:
    """Return the finest split of the parameters that the calls of a graph make."""
    partition: Partition = {}
    if not any(graph.operator(node) in SPLITS for node in graph.nodes):
        return partition
    for dim in range(max((len(graph.shape(node)) for node in graph.parameters), default=0)):
        coarse = _Atoms(dim)
        Walk(graph, coarse, unknown="fix").run()
        if not coarse.taken_apart:
            continue
        atoms = _Atoms(dim, coarse.taken_apart)
        Walk(graph, atoms, unknown="fix").run()
        for name, classes in atoms.classes.items():
            classes = _without_unread(classes, [(name, index) in atoms.read_atoms for index in range(len(classes))])
            if len(set(classes)) > 1 and name not in partition:
                partition[name] = (dim, classes)
    return partition


def _without_unread(classes: list[int], read: list[bool]) -> list[int]:
    """Put entries that the example does not reach with those it does reach, if these are of one class.

    A table of positions of which an example uses the first ten is one block all the same.
    """
    reached = {number for number, is_read in zip(classes, read, strict=True) if is_read}
    return [min(reached)] * len(classes) if len(reached) == 1 else classes


def blocks_of(name: str, shape: torch.Size, partition: Partition) -> list[tuple[Block, list[int]]]:
    """Return the blocks of a parameter, each with its indices along the dimension that is cut.

    A parameter that is one block is taken for one index.
    """
    if name not in partition:
        return [(Block(name), [0])]
    dim, classes = partition[name]
    members: dict[int, list[int]] = {}
    for index, number in enumerate(classes):
        members.setdefault(number, []).append(index)
    blocks = []
    for indices in members.values():
        period = _period(indices, shape[dim])
        if period is not None:
            start = indices[0]
            width = len(indices) * period // shape[dim]
            whole = period == shape[dim]
            blocks.append((Block(name, dim, start, start + width, None if whole else period), indices))
            continue
        runs: list[list[int]] = []
        for index in indices:
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        blocks.extend((Block(name, dim, run[0], run[-1] + 1), run) for run in runs)
    return blocks


def _period(indices: list[int], size: int) -> int | None:
    """Return p if the indices are a slice that repeats every p entries over the whole size; the size for one slice."""
    width = next((i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1), len(indices))
    if width == len(indices):
        return size
    period = indices[width] - indices[0]
    repeated = [start + offset for start in range(indices[0], size, period) for offset in range(width)]
    return period if size % period == 0 and repeated == indices else None
