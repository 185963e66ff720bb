"""Archives that lie: damaged, swollen, nested, with forged results. Nothing is written of them."""

import gzip
import io
import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pliant._console import SafeConsole
from pliant._json import parse_json
from pliant.experiments.archive import pack, unpack
from pliant.experiments.experiment import run_experiment
from pliant.experiments.journal import Journal, write_lines
from pliant.experiments.recipe import make_recipe
from pliant.experiments.report.document import make_report
from pliant.experiments.run import execute
from pliant.experiments.run_config import RunConfig
from pliant.experiments.store import load_runs, read_sources
from pliant.experiments.tensorboard import export
from tests.hostile.attacks import assert_refused, flip_bit, pliant


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and a choice, packed."""
    folder = tmp_path_factory.mktemp("packed")
    recipe = make_recipe(
        {
            "data": {"name": "digits", "first": 60},
            "model": {"name": "mlp", "widths": [4]},
            "stream": {"name": "single", "epochs": 2},
            "methods": [{"name": "l2", "grid": {"lam": [0.1, 0.2]}}],
            "selection": {"seeds": 1, "fraction": 0.5},
            "seeds": 1,
        }
    )
    root = folder / "runs"
    run_experiment(recipe, root, lambda configs: {each.id: execute(each, root).status for each in configs})
    pack(root, folder / "kept.gz")
    return folder / "kept.gz"


def lines_of(packed: Path) -> list[dict[str, Any]]:
    return Journal(gzip.decompress(packed.read_bytes())).records()


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write an archive with correct digests, as a forger would."""
    path.write_bytes(gzip.compress(write_lines(lines)[0]))


def test_an_archive_comes_back(packed: Path, tmp_path: Path) -> None:
    assert unpack(packed, tmp_path / "got") == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_found(packed: Path, tmp_path: Path, seed: int) -> None:
    bad = tmp_path / "bad.gz"
    content = bytearray(gzip.decompress(packed.read_bytes()))
    content[len(content) * seed // 20] ^= 1
    bad.write_bytes(gzip.compress(bytes(content)))  # Behind gzip's own checksum.
    with pytest.raises(ValueError, match=r"bad\.gz' is not what pliant pack writes, or it is damaged"):
        unpack(bad, tmp_path / "got")
    bad.write_bytes(packed.read_bytes())
    flip_bit(bad, place=12 + (bad.stat().st_size - 12) * seed // 20)  # In front of it; the header's time says nothing.
    with pytest.raises(ValueError, match=r"bad\.gz' is not what pliant pack writes, or it is damaged"):
        unpack(bad, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def rename(run: dict[str, Any], **changes: Any) -> None:
    """Change a run's configuration, and name the run by it, if that is possible."""
    run["config"] |= changes
    try:
        run["id"] = RunConfig.from_dict(run["config"]).id
    except (ValueError, TypeError):
        run["id"] = "x"


FORGERIES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "failed with results": lambda lines: lines[1].update(status="failed"),
    "diverged with results": lambda lines: lines[1].update(status="diverged"),
    "finished without results": lambda lines: lines[1].update(result={}),
    "unfinished": lambda lines: lines[1].update(status="unfinished", result={}),
    "unknown status": lambda lines: lines[1].update(status="best"),
    "result as text": lambda lines: lines[1].update(result={"final_test_accuracy": "0.99"}),
    "result beyond all floats": lambda lines: lines[1].update(result={"final_test_accuracy": 10**400}),
    "rate beyond all floats": lambda lines: rename(lines[1], training=lines[1]["config"]["training"] | {"lr": 10**400}),
    "score beyond all floats": lambda lines: lines[0]["selection"]["labels"]["l2"].update(
        scores={"l2(lam=0.1)": 10**400}
    ),
    "result as truth": lambda lines: lines[1].update(result={"final_test_accuracy": True}),
    "result as list": lambda lines: lines[1].update(result=[1.0]),
    "seed as path": lambda lines: (lines[1]["config"].update(seed="../../x"), lines[1].update(id="l2-s../../x-0")),
    "seed beyond 64 bits": lambda lines: rename(lines[1], seed=10**400),
    "seed as fraction": lambda lines: rename(lines[1], seed=0.5),
    "label as number": lambda lines: rename(lines[1], label=7),
    "negative rate": lambda lines: rename(lines[1], training=lines[1]["config"]["training"] | {"lr": -1}),
    "unknown key": lambda lines: rename(lines[1], more=1),
    "id of another run": lambda lines: lines[1].update(id=lines[2]["id"]),
    "id as path": lambda lines: lines[1].update(id="../../escaped"),
    "long id": lambda lines: lines[1].update(id="x" * 100_000),
    "run twice": lambda lines: (lines.append(lines[1]), lines[0].update(runs=4)),
    "run missing": lambda lines: lines.pop(),
    "metrics of other lengths": lambda lines: lines[1]["metrics"].update(loss=[1.0, 2.0, 3.0]),
    "metrics as number": lambda lines: lines[1]["metrics"].update(loss=1.0),
    "minus one seeds": lambda lines: lines[0]["selection"]["labels"]["l2"].update(seeds=-1),
    "score as text": lambda lines: lines[0]["selection"]["labels"]["l2"].update(scores={"l2(lam=0.1)": "best"}),
    "choice as list": lambda lines: lines[0]["selection"].update(labels=[]),
    "recipe as list": lambda lines: lines[0].update(recipe=[]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_archive_is_refused_whole(packed: Path, tmp_path: Path, name: str) -> None:
    lines = lines_of(packed)
    FORGERIES[name](lines)
    write(tmp_path / "bad.gz", lines)
    with pytest.raises(ValueError, match=r"bad\.gz' is not what pliant pack writes, or it is damaged: \w+: "):
        unpack(tmp_path / "bad.gz", tmp_path / "deep" / "got")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gz"]


def megabytes_to_unpack(file: Path, root: Path) -> tuple[float, str]:
    """Unpack in a child process; return the growth of its memory, and what it says."""
    script = (
        "import resource, sys; from pathlib import Path; from pliant.experiments.archive import unpack\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = used()\n"
        "try:\n    unpack(Path(sys.argv[1]), Path(sys.argv[2])); said = 'unpacked'\n"
        "except ValueError as error:\n    said = str(error)\n"
        "print(used() - before, said)"
    )
    limit = 8 << 30
    ended = subprocess.run(
        [sys.executable, "-c", script, str(file), str(root)],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    grown, _, said = ended.stdout.partition(" ")
    return float(grown), said


def test_an_archive_that_swells_is_refused_before_it_does(packed: Path, tmp_path: Path) -> None:
    """200 kB that would be 200 MB: of spaces, and of columns that repeat one value for every epoch."""
    spaces = tmp_path / "spaces.gz"
    with gzip.open(spaces, "wb") as file:
        for _ in range(200):
            file.write(b" " * 1_000_000)
    assert spaces.stat().st_size < 220_000
    grown, said = megabytes_to_unpack(spaces, tmp_path / "got")
    assert "more than 50 times its size" in said
    assert grown < 100
    lines = lines_of(packed)
    lines[1]["metrics"] = {"loss": [0.5] * 50_000} | {f"m{number}": [{"x" * 99: 0.25}] for number in range(200)}
    lines[1]["error"] = random.Random(0).randbytes(200_000).hex()  # So that the file may hold more.
    write(tmp_path / "columns.gz", lines)
    grown, said = megabytes_to_unpack(tmp_path / "columns.gz", tmp_path / "got")
    assert "its lines have more than" in said
    assert grown < 200
    assert not (tmp_path / "got").exists()


def test_an_archive_of_nothing_but_lists_is_refused(packed: Path, tmp_path: Path) -> None:
    """Each takes 64 bytes of memory, and two in the file."""
    lines = lines_of(packed)
    lines[0]["recipe"] |= {"x": [[]] * 5_000_000, "pad": random.Random(0).randbytes(500_000).hex()}
    write(tmp_path / "lists.gz", lines)
    grown, said = megabytes_to_unpack(tmp_path / "lists.gz", tmp_path / "got")
    assert "more tables and lists than experiments have" in said
    assert grown < 100


def test_an_archive_of_nothing_but_texts_is_refused(packed: Path, tmp_path: Path) -> None:
    """Each takes 64 bytes of memory, and six in the file: 1 GB for a file of 1.4 MB."""
    lines = lines_of(packed)
    words = [f"{number % 90 + 10}" for number in range(7_000_000)]
    lines[0]["recipe"] |= {"x": words, "pad": random.Random(0).randbytes(900_000).hex()}
    write(tmp_path / "texts.gz", lines)
    grown, said = megabytes_to_unpack(tmp_path / "texts.gz", tmp_path / "got")
    assert "has more than 10 MB" in said
    assert grown < 300


def test_deep_nesting_is_one_line(packed: Path, tmp_path: Path) -> None:
    pad = random.Random(0).randbytes(50_000).hex().encode()
    deep = b"[" * 10_000 + b"]" * 10_000
    (tmp_path / "deep.gz").write_bytes(gzip.compress(b'{"recipe": ' + deep + b', "pad": "' + pad + b'"}\n'))
    with pytest.raises(ValueError, match="nested more than 50 levels deep"):
        unpack(tmp_path / "deep.gz", tmp_path / "got")
    lines = lines_of(packed)
    value: Any = 0.5
    for _ in range(60):
        value = [value]
    lines[1]["metrics"]["loss"] = [value, value]
    write(tmp_path / "bad.gz", lines)
    assert_refused(pliant("unpack", "bad.gz", "got", cwd=tmp_path), "nested more than 50 levels deep")


@pytest.mark.parametrize(
    "change",
    [
        {"title": True},
        {"title": [None]},
        {"published": ""},
        {"published": {"l2": 0.5}},
        {"published": {"l2": [{}, 0.1]}},
        {"seeds": ["first"]},
        {"seeds": [10**12]},
        {"headline": {}},
        {"choices": [[]]},
        {"methods": [{"label": [], "parts": []}]},
        {"methods": [{"label": "l2", "parts": []}]},
        {"methods": [{"label": "l2", "parts": [{"name": "l2", "settings": [], "grid": {}}]}]},
        {"methods": [{"label": "l2", "parts": [{"name": {}, "settings": {}, "grid": {"lam": 0.1}}]}]},
        {"selection": {"on": "best"}},
        {"training": []},
    ],
    ids=str,
)
def test_a_forged_recipe_costs_only_itself(packed: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    lines = lines_of(packed)
    lines[0]["recipe"] |= change
    write(tmp_path / "bad.gz", lines)
    unpack(tmp_path / "bad.gz", tmp_path / "got")
    report = make_report([tmp_path / "got"])
    report.print(SafeConsole(file=io.StringIO()))
    for ending in ("md", "csv", "tex"):
        report.save(tmp_path / f"report.{ending}")
    assert [section.comparison.runs[0].status for section in report.sections] == ["finished"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("task", 10**12), ("task", -1), ("task", 0.5), ("epoch", -1), ("epoch", "1"), ("measures", 5), ("loss", [1.0])],
)
def test_a_forged_record_costs_only_its_run(packed: Path, tmp_path: Path, key: str, value: Any) -> None:
    """A task of that number would take terabytes; none of it may end in a traceback."""
    lines = lines_of(packed)
    next(line for line in lines[1:] if line["config"]["purpose"] == "result")["metrics"][key] = [value]
    write(tmp_path / "bad.gz", lines)
    unpack(tmp_path / "bad.gz", tmp_path / "got")
    report = make_report([tmp_path / "got"])
    assert str(report)
    report.save(tmp_path / "report.md")
    if key != "loss":
        (section,) = report.sections
        assert f"{key} {'are' if key == 'measures' else 'is'} {value!r}" in section.failures[0].reason


@pytest.mark.parametrize(
    ("number", "key", "value"),
    [
        (0, "environment", 0.5),
        (0, "environment", [[]]),
        (1, "seconds", [1.0]),
        (1, "steps", "many"),
        (1, "bytes", []),
        (1, "bytes", {"model": None}),
        (1, "methods", 5),
        (1, "methods", [{"name": []}]),
        (1, "sources", 5),
    ],
)
def test_a_forged_log_costs_only_the_log(packed: Path, tmp_path: Path, number: int, key: str, value: Any) -> None:
    lines = lines_of(packed)
    for line in lines[1:]:
        line["events"][number][key] = value
    write(tmp_path / "bad.gz", lines)
    unpack(tmp_path / "bad.gz", tmp_path / "got")
    report = make_report([tmp_path / "got"])
    report.print(SafeConsole(file=io.StringIO()))
    for ending in ("md", "csv", "tex"):
        report.save(tmp_path / f"report.{ending}")
    assert not report.sections[0].failures
    assert all(read_sources(run) == {} for run in load_runs(tmp_path / "got")) or key != "sources"


def test_a_forged_log_is_packed_again(packed: Path, tmp_path: Path) -> None:
    lines = lines_of(packed)
    for line in lines[1:]:
        next(event for event in line["events"] if event["event"] == "start")["environment"] = "Linux"
    write(tmp_path / "bad.gz", lines)
    unpack(tmp_path / "bad.gz", tmp_path / "got")
    assert pack(tmp_path / "got", tmp_path / "again.gz") == len(lines) - 1


@pytest.mark.parametrize(("key", "value"), [("step", None), ("step", "1"), ("measures", 5)])
def test_tensorboard_names_a_forged_record(packed: Path, tmp_path: Path, key: str, value: Any) -> None:
    lines = lines_of(packed)
    for line in lines[1:]:
        line["metrics"][key] = [value]
    write(tmp_path / "bad.gz", lines)
    unpack(tmp_path / "bad.gz", tmp_path / "got")
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds a record that no run writes"):
        export(tmp_path / "got", tmp_path / "tensorboard")


def test_infinite_numbers_are_not_json(tmp_path: Path) -> None:
    for text in ("1e999", "-1E+1000", "NaN", "1" * 30, "-" + "9" * 30):
        with pytest.raises(ValueError, match=r"is not a finite number|does not fit into 64 bits"):
            parse_json(f'{{"loss": {text}}}')
    assert parse_json('{"seed": 9223372036854775807, "digest": "1e9991234567890123456789012", "x": 1e-999}')["x"] == 0


def test_an_archive_from_before_digests_is_read(packed: Path, tmp_path: Path) -> None:
    old = [{key: value for key, value in line.items() if key != "runs"} for line in lines_of(packed)]
    (tmp_path / "old.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, old)).encode()))
    assert unpack(tmp_path / "old.gz", tmp_path / "got") == 3
