"""What a model is: how its parameters' scales hang together, and which unit feeds which."""

from pliant.graph.analysis import Rescaling, ScaleGraph, analyse
from pliant.graph.export import GraphError
from pliant.graph.plan import Block, ScalePlan
from pliant.graph.units import UnitGraph, find_units

__all__ = ["Block", "GraphError", "Rescaling", "ScaleGraph", "ScalePlan", "UnitGraph", "analyse", "find_units"]
