"""The table of the priming experiment is that of the kept runs, and the experiment runs in small."""

import pytest
from benchmarks.rl import priming


def test_the_page_shows_the_kept_runs() -> None:
    (shown,) = priming.BLOCK.findall(priming.PAGE.read_text())
    assert shown == priming.summarize(priming.load_runs())


def test_a_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priming, "STEPS", 400)
    agent = priming.start(seed=0)
    before = agent._n_updates
    priming.prime(agent, 200)
    assert agent._n_updates - before == 200
    record = priming.go_on(agent, "fire", seed=0)
    assert len(record["entries_changed"]) == 1
    assert record["entries_changed"][0] > 0
    assert record["returns"][-1][0] <= priming.FIRST + 400
