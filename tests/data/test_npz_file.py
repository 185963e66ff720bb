"""NumPy files: their arrays, shapes and labels."""

import sys
from pathlib import Path

import numpy
import pytest
import torch

from pliant import data


def test_without_numpy_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy.savez(tmp_path / "own.npz", x=numpy.ones((4, 2)), y=numpy.arange(4) % 2)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'pliant\[data\]'"):
        data.load(str(tmp_path / "own.npz"))


@pytest.mark.parametrize("place", [100, 200])
def test_a_damaged_file_is_rejected(tmp_path: Path, place: int) -> None:
    path = tmp_path / "own.npz"
    numpy.savez_compressed(path, x=numpy.random.default_rng(0).random((40, 5)), y=numpy.arange(40) % 2)
    content = bytearray(path.read_bytes())
    content[place : place + 30] = bytes(255 - value for value in content[place : place + 30])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"own\.npz cannot be read as a NumPy file of plain arrays"):
        data.load(str(path))


def test_complex_inputs_are_rejected(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "own.npz", x=numpy.ones((4, 2), dtype=numpy.complex64), y=numpy.arange(4) % 2)
    with pytest.raises(ValueError, match=r"x has dtype torch\.complex64; inputs must be real"):
        data.load(str(tmp_path / "own.npz"))


def test_four_arrays_are_train_and_test(tmp_path: Path) -> None:
    x = numpy.random.default_rng(0).integers(0, 256, (12, 5, 4, 3), dtype=numpy.uint8)
    y = numpy.arange(12) % 3
    numpy.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    loaded = data.load(str(tmp_path / "own.npz"))
    assert torch.equal(loaded.train.x, torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    assert torch.equal(loaded.train.y, torch.from_numpy(y)[loaded.train.rows])
    assert (len(loaded.test), loaded.classes) == (6, ("0", "1", "2"))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("last", [False, True])
def test_images_may_have_channels_last(tmp_path: Path, channels: int, last: bool) -> None:
    x = numpy.random.default_rng(0).integers(0, 256, (20, channels, 6, 8)).astype(numpy.uint8)
    given = x.transpose(0, 2, 3, 1) if last else x
    y = numpy.arange(20) % 2
    numpy.savez(tmp_path / "own.npz", x_train=given, y_train=y, x_test=given, y_test=y)
    loaded = data.load(str(tmp_path / "own.npz"))
    assert torch.equal(loaded.test.x, torch.from_numpy(x))


def test_train_and_test_must_have_the_same_dtype(tmp_path: Path) -> None:
    x, y = numpy.zeros((20, 6, 8), dtype=numpy.uint8), numpy.arange(20) % 2
    numpy.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:, None] / 255.0, y_test=y)
    with pytest.raises(ValueError, match=r"train inputs are torch.uint8, test inputs torch.float32"):
        data.load(str(tmp_path / "own.npz"))


def test_training_examples_are_shuffled(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "own.npz", x=numpy.arange(80.0).reshape(40, 2), y=numpy.arange(40) // 20)
    some = data.load(str(tmp_path / "own.npz"), first=12).train
    inputs, labels = some.batch(torch.arange(12))
    assert set(labels.tolist()) == {0, 1}
    assert torch.equal(labels, (inputs[:, 0] >= 40).long())


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (numpy.zeros((4, 5)), numpy.array([0.5, 1, 0, 1]), r"y holds 0\.5; labels must be whole numbers"),
        (numpy.zeros((4, 5)), numpy.array([0, 1, 0, numpy.nan]), "y holds nan; labels must be whole numbers"),
        (numpy.zeros((4, 5)), numpy.array([[0], [1], [0], [1]]), r"x has shape \(4, 5\) and y \(4, 1\); they must"),
        (numpy.zeros((4, 5)), numpy.array([0, 1, 0]), r"x has shape \(4, 5\) and y \(3,\); they must be"),
        (
            numpy.zeros((4, 5)),
            numpy.array([7, 900000] * 2),
            "2 different numbers from 7 to 900000; they must be 0, 1",
        ),
        (numpy.zeros((4, 5)), numpy.zeros(4), "1 different numbers from 0 to 0; .* at least 2"),
        (numpy.zeros((0, 5)), numpy.zeros(0), "y is empty"),
        (numpy.full((4, 5), numpy.nan), numpy.array([0, 1, 0, 1]), "inputs hold values that are not finite"),
    ],
)
def test_invalid_arrays_are_rejected(tmp_path: Path, x: numpy.ndarray, y: numpy.ndarray, message: str) -> None:
    numpy.savez(tmp_path / "own.npz", x=x, y=y)
    with pytest.raises(ValueError, match=message):
        data.load(str(tmp_path / "own.npz"))


def test_two_arrays_are_split_into_train_and_test(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "own.npz", x=numpy.zeros((20, 7)), y=numpy.arange(20) % 2)
    loaded = data.load(str(tmp_path / "own.npz"))
    assert (len(loaded.train), len(loaded.test), loaded.shape) == (16, 4, (7,))


def test_files_without_plain_arrays_are_rejected(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "names.npz", images=numpy.zeros(3))
    with pytest.raises(ValueError, match=r"holds \['images'\]; it must hold x and y"):
        data.load(str(tmp_path / "names.npz"))
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(ValueError, match="cannot be read as a NumPy file"):
        data.load(str(tmp_path / "junk.npz"))
    numpy.savez(tmp_path / "hostile.npz", x=numpy.array([{}]), y=numpy.zeros(1))
    with pytest.raises(ValueError, match="cannot be read as a NumPy file of plain arrays"):
        data.load(str(tmp_path / "hostile.npz"))


def save_and_load(path: Path, x: numpy.ndarray, **more: object) -> data.Dataset:
    numpy.savez(path / "own.npz", x=x, y=numpy.arange(len(x)) % 2, **more)
    return data.load(str(path / "own.npz"))


@pytest.mark.parametrize("given", [(12, 6, 6), (6, 6, 12)])
def test_equal_dimensions_are_height_and_width(tmp_path: Path, given: tuple[int, ...]) -> None:
    x = numpy.zeros((10, *given), dtype=numpy.uint8)
    assert save_and_load(tmp_path, x).shape == (12, 6, 6)


@pytest.mark.parametrize("given", [(12, 6, 7), (6, 12, 6), (8, 8, 8)])
def test_ambiguous_channel_dimensions_are_rejected(tmp_path: Path, given: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"own\.npz: x has shape .* whether channels come first or last is ambiguous"):
        save_and_load(tmp_path, numpy.zeros((10, *given), dtype=numpy.uint8))


@pytest.mark.parametrize(
    ("given", "read"),
    [((6, 7, 3), (3, 6, 7)), ((3, 6, 7), (3, 6, 7)), ((9, 2, 2), (9, 2, 2)), ((12, 6, 7), (12, 6, 7))],
)
def test_floating_point_images_may_have_channels_last(
    tmp_path: Path, given: tuple[int, ...], read: tuple[int, ...]
) -> None:
    assert save_and_load(tmp_path, numpy.zeros((10, *given))).shape == read


@pytest.mark.parametrize("dtype", ["int64", "uint16", "bool"])
def test_integer_images_must_be_uint8(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"own\.npz: x has dtype torch\.{dtype}; images must be uint8"):
        save_and_load(tmp_path, numpy.zeros((10, 1, 6, 6), dtype=dtype))
    assert save_and_load(tmp_path, numpy.ones((10, 6), dtype=dtype)).train.x.dtype == torch.float32


def test_other_arrays_are_ignored(tmp_path: Path) -> None:
    loaded = save_and_load(tmp_path, numpy.zeros((10, 6)), names=numpy.array(["cat", "dog"]))
    assert loaded.shape == (6,)
