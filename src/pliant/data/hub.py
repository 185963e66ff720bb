"""Data sets from the Hugging Face hub, downloaded and decoded once, then read offline."""

import functools
import gzip
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pliant._files import read_regular
from pliant._importing import naming_extra
from pliant.data.cache import Decoded, cached, digest_file
from pliant.data.dataset import Dataset
from pliant.data.images import Mode, decode_all, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

_DECODER = "1"
"""Part of the cache key. Increase it when decoding changes."""

_SECONDS = 5.0
"""How long to wait for an answer of the hub before using the local cache alone."""


@dataclass(frozen=True)
class HubSource:
    """A data set on the hub.

    Args:
        repo: The repository.
        train: Training files: one Parquet file, or idx files of images and of labels.
        test: Test files.
        shape: Channels, height and width of an image.
        classes: Class names, or the number of classes.
        summary: A one-line description.
        image: The image column of a Parquet file.
        label: The label column of a Parquet file.
        form: The file format.
    """

    repo: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    shape: tuple[int, int, int]
    classes: tuple[str, ...] | int
    summary: str
    image: str = "image"
    label: str = "label"
    form: Literal["parquet", "idx"] = "parquet"

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class, by index."""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes


def _parquet(repo: str, files: str, **rest: Any) -> HubSource:
    """Make the source whose training and test files differ only in the words "train" and "test"."""
    return HubSource(repo, (files.format("train"),), (files.format("test"),), **rest)


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")

SOURCES = {
    "mnist": _parquet(
        "ylecun/mnist",
        "mnist/{}-00000-of-00001.parquet",
        shape=(1, 28, 28),
        classes=10,
        summary="handwritten digits, 60 000 + 10 000, 28 x 28 gray",
    ),
    "fashion_mnist": _parquet(
        "zalando-datasets/fashion_mnist",
        "fashion_mnist/{}-00000-of-00001.parquet",
        shape=(1, 28, 28),
        classes=_FASHION,
        summary="articles of clothing, 60 000 + 10 000, 28 x 28 gray",
    ),
    "emnist": HubSource(
        "Heliosoph/EMNIST",
        train=("emnist-balanced-train-images-idx3-ubyte.gz", "emnist-balanced-train-labels-idx1-ubyte.gz"),
        test=("emnist-balanced-test-images-idx3-ubyte.gz", "emnist-balanced-test-labels-idx1-ubyte.gz"),
        shape=(1, 28, 28),
        classes=47,
        form="idx",
        summary="handwritten letters and digits, balanced, 112 800 + 18 800, 28 x 28 gray",
    ),
    "cifar10": _parquet(
        "uoft-cs/cifar10",
        "plain_text/{}-00000-of-00001.parquet",
        shape=(3, 32, 32),
        classes=_CIFAR10,
        image="img",
        summary="photographs of 10 classes, 50 000 + 10 000, 32 x 32 color",
    ),
    "cifar100": _parquet(
        "uoft-cs/cifar100",
        "cifar100/{}-00000-of-00001.parquet",
        shape=(3, 32, 32),
        classes=100,
        image="img",
        label="fine_label",
        summary="photographs of 100 classes, 50 000 + 10 000, 32 x 32 color",
    ),
    "svhn": _parquet(
        "ufldl-stanford/svhn",
        "cropped_digits/{}-00000-of-00001.parquet",
        shape=(3, 32, 32),
        classes=10,
        summary="house numbers, 73 257 + 26 032, 32 x 32 color",
    ),
    "tiny_imagenet": HubSource(
        "zh-plus/tiny-imagenet",
        train=("data/train-00000-of-00001-1359597a978bc4fa.parquet",),
        test=("data/valid-00000-of-00001-70d52db3c749a935.parquet",),
        shape=(3, 64, 64),
        classes=200,
        summary="photographs of 200 classes, 100 000 + 10 000, 64 x 64 color",
    ),
}


SHA256 = {
    "ylecun/mnist/mnist/train-00000-of-00001.parquet": (
        "beb1514598138db4dad53a62baec7ce3425fe879f2ba4f70f945e9cc3848493f"
    ),
    "ylecun/mnist/mnist/test-00000-of-00001.parquet": (
        "4d8393e95ef5caad0d151f8c83637d47c1d31e5e72ea367aef90212ef21b3aa9"
    ),
    "uoft-cs/cifar10/plain_text/train-00000-of-00001.parquet": (
        "311f1710b9026836a64bc9466d746b53741d3371b0eaf8ac486f9e02c42ee592"
    ),
    "uoft-cs/cifar10/plain_text/test-00000-of-00001.parquet": (
        "be46c2ffabe17c085c7f4eba1a866af9325e71b328dd1d01a7c4ba5a55f0a89f"
    ),
    "zh-plus/tiny-imagenet/data/train-00000-of-00001-1359597a978bc4fa.parquet": (
        "fc5a68eae9d3229d246c6f7ed494b863ad6603c2a11a3349287f39d4cf2ab1d6"
    ),
    "zh-plus/tiny-imagenet/data/valid-00000-of-00001-70d52db3c749a935.parquet": (
        "47580a8e3393353612a9887b72c71e4d24bc79131c86cc8667a0387df58f2b87"
    ),
}
"""The checksums of files that were seen, by repository and file. They fix the content, whatever the revision."""


@functools.cache
def load_from_hub(name: str) -> Dataset:
    """Load one of `SOURCES`; missing files are downloaded. The hub is asked once per process.

    Args:
        name: The key in `SOURCES`.

    Returns:
        The data set.
    """
    source = SOURCES[name]
    paths = [download(source.repo, file) for file in (*source.train, *source.test)]
    # The path of a downloaded file contains the revision, so a new revision is decoded again.
    fingerprint = "|".join([_DECODER, *(f"{path}:{path.stat().st_size}" for path in paths)])
    return cached(name, fingerprint, partial(_decode, source, paths))


def download(repo: str, file: str) -> Path:
    """Get one file of a data repository, from the hub's local cache if it is there.

    The hub is asked once, and must answer within seconds. With `HF_HUB_OFFLINE=1` it is not asked at all.
    """
    with naming_extra("getting data from the hub", "data"):
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline:
            # Asked by `hf_hub_download` alone, a hub that does not answer would be asked again for minutes.
            get_hf_file_metadata(hf_hub_url(repo, file, repo_type="dataset"), timeout=_SECONDS)
        reason = "HF_HUB_OFFLINE is set"
    except Exception as error:  # Whatever the client's HTTP library raises, which differs between its releases.
        offline, reason = True, str(error) or type(error).__name__
    try:
        # Checksums fix the content instead of a revision: see SHA256.
        found = hf_hub_download(  # nosec B615
            repo, file, repo_type="dataset", etag_timeout=_SECONDS, local_files_only=offline
        )
        return Path(found)
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"{file} of {repo} is not in the local cache and cannot be downloaded: {reason if offline else error}"
        ) from error


def _decode(source: HubSource, paths: list[Path]) -> Decoded:
    for file, path in zip((*source.train, *source.test), paths, strict=True):
        known = SHA256.get(f"{source.repo}/{file}")
        if known is not None and (found := digest_file(path)) != known:
            raise ValueError(
                f"{path} has the SHA-256 {found}, but {file} of {source.repo} is known to have {known}; it is damaged, "
                "or the hub's file has changed. Delete it to download it again"
            )
    read = _read_parquet if source.form == "parquet" else _read_idx
    half = len(source.train)
    return read(source, paths[:half]), read(source, paths[half:]), source.class_names


def _read_parquet(source: HubSource, paths: list[Path]) -> tuple[Tensor, Tensor]:
    with naming_extra("reading Parquet files", "data"):
        import pyarrow.parquet as parquet
    (path,) = paths
    table = parquet.ParquetFile(path)
    mode: Mode = "L" if source.shape[0] == 1 else "RGB"
    labels: list[int] = []

    def sources() -> Iterator[tuple[str, "partial[Image]"]]:
        # Batches keep only part of the encoded images in memory.
        for batch in table.iter_batches(columns=[source.image, source.label]):
            first = len(labels)
            labels.extend(batch.column(source.label).to_pylist())
            for place, image in enumerate(batch.column(source.image).to_pylist()):
                name = f"row {first + place} of {path.name}"
                yield name, partial(open_image, image["bytes"], name)

    images = decode_all(sources(), table.metadata.num_rows, source.shape, mode)
    return images, torch.tensor(labels, dtype=torch.int64)


def _read_idx(source: HubSource, paths: list[Path]) -> tuple[Tensor, Tensor]:
    images, labels = (read_idx(path) for path in paths)
    # NIST's files store images transposed.
    return images.transpose(1, 2).unsqueeze(1).contiguous(), labels.to(torch.int64)


def read_idx(path: Path) -> Tensor:
    """Read a file in MNIST's original idx format: a magic number, the shape, then bytes."""
    try:
        content = gzip.decompress(read_regular(path))
        zeros, kind, ndim = struct.unpack(">HBB", content[:4])
        if zeros != 0 or kind != 8:
            raise ValueError(f"it starts with {content[:4]!r}")
        shape = struct.unpack(f">{ndim}I", content[4 : 4 + 4 * ndim])
    except (ValueError, EOFError, OSError, zlib.error, struct.error) as error:
        raise ValueError(f"{path} is not an idx file of unsigned bytes: {error}") from error
    values = torch.frombuffer(bytearray(content[4 + 4 * ndim :]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} holds {values.numel()} bytes; its shape {shape} needs {torch.Size(shape).numel()}")
    return values.view(shape)
