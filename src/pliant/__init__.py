"""Pliant keeps PyTorch networks able to learn."""

from pliant._version import __version__

__all__ = ["__version__"]
