"""Networks of the sources that Stable-Baselines3 does not have, as policies for its agents.

- `LayerNormPolicy` (SAC): LayerNorm after each linear layer, before the activation (Lewandowski et al. 2024, B).
  Policy arguments `n_critics = 1` and `net_arch = [256, 256]` make the paper's networks.
- `SimBaPolicy` (SAC): normalized observations, residual blocks with LayerNorm, LayerNorm before the output (Lee et al.
  2024, "SimBa"). By default the actor has one block of width 128, each critic two of width 512 (Han et al. 2026).
- `MinAtarPolicy` (DQN): one convolution of 16 kernels of 3×3 and a linear layer of 128 units (Young and Tian 2019).

Atari needs no class: `CnnPolicy` of Stable-Baselines3 is the Nature CNN, and its DQN minimizes Huber's loss.

Where we deviate: SimBa's statistics of observations come from the replayed batches of the updates, where SimBa counts
each observation once as the agent sees it. The log of the standard deviation is clamped as Stable-Baselines3 does it.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from stable_baselines3.common.policies import BasePolicy, ContinuousCritic
from stable_baselines3.common.preprocessing import get_flattened_obs_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, create_mlp
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.sac.policies import Actor, SACPolicy
from torch import Tensor, nn


class OrthogonalLinear(nn.Linear):
    """A linear layer with orthogonal initial weights and zero biases."""

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


class HeLinear(nn.Linear):
    """A linear layer with He's normal initial weights and zero biases."""

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)


class ResidualBlock(nn.Module):
    """SimBa's block: x + W₂ φ(W₁ LayerNorm(x)), with four times as many hidden units as inputs.

    Args:
        width: The number of inputs and outputs.
        activation_fn: φ.
    """

    def __init__(self, width: int, activation_fn: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = HeLinear(width, 4 * width)
        self.activation = activation_fn()
        self.down = HeLinear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of input and branch."""
        branch: Tensor = self.down(self.activation(self.up(self.norm(x))))
        return x + branch


def make_layer_norm_mlp(
    inputs: int, outputs: int, widths: Sequence[int], activation_fn: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Make linear layers, each followed by LayerNorm and the activation, and a linear output unless `outputs` is -1.

    Example:
        >>> [type(layer).__name__ for layer in make_layer_norm_mlp(3, 1, [8])]
        ['Linear', 'LayerNorm', 'ReLU', 'Linear']
    """
    return nn.Sequential(*create_mlp(inputs, outputs, list(widths), activation_fn, post_linear_modules=[nn.LayerNorm]))


def make_simba(
    inputs: int, outputs: int, widths: Sequence[int], activation_fn: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Make SimBa's network: one residual block for each width, which must be equal.

    Example:
        >>> [type(layer).__name__ for layer in make_simba(3, 1, [8])]
        ['OrthogonalLinear', 'ResidualBlock', 'LayerNorm', 'OrthogonalLinear']
    """
    if len(set(widths)) != 1:
        raise ValueError(f"net_arch: {list(widths)}; SimBa's blocks have one width, such as [128, 128]")
    blocks = [ResidualBlock(width, activation_fn) for width in widths]
    head = [OrthogonalLinear(widths[0], outputs)] if outputs > 0 else []
    return nn.Sequential(OrthogonalLinear(inputs, widths[0]), *blocks, nn.LayerNorm(widths[0]), *head)


class LayerNormPolicy(SACPolicy):  # type: ignore[misc]
    """SAC's actor and critics with LayerNorm; it takes the arguments of Stable-Baselines3's `SACPolicy`."""

    make_network = staticmethod(make_layer_norm_mlp)

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> Actor:
        """Make the actor."""
        actor = super().make_actor(features_extractor)
        actor.latent_pi = self.make_network(actor.features_dim, -1, actor.net_arch, actor.activation_fn)
        return actor.to(self.device)

    def make_critic(self, features_extractor: BaseFeaturesExtractor | None = None) -> ContinuousCritic:
        """Make the critics, all in one module."""
        critic = super().make_critic(features_extractor)
        widths, activation_fn = self.critic_kwargs["net_arch"], self.critic_kwargs["activation_fn"]
        for index, replaced in enumerate(critic.q_networks):
            critic.q_networks[index] = self.make_network(replaced[0].in_features, 1, widths, activation_fn)
            setattr(critic, f"qf{index}", critic.q_networks[index])
        return critic.to(self.device)


class RunningNorm(BaseFeaturesExtractor):  # type: ignore[misc]
    """Normalizes observations by their mean and variance so far.

    The statistics change in training mode while gradients are enabled. Evaluations and measurements leave them alone.
    Stable-Baselines3 copies buffers whose names start with `running_` to the target network.

    Args:
        observation_space: The space of observations.
    """

    running_mean: Tensor
    running_var: Tensor
    running_count: Tensor

    def __init__(self, observation_space: gymnasium.Space[Any]) -> None:
        size = get_flattened_obs_dim(observation_space)
        super().__init__(observation_space, size)
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))
        self.register_buffer("running_count", torch.zeros(()))

    def forward(self, observations: Tensor) -> Tensor:
        """Return normalized observations."""
        flat = observations.flatten(1)
        if self.training and torch.is_grad_enabled():
            self._add(flat.detach())
        return (flat - self.running_mean) / (self.running_var + 1e-8).sqrt()

    @torch.no_grad()
    def _add(self, batch: Tensor) -> None:
        total = self.running_count + len(batch)
        share, gap = len(batch) / total, batch.mean(0) - self.running_mean
        within = (1 - share) * self.running_var + share * batch.var(0, correction=0)
        self.running_var.copy_(within + share * (1 - share) * gap**2)
        self.running_mean.add_(share * gap)
        self.running_count.copy_(total)


class SimBaPolicy(LayerNormPolicy):
    """SimBa for SAC; `net_arch` holds a width for each residual block of actor (pi) and critics (qf)."""

    make_network = staticmethod(make_simba)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings["net_arch"] = settings.get("net_arch") or {"pi": [128], "qf": [512, 512]}
        settings.setdefault("features_extractor_class", RunningNorm)
        super().__init__(*arguments, **settings)

    def make_actor(self, features_extractor: BaseFeaturesExtractor | None = None) -> Actor:
        """Make the actor."""
        actor = super().make_actor(features_extractor)
        for head in ("mu", "log_std"):
            layer = getattr(actor, head)
            setattr(actor, head, OrthogonalLinear(layer.in_features, layer.out_features))
        return actor.to(self.device)


class MinAtarCNN(BaseFeaturesExtractor):  # type: ignore[misc]
    """A convolution of 16 kernels of 3×3 and a linear layer, for observations whose last dimension is the channels.

    Args:
        observation_space: The space of observations.
        features_dim: The units of the linear layer.
    """

    def __init__(self, observation_space: gymnasium.Space[Any], features_dim: int = 128) -> None:
        super().__init__(observation_space, features_dim)
        if observation_space.shape is None or len(observation_space.shape) != 3:
            raise ValueError(f"policy: MinAtarPolicy needs images [height, width, channels], got {observation_space}")
        height, width, channels = observation_space.shape
        self.cnn = nn.Sequential(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten())
        self.linear = nn.Sequential(nn.Linear(16 * (height - 2) * (width - 2), features_dim), nn.ReLU())

    def forward(self, observations: Tensor) -> Tensor:
        """Return the features."""
        features: Tensor = self.linear(self.cnn(observations.movedim(-1, 1)))
        return features


class MinAtarPolicy(DQNPolicy):  # type: ignore[misc]
    """DQN's network for MinAtar; it takes the arguments of Stable-Baselines3's `DQNPolicy`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings.setdefault("features_extractor_class", MinAtarCNN)
        if settings.get("net_arch") is None:
            settings["net_arch"] = []
        super().__init__(*arguments, **settings)


POLICIES: dict[str, dict[str, type[BasePolicy]]] = {
    "sac": {"LayerNormPolicy": LayerNormPolicy, "SimBaPolicy": SimBaPolicy},
    "dqn": {"MinAtarPolicy": MinAtarPolicy},
}
"""The policies of this file by agent and name. A recipe names them like the policies of Stable-Baselines3."""
