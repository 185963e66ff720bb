"""A callback for agents of Stable-Baselines3 and sb3-contrib: DQN, QR-DQN, SAC, TQC, TD3, DDPG, PPO, A2C.

    model.learn(100_000, callback=PliantCallback(lambda network: [pliant.FIRE(network)], at=[50_000]))

The callback finds each network of the agent with its optimizer and its target network. Each critic of an ensemble is a
network of its own. After a reinitializer acts, the target network is copied from its network; the replay buffer stays.

An actor's loss runs through the critics. That pass must not count for methods that watch a critic's activations.
Critics with such methods are therefore frozen from their optimizer's step until their target network is called again.

`diagnose_agent` looks for signs of lost plasticity in each network of an agent.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._importing import naming_extra
from pliant._validation import check_positive_int
from pliant.diagnosis import Diagnosis, diagnose
from pliant.diagnostics import measure
from pliant.integrations._methods import attach_to_holders, check_times, load_states, name_methods, states_of
from pliant.methods import FeatureRankRegularization, Method, Receipt

with naming_extra("pliant.integrations.stable_baselines3", "sb3"):
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

    from pliant.integrations._agents import Network, estimate_values, find_networks
    from pliant.integrations._changed_agents import (
        ChangedPolicy,
        build_original_policy,
        rebuild,
        replace_policy,
        same_tensors,
    )

MEASURES = ("dormant_fraction", "feature_rank", "weight_l2")


__all__ = ["PliantCallback", "diagnose_agent"]


class PliantCallback(BaseCallback):  # type: ignore[misc]
    """Makes methods for each network of an agent, attaches them, and lets reinitializers act.

    Methods act only while `learn()` runs with this callback. Their state is saved by `model.save()` as part of the
    model. After `load()`, `learn()` with a callback that makes the same methods continues from it.

    Args:
        make: `make(network)` returns the methods of one network. If it takes two arguments, the second is an example
            input, for methods that need one: `lambda network, example: [pliant.ReDo(network, example)]`. It may also
            change the network (`pliant.LayerNormInsertion`): optimizer and target network are rebuilt, and `load()`
            builds the changed network.
        at: Environment steps at which reinitializers act: integers, or floats as fractions of the run. They act between
            an update and the next rollout, at the first opportunity from that step on.
        measure_every: Environment steps between measurements; they go to the agent's logger under `pliant/`.
        reset_temperature: Whether to reset the temperature of SAC or TQC and its optimizer when reinitializers act.
        measures: What to measure of each network; names of `pliant.diagnostics.measures.names()`.
        samples: How many observations to measure on.
        verbose: 1 prints the receipts of reinitializers.

    Attributes:
        methods: The methods by `network/name`, such as "critic.0/fire".
        receipts: The receipts of reinitializers, each with the environment step.
        rollout: Observations of the last rollout of an agent without a replay buffer, to measure on.
    """

    def __init__(
        self,
        make: Callable[..., Method | Iterable[Method]],
        at: Sequence[float] | float | None = None,
        measure_every: int | None = None,
        *,
        reset_temperature: bool = False,
        measures: Sequence[str] = MEASURES,
        samples: int = 256,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        self.make = make
        self.at = check_times(at, whole="environment steps", fraction="the run")
        self.measure_every = None if measure_every is None else check_positive_int("measure_every", measure_every)
        self.reset_temperature = reset_temperature
        self.measures = tuple(measures)
        self.samples = check_positive_int("samples", samples)
        self.methods: dict[str, Method] = {}
        self.receipts: list[tuple[int, Receipt]] = []
        self.rollout: Any = None
        self._networks: dict[str, Network] = {}
        self._made_for: Any = None
        self._acted_until = -1
        self._measured = 0
        self._values = _ValueErrors()
        self._guards: list[RemovableHandle] = []
        self._gradient_norms: dict[str, Tensor] = {}

    @property
    def networks(self) -> list[Network]:
        """The networks of the agent; empty before `learn()`."""
        return list(self._networks.values())

    def on_new_data(self, batches: Any = None, loss_fn: Any = None) -> list[Receipt]:
        """Let all reinitializers act now.

        Args:
            batches: The new data, for methods that look at it.
            loss_fn: The loss of an output and a target, for methods that look at gradients.

        Returns:
            What they did.
        """
        receipts = []
        for name, method in self.methods.items():
            if not method.acts_on_new_data:
                continue
            network = self._networks[name.partition("/")[0]]
            receipt = method.apply(network.optimizer, batches=batches, loss_fn=loss_fn)
            receipts.append(receipt)
            self.receipts.append((self.model.num_timesteps, receipt))
            self.logger.record(f"pliant/{name}/entries_changed", receipt.entries)
            if self.verbose:
                print(f"{name} at step {self.model.num_timesteps}: {receipt}")
            if network.target is not None:
                network.target.load_state_dict(network.module.state_dict())
        if receipts and self.reset_temperature:
            _reset_temperature(self.model)
        return receipts

    def _init_callback(self) -> None:
        if self._made_for is not self.model:
            self._make_methods()
        for method in self.methods.values():
            attach_to_holders(method, self._optimizers())
        self._guard_critics()
        if self.measure_every is not None:
            self._watch_gradients()

    def _make_methods(self) -> None:
        model: Any = self.model
        saved = getattr(model, "pliant_state", None)
        if isinstance(saved, SavedState) and saved.callback is not None:
            saved.callback._detach()
        changed_again = isinstance(model.policy_class, ChangedPolicy) and self._change_again()
        if not changed_again and self._call_make():
            model.policy_class = ChangedPolicy(model.policy)
        self._networks = {network.name: network for network in find_networks(model)}
        self._acted_until = model.num_timesteps - 1
        if isinstance(saved, SavedState):
            state = saved.read()
            load_states(self.methods, state["methods"])
            self._acted_until = state["acted_until"]
        model.pliant_state = SavedState(self)
        self._made_for = model

    def _call_make(self) -> bool:
        """Make the methods of each network, rebuild what its changed layers need, and say whether any were changed."""
        self.methods = {}
        changed = False
        for network in find_networks(self.model):
            before = list(network.module.parameters())
            arguments = (network.module, network.example)[: _count_arguments(self.make)]
            made = name_methods(self.make(*arguments), f"{network.name}/")
            _refuse_own_times(made)
            self.methods |= made
            if not same_tensors(before, list(network.module.parameters())):
                rebuild(network, before)
                changed = True
        return changed

    def _change_again(self) -> bool:
        """Let `make` change the original layers of an agent whose layers were changed before; say whether it did."""
        model: Any = self.model
        policy, parameters = model.policy, model.get_parameters()
        with torch.random.fork_rng():  # all that is drawn here is loaded over
            replace_policy(model, build_original_policy(policy))
            if not self._call_make():
                replace_policy(model, policy)
                return False
        try:
            model.set_parameters(parameters, exact_match=True, device=model.device)
        except (RuntimeError, ValueError) as error:
            replace_policy(model, policy)
            raise ValueError(
                "make: it changes the layers of the agent in another way than in the saved agent; make the same "
                f"changes, or none ({str(error).partition(chr(10))[0]})"
            ) from error
        return True

    def _optimizers(self) -> list[Optimizer]:
        return list({id(network.owner): network.optimizer for network in self._networks.values()}.values())

    def _on_training_start(self) -> None:
        if self.model.num_timesteps == 0:
            self._acted_until = -1
        self._measured = self.model.num_timesteps
        self._values.start(self.training_env.num_envs, fresh=self.model.num_timesteps == 0)

    def _on_rollout_start(self) -> None:
        self._freeze_critics(False)
        now, total = self.model.num_timesteps, self.model._total_timesteps
        times = [time if isinstance(time, int) else math.ceil(time * total) for time in self.at]
        due = [time for time in times if self._acted_until < time <= now]
        self._acted_until = max(now, self._acted_until)
        if due:
            self.on_new_data()

    def _on_step(self) -> bool:
        if self.measure_every is not None:
            self._values.add(self.model, self.locals)
        return True

    def _on_rollout_end(self) -> None:
        every, now = self.measure_every, self.model.num_timesteps
        if isinstance(self.model, OnPolicyAlgorithm):
            self.rollout, _ = _recent_batch(self.model, self.samples)
        if every is not None and now // every > self._measured // every:
            self._measured = now
            self._log_measures()

    def _on_training_end(self) -> None:
        self._detach()

    def _detach(self) -> None:
        for method in self.methods.values():
            method.detach()
        for guard in self._guards:
            guard.remove()
        self._guards = []
        self._freeze_critics(False)

    def measure(self) -> dict[str, float]:
        """Measure each network now, on recent transitions; return the values by `network/measure`."""
        observations, actions = self.rollout, None
        if observations is None:
            with _numpy_generator_kept():
                observations, actions = _recent_batch(self.model, self.samples)
        values: dict[str, float] = {}
        for network in self._networks.values():
            with torch.no_grad():
                inputs = network.input_of(observations, actions)
            data = inputs[0] if isinstance(inputs[0], Tensor) else None  # a dictionary would be keyword arguments
            found = measure(network.module, data, measures=self.measures).values
            values |= {f"{network.name}/{name}": found[name] for name in self.measures if name in found}
        return values

    def _log_measures(self) -> None:
        values = self.measure()
        values |= {f"{name}/gradient_l2": float(norm) for name, norm in self._gradient_norms.items()}
        if (error := self._values.mean()) is not None:
            values["overestimation"] = error
        for name, value in values.items():
            self.logger.record(f"pliant/{name}", value)

    def _watch_gradients(self) -> None:
        """Note the norm of each network's gradient when its optimizer steps: an actor's loss adds to it afterwards."""

        def note(network: Network) -> None:
            gradients = [p.grad for p in network.module.parameters() if p.grad is not None]
            if gradients:
                self._gradient_norms[network.name] = torch.stack(torch._foreach_norm(gradients)).norm()

        for network in self._networks.values():
            hook = network.optimizer.register_step_pre_hook(lambda *_, network=network: note(network))
            self._guards.append(hook)

    def _guard_critics(self) -> None:
        """Freeze critics while the actor's loss runs through them, if a method watches their activations."""
        model: Any = self.model
        if watched := [] if self._guards else self._watched_critics():
            self._guards = [
                watched[0].optimizer.register_step_post_hook(lambda *_: self._freeze_critics(True)),
                model.critic_target.register_forward_pre_hook(lambda *_: self._freeze_critics(False)),
            ]

    def _watched_critics(self) -> list[Network]:
        critics = [each for each in self._networks.values() if each.name.startswith("critic.") and each.target]
        return [each for each in critics if _watches(self.methods, each.name)]

    def _freeze_critics(self, frozen: bool) -> None:
        for network in self._watched_critics():
            network.module.requires_grad_(not frozen)


def diagnose_agent(model: Any, *, measures: Sequence[str] | None = None, samples: int = 256) -> dict[str, Diagnosis]:
    """Diagnose each network of an agent on transitions that the agent has seen; the agent is left as it was.

    There is no trial, since an agent's data depends on the agent: what decides is whether a reset helps.

    Args:
        model: An agent of Stable-Baselines3 or sb3-contrib. A loaded agent needs `load_replay_buffer()` first.
        measures: Names from `pliant.diagnostics.measures.names()`; by default the affordable ones.
        samples: How many transitions to measure on.

    Returns:
        The diagnosis of each network by name; twin critics are "critic.0" and "critic.1".

    Raises:
        ValueError: If the agent has no transitions.
    """
    check_positive_int("samples", samples)
    with _numpy_generator_kept():
        observations, actions = _recent_batch(model, samples)
    found = {}
    for network in find_networks(model):
        with torch.no_grad():
            inputs = network.input_of(observations, actions)
        data = inputs[0] if isinstance(inputs[0], Tensor) else None  # a dictionary would be keyword arguments
        found[network.name] = diagnose(network.module, data, trial=False, measures=measures, samples=samples)
    return found


class SavedState:
    """What `model.save()` writes of a callback.

    Args:
        callback: The callback.
    """

    def __init__(self, callback: PliantCallback) -> None:
        self.callback: PliantCallback | None = callback
        self.state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Return the callback's state, or the loaded state if there is no callback."""
        if self.callback is None:
            return self.state
        return {"methods": states_of(self.callback.methods), "acted_until": self.callback._acted_until}

    def __getstate__(self) -> dict[str, Any]:
        return self.read()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.callback, self.state = None, state


class _ValueErrors:
    """Compares the value of each episode's first step with the discounted return of the episode.

    An episode that was truncated continues with the value of its last observation.
    """

    def __init__(self) -> None:
        self._errors: list[float] = []

    def start(self, envs: int, *, fresh: bool) -> None:
        """Begin with the next episode of each environment; with the present one if it is fresh."""
        self._errors = []
        self._first = np.full(envs, fresh)
        self._estimates = np.full(envs, np.nan)
        self._returns = np.zeros(envs)
        self._discounts = np.ones(envs)

    def add(self, model: Any, step: Mapping[str, Any]) -> None:
        """Add one step of all environments."""
        if self._first.any():
            values = estimate_values(model, model._last_obs, step.get("buffer_actions"))
            self._estimates[self._first] = values[self._first]
            self._returns[self._first], self._discounts[self._first] = 0.0, 1.0
        self._returns += self._discounts * step["rewards"]
        self._discounts *= model.gamma
        self._first = np.asarray(step["dones"], dtype=bool)
        for index in self._first.nonzero()[0]:
            returned, info = self._returns[index], step["infos"][index]
            if info.get("TimeLimit.truncated", False):
                last = info["terminal_observation"]
                batch = {k: v[None] for k, v in last.items()} if isinstance(last, dict) else last[None]
                returned += self._discounts[index] * estimate_values(model, batch, None)[0]
            if not np.isnan(self._estimates[index]):
                self._errors.append(float(self._estimates[index] - returned))

    def mean(self) -> float | None:
        """Return the mean of estimate − return over the episodes since the last call, or None without any."""
        errors, self._errors = self._errors, []
        return float(np.mean(errors)) if errors else None


def _recent_batch(model: Any, samples: int) -> tuple[Any, Tensor | None]:
    """Return observations and actions of the replay buffer, or observations of the last rollout.

    Raises:
        ValueError: If the agent has no transitions.
    """
    on_policy = isinstance(model, OnPolicyAlgorithm)
    buffer = model.rollout_buffer if on_policy else model.replay_buffer
    # An agent empties its rollout buffer when the next rollout starts.
    if buffer is None or not (buffer.full if on_policy else buffer.size()):
        raise ValueError("model: it has no transitions; call learn(), or load_replay_buffer() if it was loaded")
    if not on_policy:
        batch = buffer.sample(samples, env=model._vec_normalize_env)
        return batch.observations, batch.actions

    def flat(array: np.ndarray[Any, Any]) -> Tensor:
        # Updates merge the dimensions of steps and environments.
        rows = array if buffer.generator_ready else array.reshape(-1, *array.shape[2:])
        return torch.tensor(rows[:samples], device=model.device)

    observations = buffer.observations
    if isinstance(observations, dict):
        return {key: flat(each) for key, each in observations.items()}, None
    return flat(observations), None


@contextmanager
def _numpy_generator_kept() -> Iterator[None]:
    """Leave numpy's global generator as it was: the replay buffer draws from it."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


def _count_arguments(make: Callable[..., Any]) -> int:
    """Return 2 if a function requires two arguments or more, else 1."""
    parameters = inspect.signature(make).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return 2 if len(required) >= 2 else 1


def _refuse_own_times(methods: Mapping[str, Method]) -> None:
    """Raise a ValueError if a reinitializer acts by itself: its target network would not follow."""
    for method in methods.values():
        if method.kind == "reinitializer" and not method.acts_on_new_data:
            raise ValueError(
                f"make: {method.name} has steps of its own, at which no target network would follow; pass at= to the "
                "callback instead"
            )


def _watches(methods: Mapping[str, Method], network: str) -> bool:
    """Say whether a method of a network watches its activations."""
    own = [method for name, method in methods.items() if name.partition("/")[0] == network]
    return any(each.kind == "recycler" or isinstance(each, FeatureRankRegularization) for each in own)


@torch.no_grad()
def _reset_temperature(model: Any) -> None:
    """Reset the temperature of SAC or TQC, and its optimizer."""
    if getattr(model, "ent_coef_optimizer", None) is None:
        return
    _, _, start = str(model.ent_coef).partition("_")
    model.log_ent_coef.fill_(math.log(float(start or 1.0)))
    model.ent_coef_optimizer.state.clear()
