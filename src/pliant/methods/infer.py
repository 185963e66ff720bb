"""InFeR, initial feature regularization: random heads keep predicting what they predicted at first (Lyle et al. 2022).

Paper: "Understanding and preventing capacity loss in reinforcement learning". k auxiliary linear heads W read the
features φ that enter the classifier. The term is

    λ·mean (W·φ(x; θ) − β·W₀·φ(x; θ₀))²

over the inputs x of the batch and the heads, with θ₀ and W₀ at construction. The heads learn too. They keep the
features from collapsing: predictions of random targets, scaled by β, need features of full rank.

Where we deviate. The heads belong to the method, not to the user's optimizer: they learn with Adam at the optimizer's
learning rate. Features are computed in eval mode, in passes of the method's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import widen
from pliant._validation import check_modules, check_number, check_positive_int, check_seed
from pliant.anatomy.layers import called_layers, classifier_names
from pliant.distributed import Group, broadcast_, find_group, rank_count, sum_over_ranks
from pliant.methods._core.attachment import Attachment, check_rates
from pliant.methods._core.averages import start_averages, update_averages_
from pliant.methods._core.filters import Filter
from pliant.methods._core.function_penalty import FunctionPenalty, Pass, call_on
from pliant.methods._core.initial import seeded
from pliant.methods._core.module_hooks import input_of

Heads = Mapping[str, Tensor]


def prediction_errors(features: Tensor, heads: Heads, targets: Tensor) -> Tensor:
    """Return W·φ + b − target for each example and head.

    Args:
        features: φ, one row per example.
        heads: `weight` W and `bias` b.
        targets: One row per example.

    Example:
        >>> heads = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([1.0])}
        >>> prediction_errors(torch.tensor([[3.0, 4.0]]), heads, torch.tensor([[10.0]]))
        tensor([[2.]])
    """
    return features @ heads["weight"].mT + heads["bias"] - targets


class InFeR(FunctionPenalty):
    """Let random linear heads on the features keep their initial predictions, scaled by β.

    Args:
        model: The model; its present values are θ₀.
        example: An example input, from which the classifier is found: the last linear layer. Not needed if `classifier`
            is given.
        lam: λ.
        beta: β, the scale of the initial predictions.
        heads: k, the number of heads.
        classifier: The name of the module whose input is φ.
        seed: The seed of the heads. None draws from torch's global generators.
        where: Which parameters get the term's gradient; all learnable ones if None.
    """

    name = "infer"
    saved: ClassVar[tuple[str, ...]] = ("initial", "heads", "first_heads", "means", "squares")
    pins_placement: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        lam: float = 0.1,
        beta: float = 100.0,
        heads: int = 10,
        classifier: str | None = None,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        super().__init__(model, lam=lam, where=where)
        self.beta = check_number("beta", beta)
        check_positive_int("heads", heads)
        self.seed = check_seed(seed)
        if classifier is None:
            if example is None:
                raise ValueError("example: None, and classifier is not given; pass an example input or classifier=name")
            classifier = classifier_names(called_layers(model, example))[-1]
        (self.classifier,) = check_modules("classifier", model, [classifier])
        module = model.get_submodule(classifier)
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None:
            raise ValueError(f"classifier: {classifier!r} is a {type(module).__name__}; it must be a linear layer")
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.initial = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        with seeded(self.seed, 0):
            made = nn.Linear(module.in_features, heads)
        wide = {name: widen(tensor.detach().to(weight)) for name, tensor in made.named_parameters()}
        self.heads = wide
        self.first_heads = {name: tensor.clone() for name, tensor in wide.items()}
        self.means, self.squares = start_averages(wide, "g"), start_averages(wide, "g")
        self._used = self.heads
        self._rate: float | Tensor = 0.0

    def penalty(self, passes: Sequence[Pass]) -> Tensor:
        """Return the mean squared error of the heads, the mean over the passes."""
        return torch.stack([self._errors(inputs).square().mean() for inputs in passes]).mean()

    def _errors(self, inputs: Pass) -> Tensor:
        with torch.no_grad():
            targets = self.beta * prediction_errors(
                self._features(self.initial, inputs), self.first_heads, torch.zeros(())
            )
        return prediction_errors(self._features({}, inputs), self._used, targets)

    def _features(self, tensors: Mapping[str, Tensor], inputs: Pass) -> Tensor:
        seen: list[Tensor] = []
        module = self.model.get_submodule(self.classifier)
        handle = module.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(input_of(args, kwargs)), with_kwargs=True
        )
        try:
            call_on(self.model, tensors, inputs)
        finally:
            handle.remove()
        rows = seen[-1]
        return widen(rows.reshape(-1, rows.shape[-1]))

    def _agree(self, group: Group | None) -> None:
        if self.seed is None:  # each rank drew heads of its own
            drawn = [*self.heads.values(), *self.first_heads.values()]
            broadcast_(drawn, find_group(self._given_group if group is None else group))
        super()._agree(group)

    def _match(self, optimizer: Optimizer) -> Attachment:
        check_rates(optimizer, "its heads learn at that rate")
        return super()._match(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._rate = optimizer.param_groups[0]["lr"]
        return super()._before_step(optimizer, args, kwargs)

    def _observe(self, gradients: Mapping[str, Tensor], scale: Tensor | None, found_inf: Tensor | None) -> None:
        again = self._observed
        super()._observe(gradients, scale, found_inf)
        if again or not self._observed or not self._inputs() or not self.lam:
            return
        self._used = {name: tensor.clone() for name, tensor in self.heads.items()}  # this step's term uses them
        leaves = {name: tensor.requires_grad_() for name, tensor in self._used.items()}
        with torch.enable_grad():
            found = torch.autograd.grad(self.lam * self._evaluate(self._inputs()), list(leaves.values()))
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        self._teach([g / rank_count(self.group) for g in sum_over_ranks(list(found), self.group)])

    def _teach(self, gradients: Sequence[Tensor]) -> None:
        """Let the heads take a step of Adam."""
        names = list(self.heads)
        update_averages_(self.means, 0.9, names, {"g": gradients}, None)
        update_averages_(self.squares, 0.999, names, {"g": [g.square() for g in gradients]}, None)
        for name in names:
            self.heads[name].sub_(self._rate * self.means["g"][name] / (self.squares["g"][name].sqrt() + 1e-8))
