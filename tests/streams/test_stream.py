"""Properties of every stream: random access, seeds, no test examples in training, invalid options."""

from itertools import pairwise

import pytest
import torch

from pliant import streams
from pliant.data.dataset import Dataset, from_tensors
from tests.streams.stream_options import OPTIONS, TEXT, N, make, rows_of, same


def test_every_stream_of_data_has_options_above() -> None:
    of_data = [name for name in streams.names() if not streams.is_of_environments(name)]
    assert set(OPTIONS) == set(of_data)


@pytest.fixture(params=sorted(OPTIONS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


class TestAll:
    def test_tasks_have_random_access(self, name: str, dataset: Dataset) -> None:
        stream = make(name, dataset)
        one_after_the_other = list(stream)
        assert [task.index for task in one_after_the_other] == list(range(len(stream)))
        for index in reversed(range(len(stream))):
            assert same(make(name, dataset)[index], one_after_the_other[index])

    def test_tasks_depend_on_the_seed(self, name: str, dataset: Dataset) -> None:
        if name in ("single", "text_cycle"):
            assert same(make(name, dataset, 1)[0], make(name, dataset, 2)[0])
            return
        assert any(not same(a, b) for a, b in zip(make(name, dataset, 1), make(name, dataset, 2), strict=True))

    def test_consecutive_tasks_differ_as_declared(self, name: str, dataset: Dataset) -> None:
        tasks = list(make(name, dataset))
        for before, after in pairwise(tasks):
            unequal = len(before.train) != len(after.train) or not same(before, after)
            assert unequal
            assert after.changed
        assert tasks[0].changed == frozenset()

    # Behind permuted pixels, projected inputs and text, rows cannot be read off; the streams' own tests compare them.
    @pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"pixel_permutation", "slow_regression", *TEXT}))
    def test_training_sets_have_no_test_examples(self, name: str, dataset: Dataset) -> None:
        for task in make(name, dataset):
            assert max(rows_of(task.train)) < N
            if task.test is not None:
                assert min(rows_of(task.test)) >= N

    def test_workload_is_examples_times_epochs(self, name: str, dataset: Dataset) -> None:
        stream = make(name, dataset)
        assert stream.workload() == [len(task.train) * task.epochs for task in stream]

    def test_invalid_indices_and_epochs_are_rejected(self, name: str, dataset: Dataset) -> None:
        stream = make(name, dataset)
        with pytest.raises(IndexError, match=f"the stream has tasks 0 … {len(stream) - 1}"):
            stream[len(stream)]
        with pytest.raises(ValueError, match="epochs: 0 is not allowed; it must be an integer ≥ 1"):
            streams.create(name, dataset, epochs=0)


def test_unknown_streams_get_a_suggestion(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="did you mean 'warm_start'"):
        streams.create("warmstart", dataset)


def test_invalid_options_are_rejected(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="stream 'warm_start': there is no 'fractoin'; did you mean 'fraction'"):
        streams.create("warm_start", dataset, fractoin=0.5)
    with pytest.raises(ValueError, match=r"fraction: '0\.5' is not allowed; it must be a number"):
        streams.create("warm_start", dataset, fraction="0.5")
    with pytest.raises(ValueError, match="accumulate: 'no' is not allowed; it must be one of True, False"):
        streams.create("class_incremental", dataset, phases=2, accumulate="no")


def test_tasks_without_training_examples_are_rejected_and_tasks_without_test_examples_have_no_test() -> None:
    x, y = torch.zeros(6, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1, 1, 2, 2])
    untested = from_tensors("untested", (x, y), (x[:2], y[:2]))
    arriving = streams.create("class_incremental", untested, 0, phases=3, epochs=1)
    met = torch.cat(arriving.groups()).tolist()
    assert [task.test is not None for task in arriving] == [0 in met[: count + 1] for count in range(3)]
    pairs = streams.create("binary_pairs", untested, 0, tasks=8, epochs=1)
    assert [task.test is not None for task in pairs] == [0 in pairs.pair(index) for index in range(8)]
    lacking = from_tensors("lacking", (x[:4], y[:4]), (x, y))
    with pytest.raises(ValueError, match=r"task \d has no training examples"):
        streams.create("class_incremental", lacking, 0, phases=3, epochs=1, accumulate=False).workload()
