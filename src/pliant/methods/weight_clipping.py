"""Weight clipping: after every step, clamp each weight to a multiple of its initial bound (Elsayed et al. 2024).

Paper: "Weight Clipping for Deep Continual and Reinforcement Learning". Weights and biases of a layer are kept in
[−κb, κb] with b = 1/√fan_in, the bound of the uniform distribution that torch draws both from. (A recurrent layer's
weights it draws within 1/√hidden_size, a bilinear one's within 1/√in1_features: that is b there. The packed weight of
attention it draws by another rule, within 1.22/√fan_in; b is 1/√fan_in all the same.) The bound follows from the
layer's shape, never from values that training has moved already, and a bias is bounded by the fan-in of the weight that
it belongs to. Norm layers, embeddings and parameters that belong to no weight have no such bound; they are left alone.
Nor is the fan-in known of a weight that may hold several matrices, [n, in, out] or [n, out, in].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._validation import check_number
from pliant.anatomy.parameters import is_linear, is_stack, role_of
from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.method import Filter, Receipt
from pliant.methods._core.selection import learnable_parameters, warn_of_computed, without_stacks
from pliant.running import eval_mode


def initial_bounds(model: nn.Module) -> dict[str, float]:
    """Return b = 1/√fan_in of every weight, and of the biases that belong to it, by name.

    Norm layers, embeddings and what may hold several matrices have none. A weight that is tied has the bound of the
    first of its modules that gives it one: an output layer's, not an embedding's.

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
    with eval_mode(module):  # to read a weight that a spectral norm computes is a step of its training otherwise
        weight = getattr(module, leaf, None)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or not isinstance(weight, Tensor):
        return None
    if not weight.numel():
        return None
    name = f"{path}.{leaf}".lstrip(".")
    if role_of(model, name, weight) != "matrix" or is_stack(model, name, weight):
        return None
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return float(module.hidden_size**-0.5)
    if isinstance(module, nn.Bilinear):
        return float(module.in1_features**-0.5)
    stored_backwards = is_linear(module) and not isinstance(module, nn.Linear)
    return float((len(weight) if stored_backwards else weight.numel() / len(weight)) ** -0.5)


class WeightClipping(AfterStep):
    """Clamp every weight and bias to ±κ/√fan_in after every step.

    Args:
        model: The model.
        kappa: κ, how many times the initial bound is allowed.
        where: Which parameters to clamp; all learnable weights and their biases if None.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> _ = model.weight.data.copy_(torch.tensor([[-3.0, 0.0, 0.9, 2.0]]))
        >>> WeightClipping(model, kappa=2.0).step()
        >>> model.weight.data
        tensor([[-1.0000,  0.0000,  0.9000,  1.0000]])
    """

    name = "weight_clipping"

    def __init__(self, model: nn.Module, *, kappa: float = 2.0, where: Filter | None = None) -> None:
        learnable_parameters(model)  # An error that names what a model lacks, before anything looks into it.
        bounds = initial_bounds(model)
        single = without_stacks(self.name, model, where)
        super().__init__(model, where=lambda name, p: name in bounds and single(name, p))
        warn_of_computed(self.name, model, self.parameters)
        self.kappa = check_number("kappa", kappa)
        self.bounds = {name: self.kappa * bounds[name] for name in self.parameters}

    def step(self) -> None:
        """Clamp once, all weights and biases."""
        names = tuple(self.parameters)
        self._clamp(names, names[0])

    @property
    def receipt(self) -> Receipt | None:
        """How many entries sit at their bound now, and how often the method acted."""
        if not self.steps:
            return None
        served = {name: self.parameters[name].detach() for name in self._served()}
        clamped = [int((p.abs() >= self.bounds[name]).sum()) for name, p in served.items()]
        entries = sum(p.numel() for p in served.values())
        details = {"entries_at_bound": sum(clamped), "steps": sum(self.steps.values())}
        return Receipt(self.name, "clamp", len(clamped), entries, details)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # After a step that was skipped there is nothing to clamp, since the step before was clamped.
        attachment = self._attachment(optimizer)
        self._clamp(attachment.names, attachment.counter)

    @torch.no_grad()
    def _clamp(self, names: Sequence[str], counter: str) -> None:
        self._count_step(counter)
        names = [name for name in names if self.parameters[name].requires_grad]  # the others were frozen since
        if not names:
            return
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        torch._foreach_clamp_max_(parameters, [self.bounds[name] for name in names])
        torch._foreach_clamp_min_(parameters, [-self.bounds[name] for name in names])
