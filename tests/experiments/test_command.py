"""What the command line makes of trouble with files and with what was asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import pliant  # noqa: F401  (a fixture)

Command = Callable[..., tuple[int, str]]
TINY = ("--seeds", "1", "--workers", "1", "--set", "data.first=40", "--set", "stream.epochs=1", "--stream", "single")


def test_runs_are_told_of_even_if_no_report_can_be_written(pliant: Command, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "report.html").mkdir()
    diverging = ("--set", "training.optimizer=sgd", "--set", "training.lr=1e38")
    code, printed = pliant("compare", "--methods", "vanilla", *TINY, *diverging, "--out", str(tmp_path))
    assert code == 1
    assert "the report could not be made: [Errno" in printed
    assert "1 of 1 runs did not finish" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--out", "/proc/nope"], "'/proc/nope'"),
        (["compare", "--out", __file__], __file__),
        (["unpack", "absent.gz", "there"], "'absent.gz'"),
    ],
)
def test_trouble_with_files_ends_in_a_line(pliant: Command, arguments: list[str], message: str) -> None:  # noqa: F811
    code, printed = pliant(*arguments)
    assert code == 2
    assert printed.startswith("error: ")
    assert message in printed
