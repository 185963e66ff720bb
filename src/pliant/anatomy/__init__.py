"""What a model is: its parameters, its layers, its units, and the rescalings that keep its function."""

from pliant.anatomy.export import GraphError
from pliant.anatomy.plan import Block, ScalePlan
from pliant.anatomy.planning import plan_rescaling
from pliant.anatomy.rescaling import Rescaling, ScaleGraph, analyze
from pliant.anatomy.unit_tracker import find_units
from pliant.anatomy.units import UnitGraph

__all__ = [
    "Block",
    "GraphError",
    "Rescaling",
    "ScaleGraph",
    "ScalePlan",
    "UnitGraph",
    "analyze",
    "find_units",
    "plan_rescaling",
]
