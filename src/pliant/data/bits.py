"""A data set that is computed: random vectors of bits, for streams of functions of bits."""

import torch

from pliant._seeding import generator
from pliant._validation import require_positive
from pliant.data.dataset import Dataset, from_tensors


def load_bits(*, bits: int = 20, examples: int = 1000) -> Dataset:
    """Draw random vectors of zeros and ones, labeled by whether most entries are one.

    Args:
        bits: The length of a vector.
        examples: The number of training examples; there are a quarter as many test examples.

    Returns:
        The data set; the same for the same arguments.
    """
    require_positive(bits=bits, examples=examples)
    tests = max(examples // 4, 1)
    x = torch.randint(2, (examples + tests, bits), generator=generator("bits", bits, examples)).float()
    y = (x.mean(1) > 0.5).to(torch.int64)
    return from_tensors("bits", (x[:examples], y[:examples]), (x[examples:], y[examples:]), ("few ones", "many ones"))
