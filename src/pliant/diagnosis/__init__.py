"""Diagnose a network: has it lost plasticity, which signs explain it, what to try; and what a resume has lost."""

from pliant.diagnosis.diagnose import Diagnosis, diagnose
from pliant.diagnosis.remedies import Remedy

__all__ = ["Diagnosis", "Remedy", "diagnose"]
