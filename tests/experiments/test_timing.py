"""The time of a run is extrapolated from a few steps; what methods add is measured in alternation."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from pliant.experiments import timing
from pliant.experiments.run import make_stream
from pliant.experiments.run_config import Part, RunConfig
from pliant.training import Settings
from tests.experiments.test_start import from_checkpoint, write_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return from_checkpoint(write_checkpoint(tmp_path), stream=Part("single", {"epochs": 5}))


def set_clock(monkeypatch: pytest.MonkeyPatch, durations: list[float]) -> None:
    """Let what is timed take these seconds, again and again."""
    ticks = itertools.chain.from_iterable((0.0, seconds) for seconds in itertools.cycle(durations))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))


def test_a_run_takes_the_time_of_its_examples(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(config)
    assert (len(stream[0].train), len(stream[0].test or ())) == (160, 360)
    set_clock(monkeypatch, [2.0, 1.0])  # eight batches of 16: to train on, to evaluate
    assert timing.time_run(config, stream) == pytest.approx(5 * (2 * 160 + 1 * 360) / 128)
    rarely = replace(config, training=Settings(batch_size=16, evaluate_every=2), old_data=Part("digits"))
    assert timing.time_run(rarely, stream) == pytest.approx((5 * 2 * 160 + 3 * 1 * (360 + 360)) / 128)


def test_methods_cost_what_their_steps_and_their_action_add(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(config)
    # First come three starts with and without the method, then first steps, then steps without and with it.
    durations = [4.0, 1.0, 80.0, 1.0, 4.0, 1.0, 9.0, 9.0, *[2.0, 3.0] * 5]
    set_clock(monkeypatch, durations)
    steps = 5 * 160 / 128
    treated = replace(config, methods=(Part("dash"),))
    assert timing.time_methods(treated, stream) == pytest.approx((3.0 * steps + 3.0) / (2.0 * steps))
