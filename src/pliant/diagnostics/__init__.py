"""Measure a network: pure measures, the probe that feeds them from a live model, `measure` and `Monitor`."""

from pliant.diagnostics.measurement import Measurement, Row, measure
from pliant.diagnostics.measures import Measure
from pliant.diagnostics.monitor import Monitor, Record
from pliant.diagnostics.plasticity import Plasticity
from pliant.diagnostics.signs import Finding, Sign

__all__ = ["Finding", "Measure", "Measurement", "Monitor", "Plasticity", "Record", "Row", "Sign", "measure"]
