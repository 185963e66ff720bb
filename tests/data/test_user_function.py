"""Data from functions: what they return, raise, draw and accept."""

from pathlib import Path

import numpy
import pytest
import torch

from pliant import data
from pliant._names import keyword_options
from pliant.data import user_function
from pliant.experiments.recipe import make_recipe


def write_function(path: Path, body: str, arguments: str = "") -> str:
    (path / "own.py").write_text(f"import numpy, torch\ndef load({arguments}):\n    {body}\n")
    return f"{path / 'own.py'}:load"


def test_a_function_returns_pairs_of_tensors_or_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def load(n=8):\n"
        "    x, y = torch.arange(n * 3.0).view(n, 3), torch.arange(n) % 2\n"
        "    return (x, y), (x[:2], y[:2])\n"
        "def ready():\n"
        "    from pliant.data import from_tensors\n"
        "    return from_tensors('ready', *load(), ('even', 'odd'))\n"
        "def wrong():\n"
        "    return 5\n"
    )
    loaded = data.load(f"{tmp_path / 'own.py'}:load", n=6)
    assert (len(loaded.train), len(loaded.test), loaded.shape) == (6, 2, (3,))
    assert data.load(f"{tmp_path / 'own.py'}:ready").classes == ("even", "odd")
    with pytest.raises(ValueError, match=r"load cannot be called with \(m\): got an unexpected keyword argument 'm'"):
        data.load(f"{tmp_path / 'own.py'}:load", m=6)
    with pytest.raises(ValueError, match="returned int; it must return"):
        data.load(f"{tmp_path / 'own.py'}:wrong")
    with pytest.raises(ValueError, match="has no 'lod'"):
        data.load(f"{tmp_path / 'own.py'}:lod")
    with pytest.raises(ValueError, match="there is no file"):
        data.load(f"{tmp_path / 'other.py'}:load")
    with pytest.raises(ValueError, match="there is no module 'nowhere'"):
        data.load("nowhere:load")


def test_numpy_arrays_are_rejected(tmp_path: Path) -> None:
    name = write_function(tmp_path, "pair = numpy.zeros((4, 3)), numpy.arange(4) % 2; return pair, pair")
    with pytest.raises(ValueError, match=r"returned tuple; .* train inputs are ndarray; they must be a torch\.Ten"):
        data.load(name)


def test_an_exception_in_the_function_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def load():\n    return {}['x']\n")
    with pytest.raises(ValueError, match=r"own\.py:load' fails: KeyError: 'x' \(.*own\.py, line 2\)"):
        data.load(f"{tmp_path / 'own.py'}:load")


def test_a_single_class_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\ndef load():\n    pair = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)\n"
        "    return pair, pair\n"
    )
    with pytest.raises(ValueError, match=r"own\.py:load returned data with 1 class; it must have at least 2"):
        data.load(f"{tmp_path / 'own.py'}:load")


def test_a_dataset_in_double_precision_becomes_single(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom pliant.data import from_tensors\ndef load():\n"
        "    pair = torch.ones(4, 2, dtype=torch.float64), torch.arange(4) % 2\n"
        "    return from_tensors('own', pair, pair)\n"
    )
    loaded = data.load(f"{tmp_path / 'own.py'}:load")
    assert loaded.train.x.dtype == loaded.test.x.dtype == torch.float32


def test_tensors_in_double_precision_become_single(tmp_path: Path) -> None:
    name = write_function(tmp_path, "pair = torch.zeros(4, 3).double(), torch.arange(4) % 2; return pair, pair")
    assert data.load(name).train.x.dtype == torch.float32


def test_reserved_argument_names_are_rejected(tmp_path: Path) -> None:
    assert set(user_function.RESERVED) == keyword_options(data.load).keys()
    for argument in user_function.RESERVED:
        name = write_function(tmp_path, "return 0", f"{argument}=5")
        with pytest.raises(ValueError, match=f"has an argument '{argument}', which pliant.data.load reserves"):
            data.load(name)


def test_non_functions_and_too_many_return_values_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torch\nDATA = torch.zeros(2), torch.zeros(2)\n")
    with pytest.raises(ValueError, match=r"own\.py:DATA is a tuple; it must be a function"):
        data.load(f"{tmp_path / 'own.py'}:DATA")
    name = write_function(tmp_path, "return [torch.zeros(2)] * 4")
    with pytest.raises(ValueError, match=r"\(x_test, y_test\) as tensors: too many values to unpack"):
        data.load(name)


def test_the_function_is_seeded_and_leaves_global_generators_alone(tmp_path: Path) -> None:
    body = "pair = torch.from_numpy(numpy.random.rand(4, 3)) + torch.rand(3), torch.arange(4) % 2; return pair, pair"
    name, found = write_function(tmp_path, body), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        expected = torch.Generator().manual_seed(seed)
        found.append(data.load(name).train.x)
        assert torch.rand(()) == torch.rand((), generator=expected)
    assert torch.equal(*found)


def test_options_are_passed_to_the_function(tmp_path: Path) -> None:
    name = write_function(tmp_path, "pair = torch.zeros(4, len(size)), torch.arange(4) % 2; return pair, pair", "size")
    values = {"data": {"name": name, "size": "big"}, "model": "mlp", "stream": "single", "methods": ["vanilla"]}
    assert make_recipe(values).data.options == {"size": "big"}
    assert data.load(name, size="big").shape == (3,)


def test_the_fingerprint_depends_on_the_content_only(tmp_path: Path) -> None:
    body = "pair = torch.full((4, 2), {}), torch.arange(4) % 2; return pair, pair"
    prints = [data.load(write_function(tmp_path, body.format(value))).fingerprint for value in ("0.0", "1.0", "1.0 ")]
    assert prints[0] != prints[1] == prints[2]
