"""Data of one's own that could be taken for something else: it is read as it is meant, or refused."""

import struct
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps

from pliant import data
from pliant._names import keyword_options
from pliant.data import local
from pliant.experiments.recipe import make_recipe
from tests.data.pictures import picture, write_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))


def images_of(dataset: data.Dataset) -> list[torch.Tensor]:
    return [*dataset.train.x, *dataset.test.x]


def only_image(root: Path, image: Image.Image, name: str = "0.png", **options: object) -> torch.Tensor:
    """How an image is read that all four files of a folder hold."""
    for place in ("cat/0", "cat/1", "dog/0", "dog/1"):
        file = root / f"{place}{Path(name).suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    first, *others = images_of(data.load(str(root), **options))
    assert all(torch.equal(first, other) for other in others)
    return first


class TestFolders:
    @pytest.mark.parametrize("test", ["Test", "VAL", "Valid", "validation"])
    def test_parts_are_found_however_they_are_written(self, tmp_path: Path, test: str) -> None:
        write_folder(tmp_path / "zoo" / "Train")
        write_folder(tmp_path / "zoo" / test, per_class=2)
        loaded = data.load(str(tmp_path / "zoo"))
        assert loaded.classes == ("cat", "dog", "owl")
        assert (len(loaded.train), len(loaded.test)) == (15, 6)

    @pytest.mark.parametrize(
        "names", [("training", "testing"), ("train_images", "Val"), ("trainset", "devset", "test")]
    )
    def test_parts_are_not_taken_for_classes(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        for name in names:
            write_folder(tmp_path / "zoo" / name)
        listed = ", ".join(map(repr, sorted(names)))
        message = f"has the folders {listed}, which look like parts of one data set; call them 'train' and 'test'"
        with pytest.raises(ValueError, match=message):
            data.load(str(tmp_path / "zoo"))

    def test_classes_may_begin_like_parts(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        (root / "cat").rename(root / "trainer")
        assert data.load(str(root)).classes == ("dog", "owl", "trainer")

    def test_linked_folders_are_read_and_loops_end(self, tmp_path: Path) -> None:
        root, elsewhere = write_folder(tmp_path / "zoo"), tmp_path / "elsewhere"
        elsewhere.mkdir()
        picture(77).save(elsewhere / "more.png")
        (root / "cat" / "link").symlink_to(elsewhere)
        (root / "cat" / "loop").symlink_to(root / "cat")
        (elsewhere / "loop").symlink_to(elsewhere)
        (root / "cat" / "up").symlink_to(root)
        assert len(images_of(data.load(str(root)))) == 16

    def test_what_is_hidden_is_left_out(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        (root / "cat" / ".thumbnails").mkdir()
        picture(77, (2, 2)).save(root / "cat" / ".thumbnails" / "0.png")
        (root / "cat" / "._0.png").write_bytes(b"what some systems leave beside a file")
        assert len(images_of(data.load(str(root)))) == 15

    def test_a_name_means_the_data_set_and_a_folder_of_that_name_is_told_of(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert data.tell_namesake("digits") is None
        write_folder(tmp_path / "digits")
        assert len(data.load("digits").classes) == 10
        assert data.load("./digits").classes == ("cat", "dog", "owl")
        assert data.tell_namesake("digits").endswith("write './digits' for the folder that is here")
        assert data.tell_namesake("./digits") is None
        (tmp_path / "digits" / "recipe.json").touch()
        assert data.tell_namesake("digits") is None, "the folder of an experiment"

    def test_a_colon_in_a_path_makes_no_function_of_it(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "2026-11-16T10:00")
        assert data.load(str(root), size=5).shape == (3, 5, 5)
        assert data.options(str(root)) == data.options(str(write_folder(tmp_path / "zoo")))


class TestImages:
    @pytest.mark.parametrize("mode", ["P", "1"])
    def test_palettes_and_bits_are_resized_as_what_they_look_like(self, tmp_path: Path, mode: str) -> None:
        image = picture(0, (16, 16)).convert(mode)
        plain = image.convert("RGB" if mode == "P" else "L")
        assert torch.equal(only_image(tmp_path / mode, image, size=5), only_image(tmp_path / "plain", plain, size=5))

    @pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
    def test_what_is_transparent_is_white(self, tmp_path: Path, mode: str) -> None:
        drawing = Image.new("LA" if mode == "LA" else "RGBA", (8, 8), 0)  # Black, and all transparent.
        ImageDraw.Draw(drawing).rectangle((2, 2, 5, 5), fill=(0, 255) if mode == "LA" else (0, 0, 0, 255))
        read = only_image(tmp_path / mode, drawing.convert(mode))
        assert read.shape == ((1 if mode == "LA" else 3), 8, 8)
        expected = torch.full((8, 8), 255, dtype=torch.uint8)
        expected[2:6, 2:6] = 0
        assert all(torch.equal(channel, expected) for channel in read)

    @pytest.mark.parametrize("alpha", [0, 128, 255])
    def test_an_even_transparency_hides_nothing(self, tmp_path: Path, alpha: int) -> None:
        image = picture(3)
        read = only_image(tmp_path / "even", image.copy())
        image.putalpha(alpha)
        assert torch.equal(only_image(tmp_path / str(alpha), image), read)

    @pytest.mark.parametrize("size", [None, 4])
    def test_sixteen_bits_may_begin_with_either_end(self, tmp_path: Path, size: int | None) -> None:
        values = numpy.arange(64, dtype=numpy.uint16).reshape(8, 8) * 1000
        little = Image.frombytes("I;16", (8, 8), values.tobytes())
        big = Image.frombytes("I;16B", (8, 8), values.byteswap().tobytes())
        read = only_image(tmp_path / "big", big, "0.tif", size=size)
        assert torch.equal(read, only_image(tmp_path / "little", little, "0.tif", size=size))
        if size is None:
            assert torch.equal(read[0], torch.from_numpy((values // 257).astype(numpy.uint8)))

    def test_damage_beside_the_pixels_does_no_harm(self, tmp_path: Path) -> None:
        root = write_folder(tmp_path / "zoo")
        picture(5).save(root / "cat" / "0.png", exif=b"Exif\0\0garbage")
        width = struct.pack("<HHII", 256, 2, 6, 38)  # a text, as some cameras write it
        tags = struct.pack("<H", 2) + width + struct.pack("<HHIHH", 274, 3, 1, 6, 0) + struct.pack("<I", 0)
        picture(6).save(root / "cat" / "1.png", exif=b"Exif\0\0II*\0" + struct.pack("<I", 8) + tags + b"\x006\0\0\0")
        assert len(images_of(data.load(str(root)))) == 15

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_photos_are_turned_upright(self, tmp_path: Path, orientation: int) -> None:
        tag = Image.Exif()
        tag[274] = orientation
        photo = Image.fromarray(numpy.arange(48, dtype=numpy.uint8).reshape(6, 8))
        photo.save(tmp_path / "photo.png", exif=tag)
        with Image.open(tmp_path / "photo.png") as saved:
            expected = ImageOps.exif_transpose(saved)
            assert numpy.array_equal(numpy.asarray(local._turn_upright(saved)), numpy.asarray(expected))


class TestArrays:
    def load(self, path: Path, x: numpy.ndarray, **more: object) -> data.Dataset:
        numpy.savez(path / "own.npz", x=x, y=numpy.arange(len(x)) % 2, **more)
        return data.load(str(path / "own.npz"))

    @pytest.mark.parametrize("given", [(12, 6, 6), (6, 6, 12)])
    def test_many_channels_are_told_from_pixels(self, tmp_path: Path, given: tuple[int, ...]) -> None:
        x = numpy.zeros((10, *given), dtype=numpy.uint8)
        assert self.load(tmp_path, x).shape == (12, 6, 6)

    @pytest.mark.parametrize("given", [(12, 6, 7), (6, 12, 6), (8, 8, 8)])
    def test_what_may_be_channels_or_pixels_is_refused(self, tmp_path: Path, given: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"own\.npz: x has shape .* does not tell whether channels come first"):
            self.load(tmp_path, numpy.zeros((10, *given), dtype=numpy.uint8))

    @pytest.mark.parametrize(
        ("given", "read"),
        [((6, 7, 3), (3, 6, 7)), ((3, 6, 7), (3, 6, 7)), ((9, 2, 2), (9, 2, 2)), ((12, 6, 7), (12, 6, 7))],
    )
    def test_images_of_floating_point_may_have_their_channels_last(
        self, tmp_path: Path, given: tuple[int, ...], read: tuple[int, ...]
    ) -> None:
        assert self.load(tmp_path, numpy.zeros((10, *given))).shape == read

    @pytest.mark.parametrize("dtype", ["int64", "uint16", "bool"])
    def test_images_of_other_whole_numbers_are_refused(self, tmp_path: Path, dtype: str) -> None:
        with pytest.raises(ValueError, match=rf"own\.npz: x has dtype torch\.{dtype}; images must be uint8"):
            self.load(tmp_path, numpy.zeros((10, 1, 6, 6), dtype=dtype))
        assert self.load(tmp_path, numpy.ones((10, 6), dtype=dtype)).train.x.dtype == torch.float32

    def test_other_arrays_do_not_matter(self, tmp_path: Path) -> None:
        loaded = self.load(tmp_path, numpy.zeros((10, 6)), names=numpy.array(["cat", "dog"]))
        assert loaded.shape == (6,)


class TestFunctions:
    def write(self, path: Path, body: str, arguments: str = "") -> str:
        (path / "own.py").write_text(f"import numpy, torch\ndef load({arguments}):\n    {body}\n")
        return f"{path / 'own.py'}:load"

    def test_arrays_are_named(self, tmp_path: Path) -> None:
        name = self.write(tmp_path, "pair = numpy.zeros((4, 3)), numpy.arange(4) % 2; return pair, pair")
        with pytest.raises(ValueError, match=r"returned tuple; .* train inputs are ndarray; they must be a torch\.Ten"):
            data.load(name)

    def test_what_the_function_raises_is_named_with_its_place(self, tmp_path: Path) -> None:
        (tmp_path / "own.py").write_text("def load():\n    return {}['x']\n")
        with pytest.raises(ValueError, match=r"own\.py:load' fails: KeyError: 'x' \(.*own\.py, line 2\)"):
            data.load(f"{tmp_path / 'own.py'}:load")

    def test_one_class_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "own.py").write_text(
            "import torch\ndef load():\n    pair = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)\n"
            "    return pair, pair\n"
        )
        with pytest.raises(ValueError, match=r"own\.py:load returned data of 1 class; there must be 2 at least"):
            data.load(f"{tmp_path / 'own.py'}:load")

    def test_a_data_set_in_double_precision_becomes_single(self, tmp_path: Path) -> None:
        (tmp_path / "own.py").write_text(
            "import torch\nfrom pliant.data import from_tensors\ndef load():\n"
            "    pair = torch.ones(4, 2, dtype=torch.float64), torch.arange(4) % 2\n"
            "    return from_tensors('own', pair, pair)\n"
        )
        loaded = data.load(f"{tmp_path / 'own.py'}:load")
        assert loaded.train.x.dtype == loaded.test.x.dtype == torch.float32

    def test_double_precision_becomes_single(self, tmp_path: Path) -> None:
        name = self.write(tmp_path, "pair = torch.zeros(4, 3).double(), torch.arange(4) % 2; return pair, pair")
        assert data.load(name).train.x.dtype == torch.float32

    def test_what_load_takes_itself_is_refused(self, tmp_path: Path) -> None:
        assert set(local.RESERVED) == keyword_options(data.load).keys()
        for argument in local.RESERVED:
            name = self.write(tmp_path, "return 0", f"{argument}=5")
            with pytest.raises(ValueError, match=f"has an argument '{argument}', which pliant.data.load takes itself"):
                data.load(name)

    def test_what_is_no_function_and_what_returns_too_much_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "own.py").write_text("import torch\nDATA = torch.zeros(2), torch.zeros(2)\n")
        with pytest.raises(ValueError, match=r"own\.py:DATA is a tuple; it must be a function"):
            data.load(f"{tmp_path / 'own.py'}:DATA")
        name = self.write(tmp_path, "return [torch.zeros(2)] * 4")
        with pytest.raises(ValueError, match=r"\(x_test, y_test\) as tensors: too many values to unpack"):
            data.load(name)

    def test_what_it_draws_is_always_the_same_and_disturbs_nobody(self, tmp_path: Path) -> None:
        body = (
            "pair = torch.from_numpy(numpy.random.rand(4, 3)) + torch.rand(3), torch.arange(4) % 2; return pair, pair"
        )
        name, found = self.write(tmp_path, body), []
        for seed in (0, 1):
            torch.manual_seed(seed)
            numpy.random.seed(seed)
            expected = torch.Generator().manual_seed(seed)
            found.append(data.load(name).train.x)
            assert torch.rand(()) == torch.rand((), generator=expected)
        assert torch.equal(*found)

    def test_its_options_are_its_own(self, tmp_path: Path) -> None:
        name = self.write(tmp_path, "pair = torch.zeros(4, len(size)), torch.arange(4) % 2; return pair, pair", "size")
        values = {"data": {"name": name, "size": "big"}, "model": "mlp", "stream": "single", "methods": ["vanilla"]}
        assert make_recipe(values).data.options == {"size": "big"}
        assert data.load(name, size="big").shape == (3,)

    def test_the_fingerprint_is_of_the_content(self, tmp_path: Path) -> None:
        body = "pair = torch.full((4, 2), {}), torch.arange(4) % 2; return pair, pair"
        prints = [data.load(self.write(tmp_path, body.format(value))).fingerprint for value in ("0.0", "1.0", "1.0 ")]
        assert prints[0] != prints[1] == prints[2]
