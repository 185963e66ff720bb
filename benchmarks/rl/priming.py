"""Prime a DQN on its first 200 transitions of CartPole, then let it learn: `python -m benchmarks.rl.priming`.

Priming is 10 000 updates on 200 transitions (Nikishin et al. 2022, "The primacy bias", call it heavy priming). Then the
agent learns as usual: as it is, or after `FIRE` or `full_reset` through the callback. `unprimed` is the same agent
without the 10 000 updates. The late return is the mean over the episodes that end in the last fifth of the steps.

Each finished run is a line of `results/priming.jsonl`; runs that are there already are not run again. At the end the
table in `docs/howto-frameworks.md` is written from the kept runs; `--table` does only that.
"""

import copy
import json
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import polyak_update, set_random_seed
from torch import nn

import pliant
from pliant.integrations.stable_baselines3 import PliantCallback

RESULTS = Path(__file__).parent.parent / "results" / "priming.jsonl"
PAGE = Path(__file__).parents[2] / "docs" / "howto-frameworks.md"
BLOCK = re.compile(r"(?<=<!-- priming -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
FIRST, UPDATES, STEPS, SEEDS = 200, 10_000, 20_000, 10
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "buffer_size": 50_000,
    "learning_starts": FIRST,
    "batch_size": 64,
    "train_freq": 2,
    "gradient_steps": 1,
    "target_update_interval": 200,
    "exploration_fraction": 0.1,
    "exploration_final_eps": 0.05,
}

CONDITIONS: dict[str, Callable[[nn.Module, int], list[pliant.Method]] | None] = {
    "unprimed": None,
    "primed": None,
    "fire": lambda network, seed: [pliant.FIRE(network, optimizer_state="reset")],
    # A stream of its own: the agent's seed would draw the weights that it had at first.
    "full_reset": lambda network, seed: [pliant.FullReset(network, seed=1000 + seed)],
}


def prime(model: DQN, updates: int) -> None:
    """Update the agent on what its replay buffer holds, and its target network as often as in training."""
    model.set_logger(stable_baselines3.common.logger.configure(None, []))
    between = model.target_update_interval // model.train_freq.frequency
    for _ in range(updates // between):
        model.train(between, model.batch_size)
        polyak_update(model.q_net.parameters(), model.q_net_target.parameters(), model.tau)


def start(seed: int) -> DQN:
    """Return an agent that has seen its first transitions."""
    env = Monitor(gymnasium.make("CartPole-v1"))
    model = DQN("MlpPolicy", env, seed=seed, device="cpu", policy_kwargs={"net_arch": [64, 64]}, **SETTINGS)
    return model.learn(FIRST)


def go_on(model: DQN, condition: str, seed: int) -> dict[str, Any]:
    """Let an agent learn on, and return the record of the run."""
    started = time.time()
    set_random_seed(seed)
    make = CONDITIONS[condition]
    callback = None if make is None else PliantCallback(lambda network: make(network, seed), at=[FIRST])
    model.learn(STEPS, callback=callback, reset_num_timesteps=False)
    (env,) = model.get_env().envs
    ends, returns = np.cumsum(env.get_episode_lengths()), np.array(env.get_episode_rewards())
    return {
        "condition": condition,
        "seed": seed,
        "late_return": float(returns[ends > FIRST + 0.8 * STEPS].mean()),
        "returns": [[int(end), float(value)] for end, value in zip(ends, returns, strict=True)],
        "entries_changed": [receipt.entries for _, receipt in callback.receipts] if callback else [],
        "settings": {**SETTINGS, "first": FIRST, "updates": UPDATES, "steps": STEPS},
        "seconds": round(time.time() - started, 1),
        "versions": {
            "torch": torch.__version__,
            "stable_baselines3": stable_baselines3.__version__,
            "gymnasium": gymnasium.__version__,
            "python": platform.python_version(),
        },
    }


def load_runs() -> list[dict[str, Any]]:
    """Return the runs that are kept."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def summarize(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table: each condition's mean late return and its difference from `primed`, with intervals.

    Intervals are 95 % bootstrap intervals over seeds. Only seeds with all conditions count.
    """
    values = {(run["condition"], run["seed"]): run["late_return"] for run in runs}
    seeds = [seed for seed in range(SEEDS) if all((condition, seed) in values for condition in CONDITIONS)]
    late = {condition: np.array([values[condition, seed] for seed in seeds]) for condition in CONDITIONS}
    lines = ["| agent | late return | minus `primed`, same seed | seeds |", "|---|---|---|---|"]
    for condition, returns in late.items():
        gap = "" if condition == "primed" else _show_mean(returns - late["primed"])
        lines.append(f"| `{condition}` | {_show_mean(returns)} | {gap} | {len(seeds)} |")
    return "\n".join(lines)


def _show_mean(values: np.ndarray[Any, Any]) -> str:
    draws = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{values.mean():.0f} ({low:.0f} to {high:.0f})"


def run_all() -> None:
    """Run what is missing, seed by seed."""
    torch.set_num_threads(1)
    kept = {(run["condition"], run["seed"]) for run in load_runs()}
    for seed in range(SEEDS):
        missing = [condition for condition in CONDITIONS if (condition, seed) not in kept]
        unprimed = start(seed)
        primed = copy.deepcopy(unprimed)
        if set(missing) - {"unprimed"}:
            prime(primed, UPDATES)
        for condition in missing:
            record = go_on(unprimed if condition == "unprimed" else copy.deepcopy(primed), condition, seed)
            with RESULTS.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{condition}, seed {seed}: {record['late_return']:.1f}, {record['seconds']} s", flush=True)


def write_table() -> None:
    """Write the table of the kept runs into the page."""
    table = summarize(load_runs())
    PAGE.write_text(BLOCK.sub(lambda _: table, PAGE.read_text()))
    print(table)


if __name__ == "__main__":
    if "--table" not in sys.argv:
        run_all()
    write_table()
