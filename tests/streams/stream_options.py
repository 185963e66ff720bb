"""Options of every stream, and helpers to look into tasks."""

from typing import Any

import torch

from pliant import streams
from pliant.data.dataset import Dataset, Examples
from pliant.data.text import cut_windows
from pliant.streams.stream import Stream, Task

N, TESTS, CLASSES = 120, 40, 10

OPTIONS: dict[str, dict[str, Any]] = {
    "single": {"epochs": 3},
    "warm_start": {"fraction": 0.25, "first_epochs": 7, "epochs": 5},
    "continual_full": {"chunks": 7, "epochs": 2},
    "continual_limited": {"chunks": 7, "epochs": 2},
    "class_incremental": {"phases": 4, "epochs": 2},
    "random_labels": {"tasks": 5, "epochs": 2},
    "pixel_permutation": {"tasks": 5, "epochs": 2},
    "label_flip": {"tasks": 5, "epochs": 2},
    "permuted_vocabulary": {"tasks": 5, "epochs": 2},
    "text_warm_start": {"first_epochs": 7, "epochs": 5, "share": 0.25},
    "text_cycle": {"tasks": 5, "epochs": 2, "probe": True},
    "binary_pairs": {"tasks": 8, "epochs": 2},
    "transfer": {"fraction": 0.3, "first_epochs": 7, "epochs": 5},
    "teacher_regression": {"tasks": 5, "epochs": 2},
    "slow_regression": {"tasks": 6, "epochs": 2, "slow": 5},
}


TEXT = ("permuted_vocabulary", "text_warm_start", "text_cycle")


def make(name: str, dataset: Dataset, seed: int = 0) -> Stream:
    if name == "slow_regression":
        dataset = dataset.project(8)  # It needs vectors.
    if name in TEXT:
        dataset = cut_windows("rows", ["".join(chr(97 + i * k % 26) for i in range(200)) for k in (3, 5, 7)], 12)
    return streams.create(name, dataset, seed, **OPTIONS[name])


def content(examples: Examples | None) -> tuple[torch.Tensor, ...]:
    return () if examples is None else examples.batch(torch.arange(len(examples)))


def rows_of(examples: Examples) -> set[int]:
    x = examples.x if examples.rows is None else examples.x[examples.rows]
    return set((x[:, 0, 0, 0].long() // 10 + x[:, 0, 2, 3].long() // 10 * 16).tolist())


def same(one: Task, other: Task) -> bool:
    pairs = zip(content(one.train) + content(one.test), content(other.train) + content(other.test), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
