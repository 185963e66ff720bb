"""What runs recorded on their way: the drop at a boundary stays, gaps stay gaps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pliant._json import seal, unseal
from pliant.experiments.journal import Journal, write_lines
from pliant.experiments.report.grouping import compare_folders
from pliant.experiments.report.histories import (
    MANY_TASKS,
    at_task_ends,
    average,
    gather,
    read_histories,
    read_history,
)
from pliant.experiments.store import load_run
from tests.experiments.report.stores import config, write_results, write_run


def test_entry_accuracy_is_placed_at_the_end_of_the_previous_task(tmp_path: Path) -> None:
    write_run(tmp_path, config("L2", 0), [0.8, 0.9], epochs=3, entries=[0.1])
    (comparison,) = compare_folders([tmp_path])
    histories = read_histories(comparison)
    samples = gather(histories.of["L2"], "test_accuracy", points=100)
    assert samples is not None
    curve = average(samples)
    assert curve.x.tolist() == [1, 2, 3, 3, 4, 5, 6]
    assert curve.epoch.tolist() == [1, 2, 3, 0, 1, 2, 3]
    assert curve.mean == pytest.approx([0.4, 0.4, 0.8, 0.1, 0.45, 0.45, 0.9])
    assert histories.boundaries == [3.0]
    assert histories.tasks == 2


@pytest.mark.parametrize("points", [10, 40, 10**6])
def test_thinning_keeps_both_ends_of_every_task(tmp_path: Path, points: int) -> None:
    ends = [0.5 + 0.01 * task for task in range(20)]
    write_run(tmp_path, config("L2", 0), ends, epochs=30, entries=[0.1] * 19)
    (comparison,) = compare_folders([tmp_path])
    samples = gather(read_histories(comparison).of["L2"], "test_accuracy", points=points)
    assert samples is not None
    kept = set(zip(samples.task.tolist(), samples.epoch.tolist(), strict=True))
    assert kept >= {(task, 30) for task in range(20)} | {(task, 0) for task in range(1, 20)}
    assert len(kept) <= max(points, 0) + 40


def test_with_many_tasks_only_the_ends_are_kept(tmp_path: Path) -> None:
    tasks = MANY_TASKS + 5
    write_run(tmp_path, config("L2", 0), [0.5] * tasks, epochs=3)
    (comparison,) = compare_folders([tmp_path])
    samples = gather(read_histories(comparison).of["L2"], "test_accuracy", points=10**6)
    assert samples is not None
    assert samples.epoch.tolist() == [3] * tasks


def rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    """Write other metrics of a run that ended."""
    content, end = write_lines(records)
    (path / "metrics.jsonl").write_bytes(content)
    (path / "result.json").write_bytes(seal(unseal((path / "result.json").read_bytes()) | {"metrics": end}))


def test_values_that_are_not_numbers_become_gaps(tmp_path: Path) -> None:
    path = write_run(tmp_path, config("L2", 0), [0.5, 0.6])
    records = Journal.read(path / "metrics.jsonl").records()
    for record, value in zip(records, [0.1, 0.2, None, "text"], strict=True):
        record["loss"] = value
    rewrite(path, records)
    run = load_run(path)
    assert run is not None
    np.testing.assert_array_equal(read_history(run).values["loss"], [0.1, 0.2, np.nan, np.nan])


def test_unfinished_runs_count_up_to_their_progress(tmp_path: Path) -> None:
    write_run(tmp_path, config("L2", 0), [0.5, 0.6, 0.7])
    write_run(tmp_path, config("L2", 1), [0.7, 0.8], status="unfinished")
    write_run(tmp_path, config("L2", 2), [0.9, 0.7, 0.7])
    (comparison,) = compare_folders([tmp_path])
    histories = read_histories(comparison).of["L2"]
    np.testing.assert_allclose(
        at_task_ends(histories, "test_accuracy"), [[0.5, 0.6, 0.7], [0.7, 0.8, np.nan], [0.9, 0.7, 0.7]]
    )
    samples = gather(histories, "test_accuracy", points=100)
    assert samples is not None
    curve = average(samples)
    assert curve.mean[-1] == pytest.approx(0.7)
    assert np.isnan(curve.low[-1])
    assert curve.low[1] == pytest.approx(0.7 - 4.3026527 * 0.2 / 3**0.5)


def test_an_unfinished_task_has_no_end(tmp_path: Path) -> None:
    path = write_run(tmp_path, config("L2", 0), [0.5, 0.6, 0.7], status="unfinished")
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:-1]))
    (comparison,) = compare_folders([tmp_path])
    ends = at_task_ends(read_histories(comparison).of["L2"], "test_accuracy")
    np.testing.assert_allclose(ends, [[0.5, 0.6, np.nan]])


def test_broken_metrics_are_reported_and_skipped(tmp_path: Path) -> None:
    write_results(tmp_path, {"vanilla": [0.5, 0.6]})
    (comparison,) = compare_folders([tmp_path])
    path = comparison.contenders[0].runs[0].path / "metrics.jsonl"
    path.write_text('{"task": 0, "epoch"\n' + path.read_text())
    histories = read_histories(comparison)
    assert [broken.path for broken in histories.broken] == [path]
    assert len(histories.of["vanilla"]) == 1


def test_measures_are_read_by_name_and_layer(tmp_path: Path) -> None:
    write_run(tmp_path, config("L2", 0), [0.5, 0.6], measures={"weight_growth": [1.0, 2.0], "weight_growth/0": [1, 3]})
    (comparison,) = compare_folders([tmp_path])
    histories = read_histories(comparison)
    assert histories.measures == ["weight_growth", "weight_growth/0"]
    assert "measures" not in histories.names
    samples = gather(histories.of["L2"], "weight_growth/0", points=9, measure=True)
    assert samples is not None
    np.testing.assert_array_equal(samples.values, [[1.0, 3.0]])


@pytest.mark.parametrize("entries", [None, [0.1]])
def test_measures_are_placed_at_the_start_of_their_epoch(tmp_path: Path, entries: list[float] | None) -> None:
    path = write_run(tmp_path, config("L2", 0), [0.5, 0.6], epochs=4, measures={"m": [0.9, 0.4]}, entries=entries)
    records = Journal.read(path / "metrics.jsonl").records()
    records[2]["measures"] = {"m": 0.7}
    rewrite(path, records)
    (comparison,) = compare_folders([tmp_path])
    histories = read_histories(comparison)
    samples = gather(histories.of["L2"], "m", points=9, measure=True)
    assert samples is not None
    assert (samples.x.tolist(), histories.boundaries) == ([0, 2, 4], [4.0])
    assert samples.values.tolist() == [[0.9, 0.7, 0.4]]
    np.testing.assert_allclose(at_task_ends(histories.of["L2"], "test_accuracy"), [[0.5, 0.6]])
