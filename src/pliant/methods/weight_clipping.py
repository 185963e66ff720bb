"""Weight clipping: after every step, clamp each weight to a multiple of its initial bound (Elsayed et al. 2024).

Paper: "Weight Clipping for Deep Continual and Reinforcement Learning". The weight and bias of a layer stay in [−κb, κb]
with b = 1/√fan_in, the bound of the uniform distribution from which torch draws both. b follows from the layer's shape,
not from its values, which training may have moved.

- A recurrent layer has b = 1/√hidden_size and a bilinear layer b = 1/√in1_features, as in torch's initialization.
- The packed weight of attention has b = 1/√fan_in too, although torch draws it within 1.22/√fan_in.
- Norm layers, embeddings and parameters without a weight have no bound and are left alone. So are weights that may
  hold several matrices, [n, in, out] or [n, out, in], since their fan-in is unknown.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._validation import check_number
from pliant._warnings import warn_user
from pliant.anatomy.parameters import is_linear, role_of, stack_dims, stack_layout
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.attachment import Attachment, count_step
from pliant.methods._core.filters import Filter, learnable_parameters, warn_of_computed
from pliant.methods._core.method import Receipt
from pliant.methods._core.on_ranks import Sharding
from pliant.running import eval_mode


def clip_weights_(weights: list[Tensor], bounds: list[float]) -> None:
    """Clamp each weight in place: w ← min(max(w, −b), b).

    Args:
        weights: The weights.
        bounds: b of each weight.

    Example:
        >>> weight = torch.tensor([-3.0, 0.5, 2.0])
        >>> clip_weights_([weight], [1.0])
        >>> weight
        tensor([-1.0000,  0.5000,  1.0000])
    """
    torch._foreach_clamp_max_(weights, bounds)
    torch._foreach_clamp_min_(weights, [-bound for bound in bounds])


def initial_bounds(model: nn.Module) -> dict[str, float]:
    """Return b = 1/√fan_in of every weight, and of its biases, by name.

    A tied weight has the bound of the first module that gives it one: an output layer, not an embedding.

    Args:
        model: The model.

    Example:
        >>> initial_bounds(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)))
        {'0.weight': 0.5, '0.bias': 0.5}
    """
    found: dict[int, float] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        bound = None if id(parameter) in found else _bound(model, *name.rpartition(".")[::2])
        if bound is not None:
            found[id(parameter)] = bound
    return {name: found[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in found}


def _bound(model: nn.Module, path: str, leaf: str) -> float | None:
    module = model.get_submodule(path)
    leaf = leaf.replace("bias", "weight")
    with eval_mode(module):  # in training mode, reading a spectrally normalized weight would change its buffers
        weight = getattr(module, leaf, None)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or not isinstance(weight, Tensor):
        return None
    if not weight.numel():
        return None
    name = f"{path}.{leaf}".lstrip(".")
    if role_of(model, name, weight) != "matrix":
        return None
    stacked = stack_dims(model, name, weight)
    if stacked:
        layout = stack_layout(model, name, weight)
        weight = weight[(0,) * stacked]
        fan_in = len(weight) if layout == "in_out" else weight[0].numel()
        return None if layout is None else float(fan_in**-0.5)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return float(module.hidden_size**-0.5)
    if isinstance(module, nn.Bilinear):
        return float(module.in1_features**-0.5)
    stored_transposed = is_linear(module) and not isinstance(module, nn.Linear)
    return float((len(weight) if stored_transposed else weight.numel() / len(weight)) ** -0.5)


class WeightClipping(AfterStep):
    """Clamp every weight and bias to ±κ/√fan_in after every step.

    Args:
        model: The model.
        kappa: κ, the multiple of the initial bound.
        where: Which parameters to clamp; all learnable weights and their biases if None.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> _ = model.weight.data.copy_(torch.tensor([[-3.0, 0.0, 0.9, 2.0]]))
        >>> WeightClipping(model, kappa=2.0).step()
        >>> model.weight.data
        tensor([[-1.0000,  0.0000,  0.9000,  1.0000]])
    """

    name = "weight_clipping"
    sharding: Sharding = "norms"
    reads_values: ClassVar[bool] = False

    def __init__(self, model: nn.Module, *, kappa: float = 2.0, where: Filter | None = None) -> None:
        learnable_parameters(model)  # rejects unsuitable parameters before their bounds are computed
        bounds = initial_bounds(model)
        super().__init__(model, where=lambda name, p: name in bounds and (where is None or where(name, p)))
        warn_of_computed(self.name, model, self.parameters)
        unknown = [
            name
            for name, p in learnable_parameters(model, where).items()
            if name not in bounds and role_of(model, name, p) == "matrix" and stack_dims(model, name, p)
        ]
        if unknown:
            warn_user(
                f"{self.name} leaves these weights alone, because their matrices may be [out, in] or [in, out]: "
                f"{', '.join(unknown)} (exclude them with where=)"
            )
        self.kappa = check_number("kappa", kappa)
        self.bounds = {name: self.kappa * bounds[name] for name in self.parameters}

    def step(self) -> None:
        """Clamp all weights and biases once."""
        count_step(self.steps)
        self._clamp(tuple(self.parameters))

    @property
    def receipt(self) -> Receipt | None:
        """The number of entries that are at their bound now, and of steps so far."""
        if not self.steps:
            return None
        served = {name: self.parameters[name].detach() for name in self._served()}
        clamped = [int((p.abs() >= self.bounds[name]).sum()) for name, p in served.items()]
        entries = sum(p.numel() for p in served.values())
        details = {"entries_at_bound": sum(clamped), "steps": sum(self.steps)}
        return Receipt(self.name, "clamp", len(clamped), entries, details)

    def _act(self, optimizer: Optimizer, attachment: Attachment) -> None:
        # Clamping after a skipped step is harmless: the weights are still within their bounds.
        self._clamp(attachment.names)

    @torch.set_grad_enabled(False)  # cheaper than no_grad
    def _clamp(self, names: Sequence[str]) -> None:
        learnable = [name for name in names if self.parameters[name].requires_grad]  # some may be frozen by now
        if learnable:
            clip_weights_([self.parameters[name] for name in learnable], [self.bounds[name] for name in learnable])
