"""The command line: what it answers, how it ends, and that signals cost nothing but time."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from pliant import cli, methods, models, streams
from pliant._command_options import LISTED
from pliant.data.cache import entries
from pliant.diagnostics import measures
from pliant.experiments.recipe import BASELINES, make_recipe
from pliant.experiments.run import execute
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import load_runs
from pliant.training import Settings
from tests.experiments.helpers import descendants, is_running, outputs, wait_until, write_waiting_network

TINY = [
    *("compare", "--stream", "label_flip", "--methods", "vanilla", "--seeds", "1", "--workers", "1", "--out", "out"),
    *("--set", "data.first=50", "--set", "stream.tasks=1", "--set", "stream.epochs=1"),
]
ROOT = Path(__file__).parent.parent
PLIANT = [sys.executable, "-c", "from pliant.cli import main; main()"]
SMALL = [
    "compare",
    *("--data", "digits", "--stream", "label_flip", "--methods", "l2_init+shrink_perturb,vanilla"),
    *("--seeds", "2", "--set", "data.first=200", "--set", "stream.tasks=6", "--set", "stream.epochs=2"),
    *("--set", "training.batch_size=16", "--checkpoint-seconds", "0", "--workers", "2"),
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
        (["compare", "--methods", "redo:tau=0.1,every=97"], "write a colon before every setting"),
        (["compare", "--data", "nowhere/"], "is neither a data set nor a path"),
        (["compare", "--set", "training.lr=fast"], "training.lr is 'fast': input should be a valid number"),
        (["compare", "--gpus", "1"], "--gpus and --address are for --engine ray"),
        (["compare", "--engine", "ray", "--workers", "3"], "--workers is for --engine processes"),
        (["compare", "--workers", "0"], "workers: 0 is not allowed; it must be an integer ≥ 1"),
        (["run", "nothing"], "there is no recipe 'nothing'"),
        (["list", "method"], "did you mean 'methods'?"),
        (["report", "/nowhere"], "/nowhere"),
        (["compare", "--model", "nowhere:build"], "there is no module 'nowhere'"),
        (["compare", "--model", "math:pi"], "model is 'math:pi', which is not a function"),
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
        ("training", ["decay_epochs ([])", "It is dropped if it has a single", "evaluated."]),
        ("methods", ["on new data *", "around a step", "* acts only when you call apply()"]),
        ("measures", ["weight_l2", "hessian_rank"]),
        ("recipes", ["demo"]),
    ],
)
def test_listings_teach(pliant: Callable[..., tuple[int, str]], what: str, expected: list[str]) -> None:
    code, printed = pliant("list", what)
    assert code == 0
    for word in expected:
        assert word in printed


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", (*methods.names(), *BASELINES, *methods.by_timing(), "at=[steps]")),
        ("streams", streams.names()),
        ("models", models.names()),
        ("measures", measures.names()),
    ],
)
def test_no_name_is_cut_short_at_80_columns(
    pliant: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, what: str, names: Sequence[str]
) -> None:
    monkeypatch.setattr(cli, "console", Console(width=80))
    _, printed = pliant("list", what)
    assert max(map(cell_len, printed.splitlines())) <= 80
    assert [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", printed)] == []
    assert "…" not in printed


def test_the_data_cache(
    pliant: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.data.pictures import write_folder

    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    root = write_folder(tmp_path / "zoo", per_class=10)
    assert pliant("data", "get", str(root)) == (
        0,
        f"{root}: 24 training examples, 6 test examples, 3 classes, shape (3, 6, 6)\n"
        f"next: pliant compare --data {root}\n",
    )
    code, printed = pliant("data", "list")
    assert code == 0
    assert str(tmp_path / "cache" / "zoo-") in printed
    assert pliant("data", "check")[0] == 0
    (entry,) = entries()
    (entry / "train.x").write_bytes(b"damaged")
    code, printed = pliant("data", "check")
    assert code == 1
    assert "train.x: the content does not match its checksum" in printed


def configs(model: str = "mlp") -> list[RunConfig]:
    recipe = make_recipe(
        {
            "data": {"name": "digits", "first": 200},
            "model": model,
            "stream": {"name": "label_flip", "tasks": 6, "epochs": 2},
            "training": {"batch_size": 16},
            "methods": ["l2_init+shrink_perturb", "vanilla"],
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


def command(root: Path, model: str = "mlp") -> list[str]:
    return [*PLIANT, *SMALL, "--model", model, "--out", str(root)]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell starts what it runs in the background with SIGINT ignored, and every child would inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def stop(command: list[str], folder: Path, send: Callable[[int], None]) -> tuple[int, str]:
    """Start a command, send it a signal where both its workers wait; return its exit code and what it printed."""
    process = start(command)
    try:
        wait_until(lambda: len(list(folder.glob("*.waits"))) == 2 or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        workers = descendants(process.pid)
        send(process.pid)
        printed, _ = process.communicate(timeout=60)
        wait_until(lambda: not any(map(is_running, workers)), 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # If the signal did not stop it, nothing else would.
    for mark in folder.glob("*.waits"):
        mark.unlink()
    return process.returncode, printed


def test_signals_stop_it_and_the_same_command_goes_on(tmp_path: Path) -> None:
    # Two of the four runs begin, and wait in the second epoch of every attempt: the command cannot end before.
    model = write_waiting_network(tmp_path, step=20).name
    again = command(tmp_path / "cut", model)
    # Ctrl-C reaches every process of the terminal; kill only the one that it names.
    code, printed = stop(again, tmp_path, lambda pid: os.killpg(pid, signal.SIGINT))
    assert code == 130
    assert "Traceback" not in printed
    assert "the same command resumes" in printed
    for number, expected in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        code, printed = stop(again, tmp_path, lambda pid, number=number: os.kill(pid, number))
        assert code == expected
        assert "Traceback" not in printed
        assert "the same command resumes" not in printed

    bar = "l2_init+shrink_perturb, seed"
    printed = in_terminal(again, bar, (tmp_path / "go").touch)
    assert bar in printed
    assert "left" in printed
    for config in configs(model):
        execute(config, tmp_path / "whole")
        assert outputs(tmp_path / "cut", config) == outputs(tmp_path / "whole", config)
    resumes = [event for run in load_runs(tmp_path / "cut") for event in run.events if event["event"] == "resume"]
    assert len(resumes) == 6


_NO_TORCH = """
import sys
from pliant.cli import main
sys.argv = ["pliant", "--help"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def test_help_answers_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _NO_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "diagnose" in done.stdout
    assert done.stdout.endswith("False\n")


_WAIT_AND_RAISE = """import pathlib, time
try:
    pathlib.Path(__file__).with_name("waits").touch()
    time.sleep(600)
except KeyboardInterrupt:
    raise {error} from None
"""


def test_ctrl_c_before_there_is_a_command_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(_WAIT_AND_RAISE.format(error="ImportError"))
    code, printed = interrupt([sys.executable, "-m", "pliant", "compare"], tmp_path)
    assert (code, printed) == (130, "stopped; nothing was done yet\n")


def test_ctrl_c_that_an_import_turns_into_another_error(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(_WAIT_AND_RAISE.format(error="RecursionError"))
    code, printed = interrupt([*PLIANT, "compare"], tmp_path)
    assert (code, printed) == (130, "preparing …\nstopped; the same command starts over\n")


_WAIT_AS_WORKER = """import pathlib, signal, sys, time
if any("spawn_main" in argument for argument in sys.orig_argv):
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    pathlib.Path(__file__).with_name("waits").write_text(f"blocked: {blocked}")
    time.sleep(600)
"""


def test_ctrl_c_while_a_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WAIT_AS_WORKER)
    code, printed = interrupt([*PLIANT, *TINY], tmp_path)
    assert (code, printed) == (130, "preparing …\nstopped; the same command resumes\n")
    assert (tmp_path / "waits").read_text() == "blocked: True"  # else it may print a traceback


COMMANDS = (
    "compare",
    "run",
    "demo",
    "report",
    "diagnose",
    "treat",
    "pack",
    "unpack",
    "tensorboard",
    "list",
    "data get",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(
    pliant: Callable[..., tuple[int, str]], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns the explanations have most of the width, and examples stand at the end."""
    monkeypatch.setenv("COLUMNS", "80")
    code, printed = pliant(*command.split(), "--help")
    assert code == 0
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    options = [line for line in lines if line.startswith("│")]
    starts = [re.match(r"│ .*? {2,}(?=\S[^│]{10,} *│$)", line) for line in options]
    assert max(match.end() for match in starts if match) <= 40, "explanations are squeezed"
    assert not re.search(r"<\w+", printed), "flags and arguments need no type"
    assert "Examples:" in printed.rpartition("╯")[2]
    assert f"pliant {command}" in printed.rpartition("Examples:")[2]


@pytest.mark.parametrize("what", LISTED)
def test_listings_fit_a_terminal(
    pliant: Callable[..., tuple[int, str]], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns no name is cut, and the last line says what to do next."""
    monkeypatch.setattr(cli, "console", Console(width=80))
    code, printed = pliant("list", what)
    assert code == 0
    *table, last = printed.splitlines()
    assert max(map(cell_len, printed.splitlines())) <= 80
    names = [line.split()[0] for line in table if line.strip()]
    assert not [name for name in names if name.endswith("…") and name != "…"]
    assert last.startswith("next: pliant ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("pliant dia", "diagnose"), ("pliant diagnose --bud", "--budget"), ("pliant list stre", "streams")],
)
def test_the_shell_completes(words: str, expected: str) -> None:
    """Also the options of a command that lives in its own module."""
    asked = {"_PLIANT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import sys; sys.argv = ['pliant']; from pliant.cli import app; app(prog_name='pliant')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
    assert expected in done.stdout.split()


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(_WAIT)
    code, printed = interrupt([*PLIANT, "compare"], tmp_path)
    assert (code, printed) == (130, "preparing …\nstopped; the same command starts over\n")


def test_ctrl_c_while_data_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def load():\n    {'    '.join(_WAIT.splitlines(keepends=True))}")
    code, printed = interrupt([*PLIANT, "compare", "--data", "mine.py:load"], tmp_path)
    assert (code, printed) == (130, "preparing …\nstopped; the same command resumes\n")
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_the_report_is_made(tmp_path: Path) -> None:
    (tmp_path / "altair.py").write_text(_WAIT)
    code, printed = interrupt([*PLIANT, *TINY], tmp_path)
    assert code == 130
    assert "vanilla" in printed
    assert printed.endswith("stopped; the runs are done, and `pliant report out` makes the report\n")


def test_without_altair_there_is_still_a_table(tmp_path: Path) -> None:
    script = f"import sys; sys.modules['altair'] = None; sys.argv = {['pliant', *TINY]}; {PLIANT[2]}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warning = "warning: without altair there is a table but no page: pip install 'pliant[report]'"
    assert done.stdout.index(warning) < done.stdout.index("[1/1] vanilla, seed 0: finished")
    assert "no page without altair: pip install 'pliant[report]'; pliant report out" in done.stdout
    assert "vanilla reaches" in done.stdout
    assert not (tmp_path / "out" / "report.html").exists()


_WAIT = """import pathlib, time
pathlib.Path(__file__).with_name("waits").touch()
time.sleep(600)
"""


def interrupt(command: list[str], folder: Path) -> tuple[int, str]:
    """Start a command in a folder whose modules come first, and press Ctrl-C where one of them waits."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT / "src")))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: (folder / "waits").exists() or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


def in_terminal(command: list[str], words: str, then: Callable[[], None]) -> str:
    """Run a command in a terminal of its own, do something once it shows some words; return all that it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, os.environ | {"TERM": "xterm", "COLUMNS": "120"})
    shown = bytearray()

    def is_over() -> bool:
        if select.select([terminal], [], [], 0)[0]:
            try:
                shown.extend(os.read(terminal, 65536))
            except OSError:
                return True
            if words.encode() in shown:
                then()
        return False

    wait_until(is_over)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown.decode()
    return shown.decode()


def test_two_commands_on_one_folder_share_the_work(tmp_path: Path, reference: dict[str, dict[str, bytes]]) -> None:
    processes = [start(command(tmp_path)) for _ in range(2)]
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
        "        if self.training: raise RuntimeError('it broke')\n"
        "        return super().forward(x)\n"
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
    """Nothing that the extras install is there, and all that a loop of one's own may want is imported nevertheless."""
    extras = {re.split(r"[^\w-]", each)[0] for each in requires("pliant") if "extra ==" in each}
    owners = {
        name: {owner.lower().replace("_", "-") for owner in each} for name, each in packages_distributions().items()
    }
    absent = [name for name, each in owners.items() if extras & each]
    modules = "pliant, pliant.data, pliant.streams, pliant.models, pliant.training, pliant.experiments.store"
    assert {"numpy", "sklearn", "PIL", "huggingface_hub", "scipy", "typer", "ray", "tensorboard"} <= set(absent)
    script = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {modules}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_seeds_no_generator_that_it_brings(tmp_path: Path) -> None:
    (tmp_path / "seeds.py").write_text("import numpy, random\nnumpy.random.seed(0)\nrandom.seed(0)\nthing = 1\n")
    code = (
        "from pliant._importing import import_object; import_object('seeds.py:thing'); import numpy, random; "
        "print(numpy.random.rand(), random.random())"
    )
    command = [sys.executable, "-c", code]
    drawn = [subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout.split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])
