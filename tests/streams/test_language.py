"""Streams of text: new names of tokens, more text after the first, texts in turn."""

import math

import pytest
import torch

from pliant import models, streams
from pliant.data.dataset import Dataset, from_tensors
from pliant.data.text import cut_windows, decode
from pliant.training import Learner, Settings, direction, summarize, train

THREE = cut_windows("three", [letter * 200 + "xyz" * 20 for letter in "abc"], 5)


def test_permuted_vocabulary_renames_the_tokens() -> None:
    text = cut_windows("text", ["the quick brown fox jumps over the lazy dog, again and again"], 5)
    stream = streams.create("permuted_vocabulary", text, tasks=4)
    for task in stream:
        names = stream.permutation(task.index)
        assert torch.equal(names.sort().values, torch.arange(len(text.classes)))
        for moved, original in ((task.train, text.train), (task.test, text.test)):
            assert torch.equal(moved.x, names[original.x])
            assert torch.equal(moved.y, names[original.y])
            assert torch.equal(moved.x[:, 1:], moved.y[:, :-1])
    with pytest.raises(ValueError, match="permuted_vocabulary needs a text"):
        streams.create("permuted_vocabulary", IMAGES)


def letters(dataset: Dataset, examples: object) -> list[str]:
    """The first letter of every window that has no x, y or z."""
    windows = [decode(row, dataset) for row in examples.batch(torch.arange(len(examples)))[0]]
    return [window[0] for window in windows if not set(window) & set("xyz")]


def test_text_warm_start_adds_the_second_text_to_the_first() -> None:
    stream = streams.create("text_warm_start", THREE, seed=1, first_epochs=3, epochs=2)
    first, second = stream
    assert (first.epochs, second.epochs, set(first.changed), set(second.changed)) == (3, 2, set(), {"examples"})
    assert set(letters(THREE, first.train)) == {"a"}
    assert len(second.train) == 2 * len(first.train)
    assert set(letters(THREE, second.train)) == {"a", "b"}
    for task in stream:
        assert {name: len(examples) for name, examples in task.others.items()} == {"first": 5, "second": 5}
    assert torch.equal(first.test.y, second.others["first"].y)


def test_text_warm_start_keeps_a_share_of_the_first_text() -> None:
    counts = []
    for share in (0.0, 0.2, 0.5):
        task = streams.create("text_warm_start", THREE, share=share)[1]
        source = task.train.source
        counts.append((int((source == 0).sum()), int((source == 1).sum())))
    whole = counts[0][1]
    assert counts == [(0, whole), (round(whole / 4), whole), (whole, whole)]
    one, other = (streams.create("text_warm_start", THREE, seed, share=0.2)[1].train.rows for seed in (0, 1))
    assert not torch.equal(one, other)


def test_text_cycle_takes_turns_and_keeps_the_probe_out() -> None:
    stream = streams.create("text_cycle", THREE, tasks=5, probe=True)
    assert ["".join(sorted(set(letters(THREE, task.train)))) for task in stream] == list("ababa")
    for task in stream:
        assert int(task.others["probe"].source.unique()) == 2
        assert int(task.test.source.unique()) == task.index % 2
    assert ["".join(set(letters(THREE, task.train))) for task in streams.create("text_cycle", THREE, tasks=4)] == list(
        "abca"
    )


@pytest.mark.parametrize("vocabulary", [None, 280])
def test_losses_are_also_in_bits_per_character(vocabulary: int | None) -> None:
    texts = ["to be or not to be, that is the question; " * 40, "the quick brown fox jumps over the lazy dog. " * 40]
    dataset = cut_windows("two", texts, 8, vocabulary)
    stream = streams.create("text_warm_start", dataset, first_epochs=1, epochs=1)
    model = models.create("gpt", (8,), len(dataset.classes), depth=1, width=8, heads=2)
    last = list(train(Learner(model, Settings(batch_size=16)), stream, 0))[-1]
    for name, examples in (("test", stream[1].test), *((f"{n}_test", e) for n, e in stream[1].others.items())):
        characters = len("".join(decode(row, dataset) for row in examples.y))
        bits = last[f"{name}_loss"] / math.log(2) * examples.y.numel() / characters
        assert last[f"{name}_bits_per_character"] == pytest.approx(bits, rel=1e-12)
    result = summarize([last])
    assert result["final_second_test_bits_per_character"] == last["second_test_bits_per_character"]
    assert direction("final_test_bits_per_character") == -1
    assert (last["test_bits_per_character"] < last["test_loss"] / math.log(2)) == (vocabulary is not None)


def test_too_few_texts_are_refused() -> None:
    one = cut_windows("one", ["abc" * 30], 5)
    for name in ("text_warm_start", "text_cycle"):
        with pytest.raises(ValueError, match=f"data one: {name} needs 2 texts; give a folder of .txt files"):
            streams.create(name, one)
    with pytest.raises(ValueError, match="text_cycle needs 3 texts"):
        streams.create("text_cycle", cut_windows("two", ["abc" * 30] * 2, 5), probe=True)
    with pytest.raises(ValueError, match="share"):
        streams.create("text_warm_start", THREE, share=1.0)


_IMAGES = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
IMAGES = from_tensors("images", _IMAGES, _IMAGES)
