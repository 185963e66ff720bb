"""The command line: what it answers, how it ends, and that signals cost nothing but time."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from rich.console import Console

from pliant import cli
from pliant.data.cache import entries
from pliant.experiments.config import RunConfig
from pliant.experiments.recipe import make_recipe
from pliant.experiments.run import execute
from pliant.experiments.store import load_runs
from pliant.training import Settings
from tests.experiments.helpers import outputs

PLIANT = [sys.executable, "-c", "from pliant.cli import main; main()"]
SMALL = [
    "compare",
    *("--data", "digits", "--model", "mlp", "--stream", "label_flip", "--methods", "vanilla,l2_init+shrink_perturb"),
    *("--seeds", "2", "--set", "data.first=200", "--set", "stream.tasks=16", "--set", "stream.epochs=2"),
    *("--set", "training.batch_size=16", "--checkpoint-seconds", "0"),
]


@pytest.fixture
def pliant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run a command in this process; return its exit code and what it printed."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["pliant", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return end.value.code, captured.out + captured.err

    monkeypatch.setattr(cli, "console", Console(width=200))
    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--stream", "warmstart"], "did you mean 'warm_start'?"),
        (["compare", "--methods", "vanila"], "error: --methods: there is no method 'vanila'; did you mean 'vanilla'?"),
        (
            ["compare", "--methods", "l2,swt", "--tune"],
            "error: --methods: there is no method 'swt'; did you mean 'swr'?",
        ),
        (["compare", "--methods", "redo:tau=0.1,every=97"], "a colon stands before every setting"),
        (["compare", "--data", "nowhere/"], "nothing is at that path"),
        (["compare", "--set", "training.lr=fast"], "training.lr is 'fast': input should be a valid number"),
        (["compare", "--gpus", "1"], "--gpus and --address are for --engine ray"),
        (["compare", "--workers", "0"], "workers: 0 is not allowed; it must be an integer ≥ 1"),
        (["run", "nothing"], "there is no recipe 'nothing'"),
        (["list", "method"], "did you mean 'methods'?"),
        (["report", "/nowhere"], "/nowhere"),
        (["compare", "--model", "nowhere:build"], "there is no module 'nowhere'"),
        (["compare", "--model", "math:pi"], "model is 'math:pi', which cannot be called"),
    ],
)
def test_mistakes_end_in_a_line(
    pliant: Callable[..., tuple[int, str]], arguments: list[str], message: str, tmp_path: Path
) -> None:
    code, printed = pliant(*arguments, *(["--out", str(tmp_path)] if arguments[0] == "compare" else []))
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("methods", ["swr", "shrink_perturb", "vanilla", "lam (0.001)", "[relu(x)", "on new data"]),
        ("streams", ["warm_start", "binary_pairs", "first_epochs (100)"]),
        ("models", ["resnet18", "FILE.py:FUNCTION"]),
        ("data", ["tiny_imagenet", "PATH", "skip_corrupt (False)", "Crop and resize", "project (None)"]),
        ("training", [f"{field.name} (" for field in fields(Settings)]),
        ("training", ["decay_epochs ([])", "BatchNorm has no variance of that.", "evaluated."]),
        ("measures", ["weight_l2", "hessian_rank"]),
        ("recipes", ["demo"]),
    ],
)
def test_listings_teach(pliant: Callable[..., tuple[int, str]], what: str, expected: list[str]) -> None:
    code, printed = pliant("list", what)
    assert code == 0
    for word in expected:
        assert word in printed


def test_the_data_cache(
    pliant: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.data.test_sources import write_folder

    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    root = write_folder(tmp_path / "zoo", per_class=10)
    assert pliant("data", "get", str(root)) == (
        0,
        f"{root}: 24 examples to learn from, 6 to be tested on, 3 classes, shape (3, 6, 6)\n",
    )
    code, printed = pliant("data", "list")
    assert code == 0
    assert str(tmp_path / "cache" / "zoo-") in printed
    assert pliant("data", "check")[0] == 0
    (entry,) = entries()
    (entry / "train.x").write_bytes(b"damaged")
    code, printed = pliant("data", "check")
    assert code == 1
    assert "train.x: the content is not what was decoded" in printed


def configs() -> list[RunConfig]:
    recipe = make_recipe(
        {
            "data": {"name": "digits", "first": 200},
            "model": "mlp",
            "stream": {"name": "label_flip", "tasks": 16, "epochs": 2},
            "training": {"batch_size": 16},
            "methods": ["vanilla", "l2_init+shrink_perturb"],
            "seeds": 2,
        }
    )
    return [
        recipe.config(entry, parts, seed, "result")
        for entry in recipe.methods
        for parts in entry.variants()
        for seed in recipe.seeds
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What the runs of `SMALL` write when nothing disturbs them."""
    root = tmp_path_factory.mktemp("reference")
    for config in configs():
        assert execute(config, root).status == "finished"
    return {config.id: outputs(root, config) for config in configs()}


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PLIANT, *SMALL, "--out", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lines_of(root: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in root.glob("runs/*/metrics.jsonl"))


def descendants(pid: int) -> set[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    children = {int(each) for each in found.split()}
    return children.union(*(descendants(child) for child in children))


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_signals_stop_it_and_the_same_command_goes_on(tmp_path: Path, reference: dict[str, dict[str, bytes]]) -> None:
    # Ctrl-C reaches every process of the terminal; kill only the one that it names.
    ends = {
        signal.SIGINT: (130, lambda process, number: os.killpg(process.pid, number)),
        signal.SIGTERM: (143, lambda process, number: os.kill(process.pid, number)),
        signal.SIGKILL: (-9, lambda process, number: os.kill(process.pid, number)),
    }
    for number, (code, send) in ends.items():
        before = lines_of(tmp_path)
        process = start(tmp_path)
        while lines_of(tmp_path) < before + 6:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        workers = descendants(process.pid)
        send(process, number)
        printed, _ = process.communicate()
        assert process.returncode == code
        assert "Traceback" not in printed
        assert ("the same command goes on from here" in printed) == (number == signal.SIGINT)
        while any(map(is_running, workers)):
            time.sleep(0.01)

    printed = in_terminal([*PLIANT, *SMALL, "--out", str(tmp_path)])
    assert "left" in printed
    assert "l2_init+shrink_perturb, seed" in printed
    assert {config.id: outputs(tmp_path, config) for config in configs()} == reference
    resumes = [event for run in load_runs(tmp_path) for event in run.events if event["event"] == "resume"]
    assert len(resumes) >= 3


def in_terminal(command: list[str]) -> str:
    """Run a command in a terminal of its own; return all that it showed there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, os.environ | {"TERM": "xterm", "COLUMNS": "120"})
    shown = b""
    while True:
        try:
            select.select([terminal], [], [])
            shown += os.read(terminal, 65536)
        except OSError:
            break
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown.decode()
    return shown.decode()


def test_two_commands_on_one_folder_share_the_work(tmp_path: Path, reference: dict[str, dict[str, bytes]]) -> None:
    processes = [start(tmp_path), start(tmp_path)]
    for process in processes:
        printed, _ = process.communicate()
        assert process.returncode == 0, printed
    assert {config.id: outputs(tmp_path, config) for config in configs()} == reference
    for run in load_runs(tmp_path):
        assert [event["event"] for event in run.events] == ["start", "end"]


def test_a_run_that_fails_tells_by_the_exit_code(pliant: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "class Broken(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        raise RuntimeError('it broke')\n"
        "def build(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), Broken(64, classes))\n"
    )
    code, printed = pliant(
        *("compare", "--model", f"{tmp_path / 'own.py'}:build", "--methods", "vanilla", "--seeds", "1"),
        *("--set", "stream.epochs=1", "--out", str(tmp_path / "out"), "--workers", "1"),
    )
    assert code == 1
    assert "vanilla, seed 0: failed: RuntimeError: it broke" in printed
    assert "1 of 1 runs did not finish" in printed


def test_tensorboard_shows_what_was_recorded(pliant: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = configs()[0]
    execute(config, tmp_path)
    code, printed = pliant("tensorboard", str(tmp_path))
    assert code == 0
    assert "1 runs" in printed
    events = EventAccumulator(str(tmp_path / "tensorboard" / config.id))
    events.Reload()
    (run,) = load_runs(tmp_path)
    shown = [(event.step, event.value) for event in events.Scalars("test_accuracy")]
    expected = [(record["step"], record["test_accuracy"]) for record in run.records]
    assert shown == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]


def test_without_the_extra_the_command_names_it(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('No module named typer')")
    done = subprocess.run(PLIANT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'pliant[cli]'" in done.stderr


def test_importing_pliant_needs_torch_alone() -> None:
    """None of what the extras install is imported, however much of the package is."""
    script = (
        "import sys, pliant, pliant.data, pliant.streams, pliant.models, pliant.training, pliant.experiments.store\n"
        "extras = {'sklearn', 'PIL', 'pyarrow', 'huggingface_hub', 'pydantic', 'rich', 'typer', 'ray', 'pandas'}\n"
        "print(sorted(extras & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
