"""How large an experiment is beside the paper's: fractions of its steps and of its training data."""

import math
from functools import cache

import torch

from benchmarks.reproduction.kept import find_recipe
from pliant import streams
from pliant.data.dataset import Dataset, Examples
from pliant.experiments.recipe import Recipe

SIZES = {"mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}
"""Training images by data set, so that nothing is downloaded to count steps."""


def count_examples(recipe: Recipe) -> int:
    """Return the number of training examples."""
    return int(recipe.data.options.get("first") or SIZES[recipe.data.name])


def count_steps(recipe: Recipe) -> int:
    """Return the steps of a run, by its stream over blank images."""
    count = count_examples(recipe)
    labels = torch.arange(count) % 10
    blank = Examples(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), labels)
    dataset = Dataset("blank", blank, blank, tuple("0123456789"))
    stream = streams.create(recipe.stream.name, dataset, **recipe.stream.options)
    batch = recipe.training.batch_size
    return sum(task.epochs * math.ceil(len(task.train) / batch) for task in map(stream.__getitem__, range(len(stream))))


@cache
def show_scale(name: str) -> str:
    """Write the size of a kept experiment beside the paper's.

    Example:
        >>> show_scale("p0_table1_cifar10_cnn-quick"), show_scale("p0_table1_mnist")
        ('12 % steps, 10 % data', 'full')
    """
    stem, quick, _ = name.partition("-quick")
    if not quick:
        return "full"
    small, paper = find_recipe(name), find_recipe(stem)
    steps, data = count_steps(small) / count_steps(paper), count_examples(small) / count_examples(paper)
    narrow = ", narrower" if small.model != paper.model else ""
    return f"{percent(steps)} steps, {percent(data)} data{narrow}"


def percent(fraction: float) -> str:
    """Write a fraction in percent with two digits.

    Example:
        >>> percent(0.1201), percent(0.004)
        ('12 %', '0.4 %')
    """
    return f"{100 * fraction:.2g} %"
