"""Train an agent in a stream of environments, with records, evaluations and a state that can be saved.

The agent's own `learn()` trains it. A callback steps in between an update and the next rollout: there it evaluates the
agent, lets methods act at task boundaries, and allows saving whenever an episode has just begun. The seed of an episode
depends only on the run's seed and the step, so a resumed run is bit-equal to an uninterrupted one.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import gymnasium
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import nn

from pliant._seeding import derive_seed, random_state, set_random_state
from pliant.integrations._agents import Network
from pliant.integrations.stable_baselines3 import PliantCallback
from pliant.methods import Method
from pliant.rl.agents import agent_state, copy_networks, load_agent_state, prime, restart, rollout_steps
from pliant.rl.environments import SeededEpisodes, begin_task
from pliant.rl.evaluation import evaluate
from pliant.rl.results import summarize_task
from pliant.streams.environment_streams import EnvironmentStream
from pliant.training import DivergedError, Record

MEASURES = ("weight_l2", "spectral_norm_max", "dormant_fraction", "feature_rank")
"""What is measured of each network unless a recipe says otherwise; the norm of its gradient is always recorded."""


_POSITION = {"task": int, "epoch": int, "begun": bool, "primed": int, "pending": dict, "evaluations": list}
"""The attributes that say where an agent is in its stream, and their types."""


class AgentLearner:
    """An agent with its methods and its position in the stream: the content of a checkpoint.

    Args:
        agent: The agent.
        env: Its environment.
        test_envs: Environments to evaluate in, one an episode.
        stream: The tasks.
        make_methods: Makes the methods of one network from the network and an example input.
        measures: What to measure of each network; `MEASURES` if empty.
        seed: The seed of the run.
        make_fresh: Makes an untrained agent for a task; if given, each task starts from its networks.
    """

    def __init__(
        self,
        agent: BaseAlgorithm,
        env: SeededEpisodes,
        test_envs: Sequence[gymnasium.Env],
        stream: EnvironmentStream,
        make_methods: Callable[[nn.Module, Any], list[Method]],
        measures: Sequence[str],
        seed: int,
        make_fresh: Callable[[int], BaseAlgorithm] | None = None,
    ) -> None:
        self.agent: Any = agent
        self.env = env
        self.test_envs = test_envs
        self.stream = stream
        self.stages = stream.stages()
        self.starts = [0, *accumulate(stage.steps for stage in self.stages)]
        self.methods = PliantCallback(
            make_methods, measures=measures or MEASURES, reset_temperature=stream.reset_temperature
        )
        self.seed = seed
        self.make_fresh = make_fresh
        self.task = 0
        self.epoch = 0
        self.begun = False
        self.primed = 0
        self.pending: Record = {}
        self.evaluations: list[float] = []
        self._append: Callable[[Record], None] = lambda record: None
        self._save: Callable[[], None] = lambda: None
        self._until = len(self.stages)
        self._check_lengths()
        self.methods.init_callback(agent)  # Methods see the untrained networks.
        for network in self.methods.networks:
            network.optimizer.register_step_pre_hook(partial(self._note_gradient, network))

    @property
    def step(self) -> int:
        """The environment steps so far."""
        return self.env.steps

    @property
    def age(self) -> int:
        """Environment steps and updates so far: a number that grows while the agent is primed, too."""
        return self.env.steps + int(self.agent._n_updates)

    def run(self, append: Callable[[Record], None], save: Callable[[], None], tasks: int | None = None) -> None:
        """Train from the present position to the end of the stream.

        Args:
            append: Gets a record after each evaluation.
            save: Called whenever the state may be saved.
            tasks: Stop before this task begins; by default at the end of the stream.

        Raises:
            DivergedError: If a value of the agent is not finite.
        """
        self._append, self._save = append, save
        self._until = len(self.stages) if tasks is None else tasks
        callback = [self.methods, _BetweenRollouts(self)]
        try:
            while self.task < self._until:
                self._begin_task()
                steps = self._end_of_group() - self.env.steps
                self.agent.learn(steps, callback=callback, reset_num_timesteps=False, log_interval=None)
                self.pause()
        except _ReachedEnd:
            pass
        except (ValueError, RuntimeError) as error:  # Distributions refuse values that are not finite.
            parameters = (p for network in self.methods.networks for p in network.module.parameters())
            # A norm is not finite if an entry is not, or if its square overflows: outputs are infinite then.
            if all(p.norm().isfinite() for p in parameters):
                raise
            raise DivergedError(f"the agent's weights are not finite after {self.env.steps} steps") from error

    def pause(self) -> None:
        """Record, evaluate and begin the next task if it is time; then let the state be saved.

        Called between an update and the next rollout, and after the last update.
        """
        stage, done = self.stages[self.task], self.env.steps - self.starts[self.task]
        if done == min((self.epoch + 1) * self.stream.evaluate_every, stage.steps):
            while done == stage.steps and self.primed < stage.updates:
                self.primed = prime(self.agent, stage.updates, self.primed)
                self._save()  # The end of a task is the end of an episode too.
            self._record(is_last=done == stage.steps)
            if done == stage.steps:
                self.task, self.epoch, self.begun, self.primed, self.evaluations = self.task + 1, 0, False, 0, []
                if self.task == self._until:
                    raise _ReachedEnd
                if not self.stages[self.task].is_new:
                    self._begin_task()
        has_records = self.task > 0 or self.epoch > 0
        if self.begun and self.env.length == 0 and has_records:
            self._save()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, including the random generators'."""
        return {
            "agent": agent_state(self.agent),
            "methods": {name: method.state_dict() for name, method in self.methods.methods.items()},
            "position": {name: getattr(self, name) for name in _POSITION},
            "env": {"steps": self.env.steps, "returns": list(self.env.returns)},
            "rollout": self.methods.rollout,
            "random": random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict()`, of the same agent and stream; methods that it does not hold keep theirs.

        Raises:
            ValueError: If the state does not fit.
        """
        self._check_position(state["position"], state["env"])
        load_agent_state(self.agent, state["agent"])
        for name, saved in state["methods"].items():
            self.methods.methods[name].load_state_dict(saved)
        for name, value in state["position"].items():
            setattr(self, name, value)
        self.methods.rollout = state["rollout"]
        self.env.steps, self.env.returns = state["env"]["steps"], list(state["env"]["returns"])
        set_random_state(state["random"])
        if self.begun:
            for env in (self.env.env, *self.test_envs):
                begin_task(env, self.task)

    def _check_position(self, position: Mapping[str, Any], env: Mapping[str, Any]) -> None:
        """Raise a ValueError if no run can be at this position."""
        if {name: type(value) for name, value in position.items()} != _POSITION or type(env["steps"]) is not int:
            raise ValueError(f"the position after {env['steps']!r} steps is malformed")
        task, epoch = position["task"], position["epoch"]
        if not 0 <= task < len(self.stages):
            raise ValueError(f"task is {task}; the stream has tasks 0 … {len(self.stages) - 1}")
        done, stage, primed = env["steps"] - self.starts[task], self.stages[task], position["primed"]
        if not 0 <= primed <= stage.updates or (done == stage.steps) != (primed > 0):
            raise ValueError(f"{primed} of {stage.updates} updates of priming do not fit {env['steps']} steps")
        # The last evaluation of a task follows its priming.
        if not 0 <= done <= stage.steps or epoch != (done - (primed > 0)) // self.stream.evaluate_every:
            raise ValueError(f"task {task}, epoch {epoch} does not fit {env['steps']} steps")
        json.dumps(position, allow_nan=False)  # It becomes a line of the metrics.
        numbers = [*position["evaluations"], *env["returns"]]
        if len(position["evaluations"]) != epoch or not all(isinstance(value, float) for value in numbers):
            raise ValueError(f"the evaluations are {position['evaluations']!r} after {epoch} epochs")

    def _check_lengths(self) -> None:
        rollout = rollout_steps(self.agent)
        for name, steps in [
            ("evaluate_every", self.stream.evaluate_every),
            *(("a task's length", stage.steps) for stage in self.stages),
        ]:
            if steps % rollout:
                raise ValueError(f"stream: {name} is {steps}; it must be a multiple of the agent's rollouts, {rollout}")
        if isinstance(self.agent, OnPolicyAlgorithm):
            # A rollout must end with an episode, or it could not be resumed there.
            self.env.cuts |= set(range(0, self.starts[-1] + 1, self.stream.evaluate_every))
            if any(stage.updates for stage in self.stages):
                raise ValueError(f"stream: {type(self.agent).__name__} has no replay buffer that could prime it")

    def _end_of_group(self) -> int:
        """Return the step at which the replay buffer is cleared next, or the stream ends."""
        later = range(self.task + 1, len(self.stages))
        return self.starts[next((task for task in later if self.stages[task].is_new), len(self.stages))]

    def _begin_task(self) -> None:
        """Change the environment, clear the buffer and let methods act, unless a resumed run has done so."""
        if self.begun:
            return
        self.begun = True
        for env in (self.env.env, *self.test_envs):
            begin_task(env, self.task)
        self.pending = {"receipts": []}
        if self.task > 0:
            if self.make_fresh is not None:
                copy_networks(self.make_fresh(self.task), self.agent)
            else:
                self.methods.init_callback(self.agent)  # Attaches the methods; `learn()` detaches them.
                self.pending["receipts"] = [receipt.as_dict() for receipt in self.methods.on_new_data()]
            self.pending["entry_evaluation_return"] = self._evaluate()["evaluation_return"]
        if self.stages[self.task].is_new:
            restart(self.agent)
        self._measure()

    def _measure(self) -> None:
        """Measure the networks if there is data; the next update adds the norms of the gradients."""
        self.pending["measures"] = {}
        buffer = getattr(self.agent, "replay_buffer", None)
        if self.methods.rollout is None if buffer is None else buffer.size() == 0:
            return
        self.pending["measures"] = {self._key(name): _finite(value) for name, value in self.methods.measure().items()}

    def _note_gradient(self, network: Network, *_: Any) -> None:
        """Note the norm of a network's gradient at the first step of its optimizer after a measurement."""
        key = self._key(f"{network.name}/gradient_l2")
        measured = self.pending.get("measures")
        if not measured or key in measured:
            return
        gradients = [p.grad for p in network.module.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm() if gradients else torch.zeros(())
        measured[key] = _finite(float(norm))

    def _key(self, name: str) -> str:
        """Return the name of a measure in records; the network's name is left out if there is only one."""
        network, _, measure = name.rpartition("/")
        return measure if len(self.methods.networks) == 1 else f"{measure} ({network})"

    def _evaluate(self) -> Record:
        seeds = [
            derive_seed("evaluation", self.seed, self.env.steps, index) % 2**31 for index in range(len(self.test_envs))
        ]
        found = evaluate(self.agent, self.test_envs, seeds)
        if not math.isfinite(found.overestimation):
            raise DivergedError(f"the agent's values are not finite after {self.env.steps} steps")
        returns = found.returns
        return {"evaluation_return": math.fsum(returns) / len(returns), "overestimation": found.overestimation}

    def _record(self, *, is_last: bool) -> None:
        self.epoch += 1
        record: Record = {"task": self.task, "epoch": self.epoch, "step": self.env.steps, **self.pending}
        record["progress"] = self.env.steps / self.starts[-1]
        if self.env.returns:
            record["train_return"] = math.fsum(self.env.returns) / len(self.env.returns)
        record |= self._evaluate()
        self.evaluations.append(record["evaluation_return"])
        if is_last:
            record |= summarize_task(self.evaluations)
        self.env.returns = []
        self._append(record)
        self.pending = {"receipts": []}
        if not is_last:
            self._measure()


class _ReachedEnd(Exception):  # noqa: N818
    """The last task that was asked for is done."""


class _BetweenRollouts(BaseCallback):  # type: ignore[misc]
    def __init__(self, learner: AgentLearner) -> None:
        super().__init__()
        self.learner = learner

    def _on_rollout_start(self) -> None:
        self.learner.pause()

    def _on_step(self) -> bool:
        return True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
