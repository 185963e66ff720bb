"""Folders of images: layout, classes, splits, formats, sizes and damaged files."""

import os
import struct
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image, ImageOps

from pliant import data
from pliant.data import image_folder
from tests.data.pictures import all_images, picture, write_folder

pytestmark = pytest.mark.usefixtures("own_cache")


def test_subfolders_are_classes_and_a_fifth_becomes_the_test_set(tmp_path: Path) -> None:
    loaded = data.load(str(write_folder(tmp_path / "zoo", per_class=10)))
    assert loaded.classes == ("cat", "dog", "owl")
    assert loaded.train.y.bincount().tolist() == [8, 8, 8]
    assert loaded.test.y.bincount().tolist() == [2, 2, 2]
    images = {bytes(each.numpy().tobytes()) for part in (loaded.train, loaded.test) for each in part.x}
    assert len(images) == 30


@pytest.mark.parametrize("name", ["test", "val", "valid", "validation"])
def test_a_test_folder_becomes_the_test_set(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "zoo" / "train", per_class=4)
    write_folder(tmp_path / "zoo" / name, per_class=3)
    loaded = data.load(str(tmp_path / "zoo"))
    assert (len(loaded.train), len(loaded.test)) == (12, 9)
    pixels = numpy.asarray(picture(100)).transpose(2, 0, 1)
    assert torch.equal(loaded.train.x[4], torch.from_numpy(pixels.copy()))


def test_training_examples_come_in_a_fixed_random_order(tmp_path: Path) -> None:
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


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
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


def test_floating_point_pixels_are_rejected(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo", mode="L")
    Image.new("F", (6, 6), 0.5).save(root / "cat" / "0.tif")
    with pytest.raises(ValueError, match=r"0\.tif has floating-point pixels; save it with 8 or 16 bits"):
        data.load(str(root), skip_corrupt=True)


def test_dead_links_count_as_corrupt_and_folders_named_like_images_are_skipped(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    (root / "cat" / "more.png").mkdir()
    assert len(data.load(str(root)).train) == 12
    (root / "cat" / "dead.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"dead\.png cannot be read: No such file"):
        data.load(str(root))
    assert len(data.load(str(root), skip_corrupt=True).train) == 12
    with pytest.raises(ValueError, match="skip_corrupt: 'no' is not allowed; it must be one of True, False"):
        data.load(str(root), skip_corrupt="no")


def test_too_few_examples_or_classes_are_rejected(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    (root / "yak").mkdir()
    picture(1).save(root / "yak" / "only.png")
    with pytest.raises(ValueError, match=r"zoo: class 'yak' has 1 example; a class must have at least 2"):
        data.load(str(root))
    (tmp_path / "one" / "yak").mkdir(parents=True)
    picture(1).save(tmp_path / "one" / "yak" / "only.png")
    with pytest.raises(ValueError, match=r"one has only one class, 'yak'"):
        data.load(str(tmp_path / "one"))


@pytest.mark.parametrize("size", [0, -1, 4.5, 5000, "big"])
def test_invalid_sizes_are_rejected(tmp_path: Path, size: object) -> None:
    with pytest.raises(ValueError, match=rf"size is {size!r}; it must be a whole number, 1 … 4096"):
        data.load(str(write_folder(tmp_path / "zoo")), size=size)


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_gray_images_give_one_channel(tmp_path: Path, mode: str) -> None:
    assert data.load(str(write_folder(tmp_path / "zoo", mode=mode))).shape == (1, 6, 6)


def test_one_color_image_gives_three_channels(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo", mode="L")
    picture(7).save(root / "dog" / "color.png")
    assert data.load(str(root)).shape == (3, 6, 6)


def test_16_bit_gray_is_scaled_to_8_bits(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo", mode="L")
    Image.fromarray(numpy.full((6, 6), 257 * 200, dtype=numpy.uint16)).save(root / "cat" / "0.png")
    loaded = data.load(str(root))
    assert any((image == 200).all() for part in (loaded.train, loaded.test) for image in part.x)


def test_images_of_different_sizes_need_the_size_option(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    picture(1, (9, 7)).save(root / "cat" / "wide.png")
    with pytest.raises(ValueError, match=r"differ in size: .* choose a common size \(size=32; "):
        data.load(str(root))
    assert data.load(str(root), size=5).shape == (3, 5, 5)


def test_resizing_crops_and_keeps_proportions(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    wide = Image.new("RGB", (30, 10), "red")
    wide.paste("white", (10, 0, 20, 10))
    wide.save(root / "cat" / "wide.png")
    loaded = data.load(str(root), size=10)
    assert any((image == 255).all() for part in (loaded.train, loaded.test) for image in part.x)


def test_corrupt_files_raise_unless_skip_corrupt_is_set(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    whole = (root / "owl" / "2.png").read_bytes()
    (root / "owl" / "2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"owl.2\.png cannot be read as an image"):
        data.load(str(root))
    loaded = data.load(str(root), skip_corrupt=True)
    assert len(loaded.train) + len(loaded.test) == 14


def test_empty_classes_are_rejected(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    (root / "yak").mkdir()
    (root / "yak" / "notes.txt").write_text("no images here")
    with pytest.raises(ValueError, match="class 'yak' is empty"):
        data.load(str(root))


def test_a_class_with_only_corrupt_files_is_empty(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    (root / "yak").mkdir()
    (root / "yak" / "0.png").write_bytes(b"")
    with pytest.raises(ValueError, match="class 'yak' is empty: none of its 1 files can be read"):
        data.load(str(root), skip_corrupt=True)


def test_wrong_layouts_are_rejected(tmp_path: Path) -> None:
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


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    before = data.load(str(root))
    for file in (root / "cat").iterdir():
        picture(999).save(file)
    after = data.load(str(root))
    assert not torch.equal(before.train.x, after.train.x)


def test_a_path_that_is_not_utf8_works(tmp_path: Path) -> None:
    root = write_folder(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")))
    assert len(data.load(str(root)).classes) == 3


@pytest.mark.parametrize("test", ["Test", "VAL", "Valid", "validation"])
def test_split_folders_are_found_in_any_case(tmp_path: Path, test: str) -> None:
    write_folder(tmp_path / "zoo" / "Train")
    write_folder(tmp_path / "zoo" / test, per_class=2)
    loaded = data.load(str(tmp_path / "zoo"))
    assert loaded.classes == ("cat", "dog", "owl")
    assert (len(loaded.train), len(loaded.test)) == (15, 6)


@pytest.mark.parametrize("names", [("training", "testing"), ("train_images", "Val"), ("trainset", "devset", "test")])
def test_folders_that_look_like_splits_are_rejected(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write_folder(tmp_path / "zoo" / name)
    listed = ", ".join(map(repr, sorted(names)))
    message = f"has the folders {listed}, which look like splits of one data set; rename them to 'train' and 'test'"
    with pytest.raises(ValueError, match=message):
        data.load(str(tmp_path / "zoo"))


def test_a_class_may_start_like_a_split(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    (root / "cat").rename(root / "trainer")
    assert data.load(str(root)).classes == ("dog", "owl", "trainer")


def test_linked_folders_are_read_and_link_loops_end(tmp_path: Path) -> None:
    root, elsewhere = write_folder(tmp_path / "zoo"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    picture(77).save(elsewhere / "more.png")
    (root / "cat" / "link").symlink_to(elsewhere)
    (root / "cat" / "loop").symlink_to(root / "cat")
    (elsewhere / "loop").symlink_to(elsewhere)
    (root / "cat" / "up").symlink_to(root)
    assert len(all_images(data.load(str(root)))) == 16


def test_hidden_files_are_skipped(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    (root / "cat" / ".thumbnails").mkdir()
    picture(77, (2, 2)).save(root / "cat" / ".thumbnails" / "0.png")
    (root / "cat" / "._0.png").write_bytes(b"what some systems leave beside a file")
    assert len(all_images(data.load(str(root)))) == 15


def test_malformed_exif_tags_are_ignored(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "zoo")
    picture(5).save(root / "cat" / "0.png", exif=b"Exif\0\0garbage")
    width = struct.pack("<HHII", 256, 2, 6, 38)  # a text, as some cameras write it
    tags = struct.pack("<H", 2) + width + struct.pack("<HHIHH", 274, 3, 1, 6, 0) + struct.pack("<I", 0)
    picture(6).save(root / "cat" / "1.png", exif=b"Exif\0\0II*\0" + struct.pack("<I", 8) + tags + b"\x006\0\0\0")
    assert len(all_images(data.load(str(root)))) == 15


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_rotated_as_pillow_does(tmp_path: Path, orientation: int) -> None:
    tag = Image.Exif()
    tag[274] = orientation
    photo = Image.fromarray(numpy.arange(48, dtype=numpy.uint8).reshape(6, 8))
    photo.save(tmp_path / "photo.png", exif=tag)
    with Image.open(tmp_path / "photo.png") as saved:
        expected = ImageOps.exif_transpose(saved)
        assert numpy.array_equal(numpy.asarray(image_folder._turn_upright(saved)), numpy.asarray(expected))
