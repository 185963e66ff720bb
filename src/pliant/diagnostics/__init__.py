"""Diagnose a network: pure measures, the probe that feeds them from a live model, `diagnose` and `Monitor`."""

from pliant.diagnostics.diagnosis import Diagnosis, Finding, Row, diagnose
from pliant.diagnostics.measures import Measure, Sign
from pliant.diagnostics.monitor import Monitor, Record
from pliant.diagnostics.plasticity import Plasticity

__all__ = ["Diagnosis", "Finding", "Measure", "Monitor", "Plasticity", "Record", "Row", "Sign", "diagnose"]
