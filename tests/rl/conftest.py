"""Without Stable-Baselines3 or suites of environments, tests are not collected; the last line of the output says so."""

from tests.conftest import SUITES, missing_frameworks

collect_ignore_glob = ["test_*.py"] if "sb3_contrib" in missing_frameworks() else []
collect_ignore = ["test_suites.py"] if {*SUITES} & {*missing_frameworks()} else []
