"""The wheel and the sdist hold what a user needs, and the wheel works in a clean environment."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from pliant import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build wheel and sdist with the backend that is installed, so without a download."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_wheel_holds_types_pages_and_recipes(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"pliant-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {path.name for path in (ROOT / "recipes").glob("*.toml")}
    assert recipes
    assert {f"pliant/recipes/{name}" for name in recipes} <= names
    assert {"pliant/py.typed", "pliant/_html.css", "pliant/_html_theme.js"} <= names
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "pliant").rglob("*.py")}
    assert sources <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/"))]


def test_sdist_can_be_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "recipes/demo.toml", "src/pliant/__init__.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "docs/_build", "docs/gallery"))]


def test_twine_accepts_both(built: Path) -> None:
    files = [str(path) for path in built.iterdir()]
    assert len(files) == 2
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == __version__


def test_every_extra_that_an_extra_or_the_readme_names_exists() -> None:
    extras = PROJECT["optional-dependencies"]
    text = str(extras) + (ROOT / "README.md").read_text()
    named = {name for group in re.findall(r"(?:pliant|\.)\[([\w,]+)\]", text) for name in group.split(",")}
    assert {"cli", "report", "all", "sb3"} <= named
    assert named <= set(extras)


def test_versions_of_python_are_those_of_the_workflow() -> None:
    classified = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r'"(3\.\d+)"', workflow)) == classified
    assert "run: .ci/run" in workflow


@pytest.mark.long
def test_wheel_works_in_a_clean_environment(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the wheel; run the README's first example, --help, and the demo's first act, shortened."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # else the checkout would stand before the wheel
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    constraints = str(ROOT / "constraints.txt")
    install = [python, "-m", "pip", "install", "--quiet", "-c", constraints]
    subprocess.run([*install, "-r", constraints], check=True)
    subprocess.run([*install, f"{wheel}[report]"], check=True)
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    done = subprocess.run(
        [python, "-c", f"{example}\nprint(pliant.__file__)"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(environment))
    pliant = str(environment / "bin" / "pliant")
    helped = subprocess.run([pliant, "demo", "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--rl" in helped.stdout
    quick = ["run", "demo", "seeds=1", "stream.first_epochs=2", "stream.epochs=2", "--out", "out", "--workers", "1"]
    subprocess.run([pliant, *quick], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "out" / "report.html").exists()
