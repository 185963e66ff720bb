"""Data sets of the Hugging Face hub: their files downloaded once, decoded once, offline from then on."""

import functools
import gzip
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from pliant.data.cache import Decoded, cached
from pliant.data.dataset import Dataset
from pliant.data.images import Mode, decode_all, open_image
from pliant.importing import naming_extra

if TYPE_CHECKING:
    from PIL.Image import Image

_DECODER = "1"
"""Changes whenever the same file is decoded in another way."""

_SECONDS = 5.0
"""How long to wait for an answer of the hub before using the local cache alone."""


@dataclass(frozen=True)
class HubSource:
    """Where a data set is on the hub, and what is in it.

    Args:
        repo: The repository.
        train: Its files to learn from: one of images with labels (Parquet), or images and labels (idx).
        test: Its files to be tested on.
        shape: Channels, height and width of an image.
        classes: Class names, or how many classes.
        image: The column of images.
        label: The column of labels.
        form: How the files are written.
        summary: One line on it.
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
        """Name of each class, by index."""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes


def _parquet(repo: str, files: str, **rest: Any) -> HubSource:
    """Describe a repository whose training and test files are named alike."""
    return HubSource(repo, (files.format("train"),), (files.format("test"),), **rest)


_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")

SOURCES = {
    "mnist": _parquet(
        "ylecun/mnist",
        "mnist/{}-00000-of-00001.parquet",
        shape=(1, 28, 28),
        classes=10,
        summary="handwritten digits, 60 000 + 10 000, 28 x 28 grey",
    ),
    "fashion_mnist": _parquet(
        "zalando-datasets/fashion_mnist",
        "fashion_mnist/{}-00000-of-00001.parquet",
        shape=(1, 28, 28),
        classes=_FASHION,
        summary="articles of clothing, 60 000 + 10 000, 28 x 28 grey",
    ),
    "emnist": HubSource(
        "Heliosoph/EMNIST",
        train=("emnist-balanced-train-images-idx3-ubyte.gz", "emnist-balanced-train-labels-idx1-ubyte.gz"),
        test=("emnist-balanced-test-images-idx3-ubyte.gz", "emnist-balanced-test-labels-idx1-ubyte.gz"),
        shape=(1, 28, 28),
        classes=47,
        form="idx",
        summary="handwritten letters and digits, balanced, 112 800 + 18 800, 28 x 28 grey",
    ),
    "cifar10": _parquet(
        "uoft-cs/cifar10",
        "plain_text/{}-00000-of-00001.parquet",
        shape=(3, 32, 32),
        classes=_CIFAR10,
        image="img",
        summary="photographs of 10 classes, 50 000 + 10 000, 32 x 32 colour",
    ),
    "cifar100": _parquet(
        "uoft-cs/cifar100",
        "cifar100/{}-00000-of-00001.parquet",
        shape=(3, 32, 32),
        classes=100,
        image="img",
        label="fine_label",
        summary="photographs of 100 classes, 50 000 + 10 000, 32 x 32 colour",
    ),
    "svhn": _parquet(
        "ufldl-stanford/svhn",
        "cropped_digits/{}-00000-of-00001.parquet",
        shape=(3, 32, 32),
        classes=10,
        summary="house numbers, 73 257 + 26 032, 32 x 32 colour",
    ),
    "tiny_imagenet": HubSource(
        "zh-plus/tiny-imagenet",
        train=("data/train-00000-of-00001-1359597a978bc4fa.parquet",),
        test=("data/valid-00000-of-00001-70d52db3c749a935.parquet",),
        shape=(3, 64, 64),
        classes=200,
        summary="photographs of 200 classes, 100 000 + 10 000, 64 x 64 colour",
    ),
}


@functools.cache
def load_from_hub(name: str) -> Dataset:
    """Load one of `SOURCES`, downloading what is not there yet; asks the hub once a process.

    Args:
        name: Its name.

    Returns:
        The data set.
    """
    source = SOURCES[name]
    paths = [download(source.repo, file) for file in (*source.train, *source.test)]
    # The folder of a downloaded file is named after the revision, so a new one is decoded anew.
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
        return Path(hf_hub_download(repo, file, repo_type="dataset", etag_timeout=_SECONDS, local_files_only=offline))
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"{file} of {repo} is not in the local cache and cannot be downloaded: {reason if offline else error}"
        ) from error


def _decode(source: HubSource, paths: list[Path]) -> Decoded:
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
        # In batches: the encoded images need not all be in memory at once.
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
    # NIST's files hold columns where rows are expected.
    return images.transpose(1, 2).unsqueeze(1).contiguous(), labels.to(torch.int64)


def read_idx(path: Path) -> Tensor:
    """Read a file in the format of the original MNIST: a magic number, the shape, then bytes."""
    content = gzip.decompress(path.read_bytes())
    zeros, kind, ndim = struct.unpack(">HBB", content[:4])
    if zeros != 0 or kind != 8:
        raise ValueError(f"{path} is no idx file of unsigned bytes: it starts with {content[:4]!r}")
    shape = struct.unpack(f">{ndim}I", content[4 : 4 + 4 * ndim])
    values = torch.frombuffer(bytearray(content[4 + 4 * ndim :]), dtype=torch.uint8)
    if values.numel() != torch.Size(shape).numel():
        raise ValueError(f"{path} holds {values.numel()} bytes; its shape {shape} asks for another number")
    return values.view(shape)
