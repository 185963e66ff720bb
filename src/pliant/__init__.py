"""Pliant keeps PyTorch networks able to learn: attach methods, diagnose networks, compare methods."""

from pliant import methods
from pliant._version import __version__
from pliant.methods import FIRE, L2, SWR, FullReset, HeadReset, L2Init, Method, Receipt, ShrinkPerturb

__all__ = [
    "FIRE",
    "L2",
    "SWR",
    "FullReset",
    "HeadReset",
    "L2Init",
    "Method",
    "Receipt",
    "ShrinkPerturb",
    "__version__",
    "methods",
]
