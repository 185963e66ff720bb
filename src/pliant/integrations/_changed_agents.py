"""Agents whose layers a method changed: their optimizers, their target networks, and how they are loaded.

`load()` of Stable-Baselines3 builds the policy from its class and loads the weights into it. So the changed agent gets
a `ChangedPolicy` in the place of that class, which builds the policy with the changed layers.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pliant.integrations._agents import Network
from pliant.methods._core.initial import copy_module


class ChangedPolicy:
    """Builds a policy whose layers were changed, in the place of the policy's class.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = copy_module(policy, type(policy).__name__)
        self.__name__ = type(policy).__name__  # Stable-Baselines3 reads it

    def __call__(self, *arguments: Any, **settings: Any) -> nn.Module:
        """Return a policy with the changed layers."""
        return copy.deepcopy(self.policy)


def build_original_policy(policy: Any) -> Any:
    """Return a new policy as Stable-Baselines3 builds it, with the layers that it had before any change."""
    return type(policy)(**policy._get_constructor_parameters()).to(policy.device)


def replace_policy(model: Any, policy: nn.Module) -> None:
    """Give an agent another policy."""
    model.policy = policy
    if hasattr(model, "_create_aliases"):
        model._create_aliases()


def same_tensors(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Say whether two lists hold the same tensors."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def rebuild(network: Network, before: Sequence[nn.Parameter]) -> None:
    """Rebuild the target and the optimizer of a network whose layers were changed.

    Args:
        network: The network.
        before: The parameters that it had before.
    """
    if network.replace_target is not None and network.target is not None:
        target = copy.deepcopy(network.module)
        _keep_tensors(target, network.target)
        target.train(network.target.training)
        network.replace_target(target)
    old = network.optimizer
    held = {id(p) for group in old.param_groups for p in group["params"]}
    replaced = {id(p) for p in before}
    trained = [p for p in network.module.parameters() if id(p) in held or id(p) not in replaced]
    groups = []
    for group in old.param_groups:
        others = [p for p in group["params"] if id(p) not in replaced]
        own, trained = (trained, []) if len(others) < len(group["params"]) else ([], trained)
        groups.append({**group, "params": own + others})
    new = type(old)(groups)  # type: ignore[call-arg]
    new.defaults = old.defaults
    for group in new.param_groups:
        new.state.update({p: old.state[p] for p in group["params"] if p in old.state})
    network.owner.optimizer = new


@torch.no_grad()
def _keep_tensors(module: nn.Module, old: nn.Module) -> None:
    """Use the tensors of another module where names and shapes agree: the agent holds lists of some of them."""
    known = {**dict(old.named_parameters()), **dict(old.named_buffers())}
    for path, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for leaf, tensor in tensors.items():
                kept = known.get(f"{path}.{leaf}" if path else leaf)
                if tensor is not None and kept is not None and kept.shape == tensor.shape:
                    kept.copy_(tensor)
                    tensors[leaf] = kept
