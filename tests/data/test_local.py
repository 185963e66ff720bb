"""Folders of images, files and functions."""

import os
import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from pliant import data
from tests.data.pictures import picture, write_folder

pytestmark = pytest.mark.usefixtures("own_cache")


class TestFolder:
    def test_classes_are_folders_and_a_fifth_is_for_testing(self, tmp_path: Path) -> None:
        loaded = data.load(str(write_folder(tmp_path / "zoo", per_class=10)))
        assert loaded.classes == ("cat", "dog", "owl")
        assert loaded.train.y.bincount().tolist() == [8, 8, 8]
        assert loaded.test.y.bincount().tolist() == [2, 2, 2]
        images = {bytes(each.numpy().tobytes()) for part in (loaded.train, loaded.test) for each in part.x}
        assert len(images) == 30

    @pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
    def test_a_test_folder_is_used(self, tmp_path: Path, name: str) -> None:
        write_folder(tmp_path / "zoo" / "train", per_class=4)
        write_folder(tmp_path / "zoo" / name, per_class=3)
        loaded = data.load(str(tmp_path / "zoo"))
        assert (len(loaded.train), len(loaded.test)) == (12, 9)
        pixels = numpy.asarray(picture(100)).transpose(2, 0, 1)
        assert torch.equal(loaded.train.x[4], torch.from_numpy(pixels.copy()))

    def test_the_first_training_examples_are_of_all_classes_and_always_the_same(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo", per_class=20)
        some = data.load(str(root), first=24)
        assert set(some.train.y.tolist()) == {0, 1, 2}
        whole, again = data.load(str(root)), data.load(str(root))
        index = torch.arange(24)
        assert torch.equal(some.train.batch(index)[0], whole.train.batch(index)[0])
        assert torch.equal(again.train.batch(index)[0], whole.train.batch(index)[0])
        for label, name in enumerate(whole.classes):
            images = {numpy.asarray(Image.open(file)).tobytes() for file in (root / name).iterdir()}
            members = whole.train.rows[whole.train.y == label]
            assert all(whole.train.x[row].permute(1, 2, 0).numpy().tobytes() in images for row in members)

    def test_a_cameras_orientation_is_heeded(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo", size=(6, 4))
        exif = Image.Exif()
        exif[0x0112] = 6
        turned = picture(1, (4, 6))
        turned.save(root / "cat" / "turned.png", exif=exif)
        loaded = data.load(str(root))
        assert loaded.shape == (3, 6, 4)
        pixels = numpy.rot90(numpy.asarray(turned), -1).transpose(2, 0, 1)
        images = [*loaded.train.x, *loaded.test.x]
        assert any(torch.equal(image, torch.from_numpy(pixels.copy())) for image in images)

    def test_floating_point_pixels_are_refused(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo", mode="L")
        Image.new("F", (6, 6), 0.5).save(root / "cat" / "0.tif")
        with pytest.raises(ValueError, match=r"0\.tif has floating-point pixels; save it with 8 or 16 bits"):
            data.load(str(root), skip_corrupt=True)

    def test_dead_links_are_corrupt_and_folders_are_no_images(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        (root / "cat" / "more.png").mkdir()
        assert len(data.load(str(root)).train) == 12
        (root / "cat" / "dead.png").symlink_to(tmp_path / "nowhere.png")
        with pytest.raises(ValueError, match=r"dead\.png cannot be read: No such file"):
            data.load(str(root))
        assert len(data.load(str(root), skip_corrupt=True).train) == 12
        with pytest.raises(ValueError, match="skip_corrupt: 'no' is not allowed; it must be one of True, False"):
            data.load(str(root), skip_corrupt="no")

    def test_too_few_are_named(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        (root / "yak").mkdir()
        picture(1).save(root / "yak" / "only.png")
        with pytest.raises(ValueError, match=r"zoo: class 'yak' has 1 example; to test on some, it needs 2"):
            data.load(str(root))
        (tmp_path / "one" / "yak").mkdir(parents=True)
        picture(1).save(tmp_path / "one" / "yak" / "only.png")
        with pytest.raises(ValueError, match=r"one has one class alone, 'yak'"):
            data.load(str(tmp_path / "one"))

    @pytest.mark.parametrize("size", [0, -1, 4.5, 5000, "big"])
    def test_impossible_sizes_are_named(self, tmp_path: Path, size: object) -> None:
        with pytest.raises(ValueError, match=rf"size is {size!r}; it must be a whole number, 1 … 4096"):
            data.load(str(write_folder(tmp_path / "zoo")), size=size)

    @pytest.mark.parametrize("mode", ["L", "LA", "1"])
    def test_all_gray_is_gray(self, tmp_path: Path, mode: str) -> None:
        assert data.load(str(write_folder(tmp_path / "zoo", mode=mode))).shape == (1, 6, 6)

    def test_one_color_image_makes_it_color(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo", mode="L")
        picture(7).save(root / "dog" / "color.png")
        assert data.load(str(root)).shape == (3, 6, 6)

    def test_sixteen_bit_gray_is_scaled(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo", mode="L")
        Image.fromarray(numpy.full((6, 6), 257 * 200, dtype=numpy.uint16)).save(root / "cat" / "0.png")
        loaded = data.load(str(root))
        assert any((image == 200).all() for part in (loaded.train, loaded.test) for image in part.x)

    def test_odd_sizes_need_a_size(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        picture(1, (9, 7)).save(root / "cat" / "wide.png")
        with pytest.raises(ValueError, match=r"differ in size: .* say which size they shall have \(size=32; "):
            data.load(str(root))
        assert data.load(str(root), size=5).shape == (3, 5, 5)

    def test_a_wide_image_is_cropped_not_squeezed(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        wide = Image.new("RGB", (30, 10), "red")
        wide.paste("white", (10, 0, 20, 10))
        wide.save(root / "cat" / "wide.png")
        loaded = data.load(str(root), size=10)
        assert any((image == 255).all() for part in (loaded.train, loaded.test) for image in part.x)

    def test_corrupt_files_are_named_and_skipped_only_if_asked(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        whole = (root / "owl" / "2.png").read_bytes()
        (root / "owl" / "2.png").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"owl.2\.png cannot be read as an image"):
            data.load(str(root))
        loaded = data.load(str(root), skip_corrupt=True)
        assert len(loaded.train) + len(loaded.test) == 14

    def test_empty_classes_are_named(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        (root / "yak").mkdir()
        (root / "yak" / "notes.txt").write_text("no images here")
        with pytest.raises(ValueError, match="class 'yak' is empty"):
            data.load(str(root))

    def test_a_class_of_corrupt_files_alone_is_empty(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        (root / "yak").mkdir()
        (root / "yak" / "0.png").write_bytes(b"")
        with pytest.raises(ValueError, match="class 'yak' is empty: none of its 1 files can be read"):
            data.load(str(root), skip_corrupt=True)

    def test_wrong_layouts_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "nothing").mkdir()
        with pytest.raises(ValueError, match="has no folders"):
            data.load(str(tmp_path / "nothing"))
        write_folder(tmp_path / "half" / "train")
        with pytest.raises(ValueError, match="has a folder 'train' but none of test, val"):
            data.load(str(tmp_path / "half"))
        write_folder(tmp_path / "half" / "test")
        (tmp_path / "half" / "train" / "owl").rename(tmp_path / "half" / "train" / "bee")
        with pytest.raises(ValueError, match="has a class 'owl' that"):
            data.load(str(tmp_path / "half"))

    def test_a_changed_file_is_decoded_anew(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        before = data.load(str(root))
        for file in (root / "cat").iterdir():
            picture(999).save(file)
        after = data.load(str(root))
        assert not torch.equal(before.train.x, after.train.x)

    def test_a_name_that_is_no_utf8_is_read(self, tmp_path: Path) -> None:
        root = write_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
        assert len(data.load(str(root)).classes) == 3


class TestFiles:
    def test_npz_without_numpy_names_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        numpy.savez(tmp_path / "own.npz", x=numpy.ones((4, 2)), y=numpy.arange(4) % 2)
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(ImportError, match=r"pip install 'pliant\[data\]'"):
            data.load(str(tmp_path / "own.npz"))

    @pytest.mark.parametrize("place", [100, 200])
    def test_a_damaged_npz_is_named(self, tmp_path: Path, place: int) -> None:
        path = tmp_path / "own.npz"
        numpy.savez_compressed(path, x=numpy.random.default_rng(0).random((40, 5)), y=numpy.arange(40) % 2)
        content = bytearray(path.read_bytes())
        content[place : place + 30] = bytes(255 - value for value in content[place : place + 30])
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"own\.npz cannot be read as a NumPy file of plain arrays"):
            data.load(str(path))

    def test_npz_of_complex_numbers_is_refused(self, tmp_path: Path) -> None:
        numpy.savez(tmp_path / "own.npz", x=numpy.ones((4, 2), dtype=numpy.complex64), y=numpy.arange(4) % 2)
        with pytest.raises(ValueError, match=r"x has dtype torch\.complex64; inputs must be real"):
            data.load(str(tmp_path / "own.npz"))

    def test_npz_with_four_arrays(self, tmp_path: Path) -> None:
        x = numpy.random.default_rng(0).integers(0, 256, (12, 5, 4, 3), dtype=numpy.uint8)
        y = numpy.arange(12) % 3
        numpy.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
        loaded = data.load(str(tmp_path / "own.npz"))
        assert torch.equal(loaded.train.x, torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
        assert torch.equal(loaded.train.y, torch.from_numpy(y)[loaded.train.rows])
        assert (len(loaded.test), loaded.classes) == (6, ("0", "1", "2"))

    @pytest.mark.parametrize("channels", [1, 2, 3, 4])
    @pytest.mark.parametrize("last", [False, True])
    def test_npz_images_may_have_their_channels_last(self, tmp_path: Path, channels: int, last: bool) -> None:
        x = numpy.random.default_rng(0).integers(0, 256, (20, channels, 6, 8)).astype(numpy.uint8)
        given = x.transpose(0, 2, 3, 1) if last else x
        y = numpy.arange(20) % 2
        numpy.savez(tmp_path / "own.npz", x_train=given, y_train=y, x_test=given, y_test=y)
        loaded = data.load(str(tmp_path / "own.npz"))
        assert torch.equal(loaded.test.x, torch.from_numpy(x))

    def test_npz_of_two_types_is_refused(self, tmp_path: Path) -> None:
        x, y = numpy.zeros((20, 6, 8), dtype=numpy.uint8), numpy.arange(20) % 2
        numpy.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:, None] / 255.0, y_test=y)
        with pytest.raises(ValueError, match=r"train inputs are torch.uint8, test inputs torch.float32"):
            data.load(str(tmp_path / "own.npz"))

    def test_npz_sorted_by_class_is_shuffled(self, tmp_path: Path) -> None:
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
    def test_wrong_arrays_are_named(self, tmp_path: Path, x: numpy.ndarray, y: numpy.ndarray, message: str) -> None:
        numpy.savez(tmp_path / "own.npz", x=x, y=y)
        with pytest.raises(ValueError, match=message):
            data.load(str(tmp_path / "own.npz"))

    def test_npz_with_two_arrays(self, tmp_path: Path) -> None:
        numpy.savez(tmp_path / "own.npz", x=numpy.zeros((20, 7)), y=numpy.arange(20) % 2)
        loaded = data.load(str(tmp_path / "own.npz"))
        assert (len(loaded.train), len(loaded.test), loaded.shape) == (16, 4, (7,))

    def test_bad_files_are_named(self, tmp_path: Path) -> None:
        numpy.savez(tmp_path / "names.npz", images=numpy.zeros(3))
        with pytest.raises(ValueError, match=r"holds \['images'\]; it must hold x and y"):
            data.load(str(tmp_path / "names.npz"))
        (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 no zip")
        with pytest.raises(ValueError, match="cannot be read as a NumPy file"):
            data.load(str(tmp_path / "junk.npz"))
        numpy.savez(tmp_path / "hostile.npz", x=numpy.array([{}]), y=numpy.zeros(1))
        with pytest.raises(ValueError, match="cannot be read as a NumPy file of plain arrays"):
            data.load(str(tmp_path / "hostile.npz"))

    def test_functions(self, tmp_path: Path) -> None:
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
        with pytest.raises(
            ValueError, match=r"load cannot be called with \(m\): got an unexpected keyword argument 'm'"
        ):
            data.load(f"{tmp_path / 'own.py'}:load", m=6)
        with pytest.raises(ValueError, match="returned int; it must return"):
            data.load(f"{tmp_path / 'own.py'}:wrong")
        with pytest.raises(ValueError, match="has no 'lod'"):
            data.load(f"{tmp_path / 'own.py'}:lod")
        with pytest.raises(ValueError, match="there is no file"):
            data.load(f"{tmp_path / 'other.py'}:load")
        with pytest.raises(ValueError, match="there is no module 'nowhere'"):
            data.load("nowhere:load")

    def test_unknown_names_get_a_suggestion(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="did you mean 'cifar10'"):
            data.load("cifar-10")
        (tmp_path / "file.csv").touch()
        with pytest.raises(ValueError, match=r"is neither a folder nor an \.npz file"):
            data.load(str(tmp_path / "file.csv"))
        with pytest.raises(ValueError, match="there is no 'sise'; did you mean 'size'"):
            data.load(str(tmp_path), sise=3)
