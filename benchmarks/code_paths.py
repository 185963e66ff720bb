"""How many files a reader visits to follow one call: `SWR()`, `attach`, a step, `diagnose`, `compare`.

A profiler notes every function of Pliant that a call enters. A switch is a function of one file that is entered from
a function of another file. Everything is imported before. Of a comparison only
the process that was called counts, not its workers.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import pliant

SOURCE = Path(pliant.__file__).parent


class FileTracer:
    """Notes the files whose functions are entered, and how often a function of another file is."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.switches = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note one call; `sys.setprofile` calls this."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(str(SOURCE)) or frame.f_code.co_name == "<module>":
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(SOURCE)):
            caller = caller.f_back
        self.switches += caller is not None and caller.f_code.co_filename != file


@contextlib.contextmanager
def traced() -> Iterator[FileTracer]:
    tracer = FileTracer()
    sys.setprofile(tracer)
    try:
        yield tracer
    finally:
        sys.setprofile(None)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def report(what: str, action: Callable[[], object], setup: Callable[[], object] = lambda: None) -> None:
    setup()
    with traced() as tracer, contextlib.redirect_stdout(io.StringIO()):
        action()
    print(f"{what:<40} {len(tracer.files):6d} {tracer.switches:9d}")


def main() -> None:
    """Print files visited and switches between files for the calls that a reader follows first."""
    sources = list(SOURCE.rglob("*.py"))
    lines = sum(len(source.read_text(encoding="utf8").splitlines()) for source in sources)
    print(f"src/pliant: {len(sources)} files, {lines} lines\n")
    print(f"{'call':<40} {'files':>6} {'switches':>9}")
    torch.manual_seed(0)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    model, fresh = mlp(), mlp()
    optimizer = Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    pliant.SWR(mlp(), x)  # the first one in a process also imports
    report("SWR(model, example)", lambda: pliant.SWR(model, x))
    swr = pliant.SWR(model, x)
    report("swr.attach(optimizer)", lambda: swr.attach(optimizer))
    step()
    report("optimizer.step() with SWR", step)
    pliant.diagnose(model, (x, y), cross_entropy, reference=fresh)
    report(
        "diagnose(model, batch, loss, reference)",
        lambda: pliant.diagnose(model, (x, y), cross_entropy, reference=fresh),
    )
    with tempfile.TemporaryDirectory() as folder:
        report("compare (2 methods, 1 seed, 2 tasks)", lambda: compare(folder))


def compare(folder: str) -> None:
    from pliant.cli import main as command

    sys.argv = ["pliant", "compare", "--methods", "vanilla,l2_init", "--data", "digits", "--model", "mlp"]
    sys.argv += ["--stream", "random_labels", "--seeds", "1", "--out", folder]
    sys.argv += ["--set", "stream.tasks=2", "--set", "stream.epochs=2"]
    with contextlib.suppress(SystemExit):
        command()
