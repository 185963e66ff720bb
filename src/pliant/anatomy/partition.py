"""Split parameters into blocks that may have different scales.

A parameter is one block unless the model splits it or a value computed from it: a packed projection, whose output is
split into queries, keys and values, holds three weights. To find them, a walk labels every entry with the set of
parameter entries (along one dimension) from which it is computed, and observes the calls that split tensors.
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
"""A parameter and an index along the dimension in question."""


class _Atoms(Meaning):
    """Labels that stand for sets of atoms.

    Args:
        dim: The dimension of the parameters along which atoms are numbered.
        names: The parameters to label. If None, all are labeled, but only by odd and even index: this is cheap, and
            enough to see which parameters reach a call that splits tensors.
    """

    def __init__(self, dim: int, names: Collection[str] | None = None) -> None:
        self.dim = dim
        self.names = names
        self.split_parameters: set[str] = set()
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
        """Label the entries by their index along the dimension."""
        if len(shape) <= self.dim or (self.names is not None and name not in self.names):
            return lb.uniform(lb.ONE, shape)
        size = shape[self.dim]
        distinct = size if self.names is not None else min(size, 2)
        numbers = [self._number(frozenset({(name, index)})) for index in range(distinct)]
        labels = torch.tensor(numbers, dtype=torch.int64)[torch.arange(size) % distinct]
        view = [1] * len(shape)
        view[self.dim] = -1
        self.classes.setdefault(name, [0] * size)
        return labels.view(view).expand(shape)

    def multiply(self, left: int, right: int, power: Fraction) -> int:
        """A product is computed from the atoms of both factors."""
        return self._number(self._sets[left] | self._sets[right])

    def add(self, left: int, right: int, node: fx.Node) -> int:
        """A sum is computed from the atoms of both terms."""
        return self._number(self._sets[left] | self._sets[right])

    def mix(self, labels: Sequence[int], node: fx.Node) -> int:
        """After a reduction, only the atoms that all entries share still tell blocks apart."""
        return self._number(frozenset.intersection(*(self._sets[label] for label in labels)))

    def _atoms(self, labels: Tensor) -> set[Atom]:
        present = torch.unique(lb.compact(labels)).tolist()
        return set().union(*(self._sets[label] for label in present if label != lb.ANY))

    def read(self, labels: Tensor) -> None:
        """Record the atoms that reach a computation."""
        self.read_atoms |= self._atoms(labels)

    def split(self, whole: Tensor, pieces: Sequence[Tensor]) -> None:
        """Put the entries of a parameter that go to different pieces into different classes."""
        everything = self._atoms(whole)
        self.split_parameters |= {name for name, _ in everything}
        for piece in pieces if self.names is not None else ():
            kept = self._atoms(piece)
            for name in {name for name, _ in everything - kept} & {name for name, _ in kept}:
                inside = {index for owner, index in kept if owner == name}
                pairs = [(c, i in inside) for i, c in enumerate(self.classes[name])]
                numbers = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
                self.classes[name] = [numbers[pair] for pair in pairs]


Partition = dict[str, tuple[int, list[int]]]
"""For each parameter of several blocks: the dimension that is cut, and the block number of each index along it."""


def find_partition(graph: ModelGraph) -> Partition:
    """Return the finest partition of the parameters that the calls of a graph make."""
    partition: Partition = {}
    if not any(graph.operator(node) in SPLITS for node in graph.nodes):
        return partition
    for dim in range(max((len(graph.shape(node)) for node in graph.parameters), default=0)):
        coarse = _Atoms(dim)
        Walk(graph, coarse, strict=False).run()
        if not coarse.split_parameters:
            continue
        atoms = _Atoms(dim, coarse.split_parameters)
        Walk(graph, atoms, strict=False).run()
        for name, classes in atoms.classes.items():
            classes = _without_unread(classes, [(name, index) in atoms.read_atoms for index in range(len(classes))])
            if len(set(classes)) > 1 and name not in partition:
                partition[name] = (dim, classes)
    return partition


def _without_unread(classes: list[int], read: list[bool]) -> list[int]:
    """Return one class for all entries if all entries that the example reaches are of one class.

    A table of positions is one block even if an example uses the first ten only.
    """
    reached = {number for number, is_read in zip(classes, read, strict=True) if is_read}
    return [min(reached)] * len(classes) if len(reached) == 1 else classes


def blocks_of(name: str, shape: torch.Size, partition: Partition) -> list[tuple[Block, list[int]]]:
    """Return the blocks of a parameter, each with its indices along the dimension that is cut.

    A parameter of one block counts as a single index.
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
    """Return the period if the indices are a slice that repeats over the whole size; the size if it is one slice."""
    width = next((i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1), len(indices))
    if width == len(indices):
        return size
    period = indices[width] - indices[0]
    repeated = [start + offset for start in range(indices[0], size, period) for offset in range(width)]
    return period if size % period == 0 and repeated == indices else None
