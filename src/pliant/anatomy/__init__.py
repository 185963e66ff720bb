"""What a model is: how its parameters' scales hang together, and which unit feeds which."""

from pliant.anatomy.export import GraphError
from pliant.anatomy.plan import Block, ScalePlan
from pliant.anatomy.rescaling import Rescaling, ScaleGraph, analyze
from pliant.anatomy.units import UnitGraph, find_units

__all__ = ["Block", "GraphError", "Rescaling", "ScaleGraph", "ScalePlan", "UnitGraph", "analyze", "find_units"]
