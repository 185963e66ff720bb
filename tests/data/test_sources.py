"""Data from the package, the hub, folders, files and functions; the cache between them."""

import gzip
import io
import multiprocessing
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from pliant import data
from pliant.data import cache, embedded, hub

SHARED_CACHE = os.environ["PLIANT_CACHE"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache: what this process has loaded, from here or for others, is forgotten on both sides."""
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    for remembered in (embedded.digits, hub.load_from_hub):
        remembered.cache_clear()
    yield tmp_path / "cache"
    for remembered in (embedded.digits, hub.load_from_hub):
        remembered.cache_clear()


def picture(seed: int, size: tuple[int, int] = (6, 6), mode: str = "RGB") -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_folder(root: Path, per_class: int = 5, mode: str = "RGB", **size: tuple[int, int]) -> Path:
    for label, name in enumerate(("cat", "dog", "owl")):
        (root / name).mkdir(parents=True)
        for i in range(per_class):
            picture(100 * label + i, mode=mode, **size).save(root / name / f"{i}.png")
    return root


def count_pairs(images: numpy.ndarray, labels: numpy.ndarray) -> Counter[tuple[bytes, int]]:
    return Counter((image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True))


class TestDigits:
    def test_sizes_and_split(self) -> None:
        loaded = data.load("digits")
        assert (len(loaded.train), len(loaded.test), loaded.shape) == (1437, 360, (1, 8, 8))
        assert set(loaded.test.y.tolist()) == set(range(10))

    def test_every_example_is_either_to_learn_from_or_to_be_tested_on(self) -> None:
        bunch, loaded = load_digits(), data.load("digits")
        images = (bunch.images * 255 / 16).round().astype(numpy.uint8)
        x = torch.cat([loaded.train.x, loaded.test.x]).numpy()
        y = torch.cat([loaded.train.y, loaded.test.y]).numpy()
        assert count_pairs(x, y) == count_pairs(images, bunch.target)

    def test_what_another_decoder_left_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data.load("digits")
        monkeypatch.setattr(embedded, "_DECODER", "another")
        embedded.digits.cache_clear()
        data.load("digits")
        assert len(cache.entries()) == 2

    def test_pixels_and_projection(self) -> None:
        index = torch.arange(1437)
        pixels, _ = data.load("digits", pixels="unit").train.batch(index)
        assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
        inputs, _ = data.load("digits", pixels="unit", project=5).train.batch(index)
        assert inputs.shape == (1437, 5)
        assert torch.equal(inputs, data.load("digits").in_unit_range().project(5).train.x)

    def test_first(self) -> None:
        assert len(data.load("digits", first=100).train) == 100


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def fill_hub_cache(root: Path, source: hub.HubSource, files: dict[str, bytes]) -> None:
    """Lay files out as the hub's client does after a download."""
    repo = root / f"datasets--{source.repo.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("1" * 40)
    for name, content in files.items():
        path = repo / "snapshots" / ("1" * 40) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def parquet(images: list[bytes], labels: list[int], image: str, label: str) -> bytes:
    column = [{"bytes": each, "path": None} for each in images]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({image: column, label: labels}), buffer)
    return buffer.getvalue()


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


class TestHub:
    @pytest.mark.parametrize("name", ["fashion_mnist", "cifar100", "svhn"])
    def test_parquet(self, name: str, hub_cache: Path) -> None:
        source = hub.SOURCES[name]
        size, mode = source.shape[1:], "L" if source.shape[0] == 1 else "RGB"
        pictures = [picture(i, size, mode) for i in range(6)]
        content = parquet([png(each) for each in pictures], [3, 1, 2, 0, 5, 4], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        loaded = data.load(name)
        expected = numpy.stack([numpy.asarray(each) for each in pictures])
        expected = expected[:, None] if mode == "L" else expected.transpose(0, 3, 1, 2)
        assert torch.equal(loaded.train.x, torch.from_numpy(expected))
        assert loaded.train.y.tolist() == [3, 1, 2, 0, 5, 4]
        assert len(loaded.classes) == len(source.class_names)

    def test_what_another_decoder_left_is_not_used(self, hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = hub.SOURCES["svhn"]
        content = parquet([png(picture(0, (32, 32)))], [0], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        data.load("svhn")
        monkeypatch.setattr(hub, "_DECODER", "another")
        hub.load_from_hub.cache_clear()
        data.load("svhn")
        assert len(cache.entries()) == 2

    def test_grey_images_become_the_mode_that_the_data_set_declares(self, hub_cache: Path) -> None:
        source = hub.SOURCES["cifar100"]
        grey = picture(0, (32, 32), "L")
        content = parquet([png(grey)], [0], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        x = data.load("cifar100").train.x
        assert torch.equal(x[0, 0], x[0, 2])
        assert torch.equal(x[0, 0], torch.from_numpy(numpy.array(grey)))

    def test_idx(self, hub_cache: Path) -> None:
        source = hub.SOURCES["emnist"]
        columns = torch.randint(256, (4, 28, 28), dtype=torch.uint8)
        images = gzip.compress(struct.pack(">HBBIII", 0, 8, 3, 4, 28, 28) + columns.numpy().tobytes())
        labels = gzip.compress(struct.pack(">HBBI", 0, 8, 1, 4) + bytes([46, 0, 3, 9]))
        fill_hub_cache(
            hub_cache,
            source,
            dict(zip((*source.train, *source.test), (images, labels) * 2, strict=True)),
        )
        loaded = data.load("emnist")
        assert torch.equal(loaded.train.x[:, 0], columns.transpose(1, 2))
        assert loaded.train.y.tolist() == [46, 0, 3, 9]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (struct.pack(">HBBI", 0, 9, 1, 3) + b"abc", "is no idx file of unsigned bytes: it starts with"),
            (struct.pack(">HBBI", 1, 8, 1, 3) + b"abc", "is no idx file of unsigned bytes: it starts with"),
            (struct.pack(">HBBI", 0, 8, 1, 4) + b"abc", r"holds 3 bytes; its shape \(4,\) asks for another number"),
        ],
        ids=["signed bytes", "no zeros", "too short"],
    )
    def test_wrong_idx_files_are_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "labels.gz").write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=message):
            hub.read_idx(tmp_path / "labels.gz")

    def test_an_image_of_another_size_is_named(self, hub_cache: Path) -> None:
        source = hub.SOURCES["svhn"]
        images = [png(picture(0, (32, 32))), png(picture(1, (32, 30)))]
        content = parquet(images, [0, 1], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        with pytest.raises(ValueError, match=r"row 1 of .* has shape \(3, 32, 30\); the others have \(3, 32, 32\)"):
            data.load("svhn")

    def test_a_corrupt_row_is_named(self, hub_cache: Path) -> None:
        source = hub.SOURCES["svhn"]
        images = [png(picture(0, (32, 32))), b"no image"]
        content = parquet(images, [0, 1], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        with pytest.raises(ValueError, match=r"row 1 of train-00000-of-00001\.parquet cannot be read"):
            data.load("svhn")

    def test_what_is_not_there_is_named(self, hub_cache: Path) -> None:
        with pytest.raises(ConnectionError, match=r"train-00000-of-00001\.parquet of uoft-cs/cifar10 is not in"):
            data.load("cifar10")

    @pytest.mark.parametrize(
        ("name", "mean", "std"),
        [("mnist", [0.1307], [0.3081]), ("cifar10", [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])],
    )
    def test_the_real_ones_have_their_well_known_statistics(
        self, name: str, mean: list[float], std: list[float], request: pytest.FixtureRequest
    ) -> None:
        source = hub.SOURCES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PLIANT_CACHE", SHARED_CACHE)  # Decoding takes a while: use what is there.
            loaded = data.load(name)
            file = pyarrow.parquet.ParquetFile(hub.download(source.repo, source.train[0]))
        assert (len(loaded.train), len(loaded.test)) == ({"mnist": 60_000, "cifar10": 50_000}[name], 10_000)
        scale, shift = loaded.train.scale.flatten(), loaded.train.shift.flatten()
        assert (1 / scale / 255).tolist() == pytest.approx(std, abs=5e-5)
        assert (-shift / scale / 255).tolist() == pytest.approx(mean, abs=5e-5)
        # What is there was decoded as it would be now.
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_batches([next(file.iter_batches(100))]), buffer)
        files = dict.fromkeys((source.train[0], source.test[0]), buffer.getvalue())
        fill_hub_cache(request.getfixturevalue("hub_cache"), source, files)
        hub.load_from_hub.cache_clear()
        now = data.load(name).train
        assert torch.equal(now.x, loaded.train.x[:100])
        assert torch.equal(now.y, loaded.train.y[:100])


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
    def test_all_grey_is_grey(self, tmp_path: Path, mode: str) -> None:
        assert data.load(str(write_folder(tmp_path / "zoo", mode=mode))).shape == (1, 6, 6)

    def test_one_colour_image_makes_it_colour(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo", mode="L")
        picture(7).save(root / "dog" / "colour.png")
        assert data.load(str(root)).shape == (3, 6, 6)

    def test_sixteen_bit_grey_is_scaled(self, tmp_path: Path) -> None:
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


class TestFiles:
    def test_npz_without_numpy_names_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        numpy.savez(tmp_path / "own.npz", x=numpy.ones((4, 2)), y=numpy.arange(4) % 2)
        monkeypatch.setitem(sys.modules, "numpy", None)
        with pytest.raises(ImportError, match=r"pip install 'pliant\[data\]'"):
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


def decode_slowly(marks: Path, together: Barrier) -> None:
    """Ask the cache for data together with another process, and leave a mark if it is decoded here."""
    x, y = torch.arange(2 * 3 * 6 * 6, dtype=torch.uint8).view(2, 3, 6, 6), torch.arange(2)

    def decode() -> cache.Decoded:
        (marks / str(os.getpid())).touch()
        time.sleep(1)  # The other one has seen by now that nothing is in the cache.
        return (x, y), (x, y), ("cat", "dog")

    together.wait()
    assert torch.equal(cache.cached("slow", "1", decode).train.x, x)


class TestCache:
    def test_images_are_mapped_not_read(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        loaded = data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        file = (entry / "train.x").read_bytes()
        assert loaded.train.x.numpy().tobytes() == file
        assert str(entry / "train.x") in Path("/proc/self/maps").read_text()

    def test_a_tensor_cannot_change_the_file(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root)).train.x.zero_()
        assert data.load(str(root)).train.x.max() > 0

    def test_damage_is_found(self, tmp_path: Path, own_cache: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        assert cache.check(entry) == []
        content = bytearray((entry / "test.x").read_bytes())
        content[5] ^= 1
        (entry / "test.x").write_bytes(content)
        (problem,) = cache.check(entry)
        assert "test.x: the content is not what was decoded" in problem
        (entry / "test.x").write_bytes(content[:-1])
        with pytest.raises(ValueError, match=r"test\.x has the wrong size; delete"):
            data.load(str(root))
        (entry / "test.x").unlink()
        assert cache.check(entry) == [problem]
        with pytest.raises(ValueError, match=r"test\.x has the wrong size; delete"):
            data.load(str(root))

    @pytest.mark.parametrize("content", ["", "[]", '{"classes": ["cat"]}', '{"sha256": {}, "shapes": {}}'])
    def test_a_list_of_files_that_is_damaged_is_found(self, tmp_path: Path, own_cache: Path, content: str) -> None:
        root = write_folder(tmp_path / "zoo")
        data.load(str(root))
        (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
        (entry / "meta.json").write_text(content)
        (problem,) = cache.check(entry)
        assert "meta.json: cannot be understood; delete" in problem
        with pytest.raises(ValueError, match=r"meta\.json: cannot be understood; delete"):
            data.load(str(root))

    def test_processes_that_start_together_decode_once(self, tmp_path: Path, own_cache: Path) -> None:
        marks = tmp_path / "marks"
        marks.mkdir()
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(2, timeout=300)
        processes = [context.Process(target=decode_slowly, args=(marks, together)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
        assert [process.exitcode for process in processes] == [0, 0]
        assert len(list(marks.iterdir())) == 1
        assert [path.suffix for path in own_cache.iterdir() if path.is_dir()] == [""]
