"""Warnings that point to the line of the user's code that caused them."""

import os
import sys
import warnings
from pathlib import Path

import torch

from pliant._terminal import printable

_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))


def warn_user(message: str) -> None:
    """Warn at the innermost line of the call stack outside this package and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), stacklevel=level)
