"""What a network says about itself: pure measures, and the probes that feed them from a live model."""

from pliant.diagnostics._diagnose import diagnose
from pliant.diagnostics.diagnosis import Diagnosis, Finding, Row
from pliant.diagnostics.measure import Measure, Sign
from pliant.diagnostics.monitor import Monitor, Record
from pliant.diagnostics.plasticity import Plasticity

__all__ = ["Diagnosis", "Finding", "Measure", "Monitor", "Plasticity", "Record", "Row", "Sign", "diagnose"]
