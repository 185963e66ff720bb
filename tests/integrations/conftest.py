"""Tests of a framework that is not installed are not collected; the last line of the output says so."""

from tests.conftest import FRAMEWORKS, missing_frameworks

collect_ignore = [file for name in missing_frameworks() for file in FRAMEWORKS[name]]
