"""Attacks for real: hostile files, signals, faults. Nothing is lost, and nothing runs that should not."""
