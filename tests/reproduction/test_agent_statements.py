"""Statements about agents are judged by their returns and measures, and the cards show them."""

import pytest
from benchmarks.reproduction import agent_effects, statements
from benchmarks.reproduction.agent_effects import agent_block
from benchmarks.reproduction.forest import find_unit
from benchmarks.reproduction.kept import PRIMING, find_recipe, load_kept, load_priming
from benchmarks.reproduction.statements import find_margin, judge, load_statements, measure

from tests.reproduction.helpers import make_kept

INTERVENTION = "ours_rl_intervention"
OF_INTERVENTION = [one for one in load_statements() if one["recipe"] == INTERVENTION]


def test_archive_of_the_intervention_has_every_number_that_is_stated() -> None:
    """Each statement about an arm that ran is judged by all ten seeds."""
    kept = load_kept(INTERVENTION)
    ran = {label for label in kept.labels if kept.values(label, kept.headline)}
    judged = [measure(one) for one in OF_INTERVENTION if {one["higher"], one["lower"]} <= ran]
    assert len(judged) >= 15
    assert {len(one.samples) for one in judged} == {10}


def test_returns_and_measures_are_judged_in_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = (0.0, 4.0, -3.0, 1.0)
    values = {"vanilla": (120.0, 30.0), "FIRE": (220.0, 5.0), "Adam cleared": (121.0, 28.0)}
    numbers = {
        label: {
            seed: {"final_late_return": late + shift, "late_overestimation": over + shift / 2}
            for seed, shift in enumerate(noise if label != "Adam cleared" else noise[::-1])
        }
        for label, (late, over) in values.items()
    }
    monkeypatch.setattr(statements, "load_kept", lambda name: make_kept(numbers, "final_late_return"))
    chosen = [
        one
        for one in OF_INTERVENTION
        if {one.get("higher"), one.get("lower")} <= set(values)
        and one.get("number", "late_overestimation") == "late_overestimation"
    ]
    verdicts = {(one.statement["higher"], one.statement["lower"]): one.verdict for one in judge(chosen)}
    assert verdicts == {
        ("FIRE", "vanilla"): "supported",
        ("vanilla", "FIRE"): "supported",
        ("Adam cleared", "vanilla"): "equivalent",
        ("FIRE", "Adam cleared"): "supported",
    }
    plain = {"recipe": INTERVENTION, "higher": "FIRE", "lower": "vanilla"}
    assert find_margin(plain, None) is None, "half a point is no margin of a return"


def test_unit_of_a_return_is_the_return() -> None:
    assert find_unit({"recipe": PRIMING}) == "return"
    assert find_unit({"recipe": "", "number": "late_overestimation"}) == "return"
    assert find_unit({"recipe": "", "number": "late_spectral_norm_max"}) == "hundredths"


def test_kept_priming_has_the_arms_of_its_recipe() -> None:
    primed = load_priming()
    assert set(primed.labels) == {entry.label for entry in find_recipe(PRIMING).methods}
    assert {len(primed.values(label, primed.headline)) for label in primed.labels} == {10}


def test_card_shows_agents_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"vanilla": (100.0, 110.0, 90.0), "FIRE": (200.0, 205.0, 195.0), "S&P": (100.0, 108.0, 95.0)}
    numbers = {
        label: {seed: {"final_late_return": value} for seed, value in enumerate(values)}
        for label, values in late.items()
    }
    monkeypatch.setattr(
        agent_effects,
        "load_kept",
        lambda name: make_kept(numbers, "final_late_return") if name == INTERVENTION else None,
    )
    where = "| CartPole, intervention at the midpoint |"
    assert agent_block("fire").splitlines()[2:] == [f"{where} FIRE | 200 ± 12 | 100 ± 25 | +100 ± 12 | helps | 3 |"]
    assert agent_block("shrink_perturb").splitlines()[2:] == [
        f"{where} S&P | 101 ± 16 | 100 ± 25 | +1 ± 9 | no difference seen | 3 |"
    ]
    assert agent_block("swr") == ""
