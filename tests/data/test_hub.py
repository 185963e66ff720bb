"""Data sets from the hub."""

import gzip
import io
import itertools
import os
import socket
import struct
from pathlib import Path

import huggingface_hub.constants
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from pliant import data
from pliant.data import cache, hub
from tests.data.pictures import picture

SHARED_CACHE = os.environ["PLIANT_CACHE"]
pytestmark = pytest.mark.usefixtures("own_cache")


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def fill_hub_cache(root: Path, source: hub.HubSource, files: dict[str, bytes]) -> None:
    """Write files where the hub's client puts downloads."""
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
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "SHA256", {})  # The files of these tests are their own.
    return tmp_path / "hub"


def count_callers(server: socket.socket) -> int:
    """Count the connections that wait to be accepted."""
    for count in itertools.count():
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return count
    raise AssertionError


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

    def test_another_decoder_version_does_not_use_the_old_cache(
        self, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = hub.SOURCES["svhn"]
        content = parquet([png(picture(0, (32, 32)))], [0], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        data.load("svhn")
        monkeypatch.setattr(hub, "_DECODER", "another")
        hub.load_from_hub.cache_clear()
        data.load("svhn")
        assert len(cache.entries()) == 2

    def test_images_are_converted_to_the_declared_mode(self, hub_cache: Path) -> None:
        source = hub.SOURCES["cifar100"]
        gray = picture(0, (32, 32), "L")
        content = parquet([png(gray)], [0], source.image, source.label)
        fill_hub_cache(hub_cache, source, {source.train[0]: content, source.test[0]: content})
        x = data.load("cifar100").train.x
        assert torch.equal(x[0, 0], x[0, 2])
        assert torch.equal(x[0, 0], torch.from_numpy(numpy.array(gray)))

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
            (struct.pack(">HBBI", 0, 9, 1, 3) + b"abc", "is not an idx file of unsigned bytes: it starts with"),
            (struct.pack(">HBBI", 1, 8, 1, 3) + b"abc", "is not an idx file of unsigned bytes: it starts with"),
            (struct.pack(">HBBI", 0, 8, 1, 4) + b"abc", r"holds 3 bytes; its shape \(4,\) needs 4"),
        ],
        ids=["signed bytes", "no zeros", "too short"],
    )
    def test_invalid_idx_files_are_rejected(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "labels.gz").write_bytes(gzip.compress(content))
        with pytest.raises(ValueError, match=message):
            hub.read_idx(tmp_path / "labels.gz")

    def test_an_image_of_another_size_is_rejected(self, hub_cache: Path) -> None:
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

    def test_a_file_that_cannot_be_downloaded_is_named(self, hub_cache: Path) -> None:
        with pytest.raises(ConnectionError, match=r"train-00000-of-00001\.parquet of uoft-cs/cifar10 is not in"):
            data.load("cifar10")

    @pytest.mark.parametrize("offline", [False, True])
    def test_a_silent_hub_is_asked_once_and_never_offline(
        self, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
            monkeypatch.setattr(
                huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{revision}/{filename}"
            )
            monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
            monkeypatch.setattr(hub, "_SECONDS", 0.2)
            with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set" if offline else "timed out"):
                hub.download("uoft-cs/cifar10", "plain_text/train-00000-of-00001.parquet")
            assert count_callers(silent) == (0 if offline else 1)

    @pytest.mark.parametrize(
        ("name", "mean", "std"),
        [
            pytest.param("mnist", [0.1307], [0.3081], marks=pytest.mark.needs_data("mnist")),
            pytest.param(
                "cifar10",
                [0.4914, 0.4822, 0.4465],
                [0.2470, 0.2435, 0.2616],
                marks=pytest.mark.needs_data("cifar10"),
            ),
        ],
    )
    def test_mnist_and_cifar10_have_their_known_statistics(
        self, name: str, mean: list[float], std: list[float], request: pytest.FixtureRequest
    ) -> None:
        source = hub.SOURCES[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PLIANT_CACHE", SHARED_CACHE)  # Decoding is slow: use the shared cache.
            loaded = data.load(name)
            file = pyarrow.parquet.ParquetFile(hub.download(source.repo, source.train[0]))
        assert (len(loaded.train), len(loaded.test)) == ({"mnist": 60_000, "cifar10": 50_000}[name], 10_000)
        scale, shift = loaded.train.scale.flatten(), loaded.train.shift.flatten()
        assert (1 / scale / 255).tolist() == pytest.approx(std, abs=5e-5)
        assert (-shift / scale / 255).tolist() == pytest.approx(mean, abs=5e-5)
        # The cached images are equal to images decoded now.
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_batches([next(file.iter_batches(100))]), buffer)
        files = dict.fromkeys((source.train[0], source.test[0]), buffer.getvalue())
        fill_hub_cache(request.getfixturevalue("hub_cache"), source, files)
        hub.load_from_hub.cache_clear()
        now = data.load(name).train
        assert torch.equal(now.x, loaded.train.x[:100])
        assert torch.equal(now.y, loaded.train.y[:100])
