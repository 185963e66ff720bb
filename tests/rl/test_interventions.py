"""What an intervention of a recipe does to an agent: the rule of FIRE's authors on Atari, and a new temperature."""

import copy
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from pliant.experiments.agent_run import make_agent_learner
from pliant.experiments.recipe import RecipeError, make_recipe
from pliant.experiments.recipe_files import find_recipe, load_recipe
from pliant.experiments.run_config import Part
from pliant.methods import FIRE, create
from pliant.rl.results import summarize
from tests.rl.helpers import DQN, SAC, small
from tests.rl.test_policies import Squares

gymnasium.register("Squares-v0", entry_point=Squares, max_episode_steps=20)
CONVOLUTIONS = "features_extractor.cnn.*"
LINEAR = ["features_extractor.linear.*", "q_net.*"]


def test_the_authors_rule_for_atari_is_in_the_recipe() -> None:
    """FIRE on the convolutions, linear layers to θ₀, moments kept, target from the online network.

    MinAtar's network is small, and its layers have the names of those of the Nature CNN.
    """
    recipe = load_recipe(find_recipe("p4_fig4a_asterix"))
    (entry,) = [entry for entry in recipe.methods if entry.label == "FIRE"]
    learner = make_agent_learner(
        small(
            model=Part("dqn", {**DQN.options, "policy": "MinAtarPolicy"}), data=Part("Squares-v0"), methods=parts(entry)
        )
    )
    (network,) = learner.methods.networks
    initial = {name: p.clone() for name, p in network.module.named_parameters()}
    learner.agent.learn(60, callback=learner.methods)
    before = {name: p.clone() for name, p in network.module.named_parameters()}
    moments = copy.deepcopy(network.optimizer.state_dict()["state"])
    reference = copy.deepcopy(network.module)
    FIRE(reference, optimizer_state="keep", where=lambda name, p: "cnn" in name).apply()
    fired = dict(reference.named_parameters())
    learner.methods.on_new_data()
    for name, parameter in network.module.named_parameters():
        assert not torch.equal(before[name], initial[name])
        assert torch.equal(parameter, fired[name] if ".cnn." in name else initial[name]), name
    assert not torch.equal(fired["features_extractor.cnn.0.weight"], before["features_extractor.cnn.0.weight"])
    for name, value in learner.agent.q_net_target.state_dict().items():
        assert torch.equal(value, learner.agent.q_net.state_dict()[name])
    for index, state in network.optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, moments[index][key])


def parts(entry: Any) -> tuple[Part, ...]:
    (variant,) = entry.variants()
    return tuple(variant)


def test_shrink_and_perturb_may_differ_between_layers() -> None:
    agent = make_squares()
    methods = [
        create("shrink_perturb", agent.q_net, lam=0.8, where=CONVOLUTIONS),
        create("shrink_perturb", agent.q_net, lam=1.0, where=LINEAR),
    ]
    initial = {name: p.clone() for name, p in agent.q_net.named_parameters()}
    with torch.no_grad():
        for parameter in agent.q_net.parameters():
            parameter.add_(1.0)
    for method in methods:
        method.apply()
    for name, parameter in agent.q_net.named_parameters():
        torch.testing.assert_close(parameter, initial[name] + (0.2 if ".cnn." in name else 0.0), rtol=1e-5, atol=1e-6)


def make_squares() -> Any:
    from pliant.rl.agents import make_agent

    return make_agent("dqn", {"policy": "MinAtarPolicy"}, Squares(), 0)


@pytest.mark.parametrize(
    ("where", "message"),
    [(3, "fire.where is 3"), ({"cnn": 1}, "fire.where is"), ([1], "fire.where is")],
)
def test_where_in_a_recipe_is_text(where: Any, message: str) -> None:
    values = {"data": "digits", "model": "mlp", "stream": "single", "methods": [{"name": "fire", "where": where}]}
    with pytest.raises(RecipeError, match=message):
        make_recipe(values)


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"where: the pattern 'head.\*' matches no parameter; there are features_ext"):
        create("l2", make_squares().q_net, where="head.*")


@pytest.mark.parametrize("resets", [True, False])
def test_a_stream_says_whether_the_temperature_is_reset(resets: bool) -> None:
    stream = Part(
        "intervention", {"steps": 60, "at": [30], "evaluate_every": 30, "episodes": 1, "reset_temperature": resets}
    )
    env = Part("Pendulum-v1", {"max_episode_steps": 15})
    learner = make_agent_learner(small(data=env, model=SAC, stream=stream, methods=(Part("full_reset"),)))
    learner.agent.learn(30, callback=learner.methods)
    before = learner.agent.log_ent_coef.item()
    assert before != 0
    learner.methods.on_new_data()
    assert learner.agent.log_ent_coef.item() == (0 if resets else before)


def test_results_of_a_run_do_not_depend_on_its_boundaries() -> None:
    def records(ends: tuple[int, ...]) -> list[dict[str, Any]]:
        ended = {"late_return": 0.0, "task_return": 0.0}
        each = [{"evaluation_return": float(i), "overestimation": -float(i)} for i in range(6)]
        return [record | (ended if i in ends else {}) for i, record in enumerate(each)]

    for ends in ((5,), (2, 5), (0, 1, 5)):
        found = summarize(records(ends))
        assert found["run_return"] == 2.5
        assert found["run_late_return"] == 4.5
        assert found["run_late_overestimation"] == -4.5


def test_the_paper_scale_recipes_ask_for_real_suites() -> None:
    names = {path.stem for path in Path(find_recipe("p4_fig4a_asterix")).parent.glob("p[24]_fig[45]*.toml")}
    of_agents = {name for name in names if load_recipe(find_recipe(name)).domain == "rl"}
    assert len(of_agents) == 8
