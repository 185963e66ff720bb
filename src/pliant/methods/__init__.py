"""The methods: each keeps a network able to learn in its own way, all behind one contract."""

from pliant.methods.base import Method, Penalty, Receipt, Reinitializer, Rescaler
from pliant.methods.fire import FIRE
from pliant.methods.l2 import L2
from pliant.methods.l2_init import L2Init
from pliant.methods.registry import MethodInfo, Tunable, create, info, names
from pliant.methods.resets import FullReset, HeadReset
from pliant.methods.shrink_perturb import ShrinkPerturb
from pliant.methods.swr import SWR

__all__ = [
    "FIRE",
    "L2",
    "SWR",
    "FullReset",
    "HeadReset",
    "L2Init",
    "Method",
    "MethodInfo",
    "Penalty",
    "Receipt",
    "Reinitializer",
    "Rescaler",
    "ShrinkPerturb",
    "Tunable",
    "create",
    "info",
    "names",
]
