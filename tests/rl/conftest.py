"""Without Stable-Baselines3 these tests are not collected; the last line of the output says so."""

from tests.conftest import missing_frameworks

collect_ignore_glob = ["test_*.py"] if "sb3_contrib" in missing_frameworks() else []
