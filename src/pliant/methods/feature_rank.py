"""Feature rank regularization: pull the extreme singular values of the last hidden features together.

The term is λ(σ₁²(Φ) − σ_d²(Φ)), where Φ is the batch of features that enter the classifier and σ_d is the smallest of
its min(n, d) singular values for n examples and d features (Kumar et al. 2021). "Directions of Curvature as an
Explanation for Loss of Plasticity", §3, finds that it raises the rank but does not keep plasticity. With the singular
pairs u₁, v₁ and u_d, v_d, the gradient at the features is 2(σ₁u₁v₁ᵀ − σ_d u_d v_dᵀ).

This penalty depends on the batch, so its gradient enters during the user's own `backward()`: a hook on the classifier
adds it at the features, in training mode only. The hook ignores passes that do not train the features, such as an actor
that learns through a frozen critic.

The method cannot see by what factor the loop multiplies its loss before `backward()`. Pass it as `loss_scale`:

- `scaler.get_scale` under a GradScaler;
- 1/n if n micro-batches are accumulated as a mean (each has features and a term of its own);
- 1/2 if two backward passes go through one forward pass, since each adds the term.

In a second derivative the term counts as a constant.

On several ranks, Φ is the batch of all ranks: the features are gathered in the forward pass.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pliant._eigen import eigh
from pliant._precision import widen, without_autocast
from pliant._step_hooks import before_step
from pliant._validation import check_modules, check_number
from pliant._warnings import warn_user
from pliant.anatomy.layers import Layer, called_layers, classifier_names
from pliant.distributed import Group, add_whole, data_group, gather_rows, rank_count, whole_of
from pliant.methods._core.attachment import Attachment, ascending_names, closure_of, count_step, with_closure
from pliant.methods._core.method import Kind, Method, Receipt
from pliant.methods._core.module_hooks import ModuleHook, input_of
from pliant.methods._core.orthogonal import gram

LossScale = float | Callable[[], float | Tensor]


@without_autocast
def feature_rank(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return σ₁² − σ_d² of a matrix and its gradient 2(σ₁u₁v₁ᵀ − σ_d u_d v_dᵀ).

    Args:
        features: Φ, one row per example.

    Example:
        >>> value, gradient = feature_rank(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
        >>> round(float(value), 4), gradient.diagonal().round(decimals=4)
        (8.0, tensor([ 6.,  0., -2.]))
    """
    wide = features.shape[0] < features.shape[1]
    squares, vectors = eigh(gram(features if wide else features.mT))
    ends = vectors[:, [-1, 0]]
    signs = ends.new_tensor([2.0, -2.0])
    gradient = (ends * signs) @ (ends.mT @ features) if wide else (features @ ends) @ (ends * signs).mT
    return squares[-1] - squares[0], gradient


def find_heads(layers: Sequence[Layer]) -> list[str]:
    """Return the last linear layer of each head; of heads that read the same features, one.

    Example:
        >>> body, mean, deviation = (nn.Linear(2, 2) for _ in range(3))
        >>> read = frozenset({"body"})
        >>> find_heads([Layer("body", body), Layer("mean", mean, read), Layer("deviation", deviation, read)])
        ['deviation']
    """
    inner = {source for layer in layers for source in layer.sources}
    names = classifier_names(layers)
    heads = {layer.sources: layer.name for layer in layers if layer.name in names and layer.name not in inner}
    return list(dict.fromkeys(heads.values())) or [names[-1]]


class FeatureRankRegularization(Method):
    """Add λ(σ₁² − σ_d²) of the last hidden features to the loss.

    Args:
        model: The model.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), from which the
            classifier is found: the last linear layer. Of several heads with features of their own, such as twin
            critics, each has its own term. Not needed if `classifier` is given.
        lam: λ.
        classifier: The name of the module whose input is Φ, or a list of names.
        loss_scale: The factor of the loss in `backward()`: a number, or a function that returns it
            (`scaler.get_scale`).
    """

    name = "feature_rank"
    kind: ClassVar[Kind] = "penalty"
    order: ClassVar[int] = 0

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        lam: float,
        classifier: str | Sequence[str] | None = None,
        loss_scale: LossScale = 1.0,
    ) -> None:
        super().__init__(model)
        self.lam = check_number("lam", lam)
        self.loss_scale = loss_scale if callable(loss_scale) else check_number("loss_scale", loss_scale)
        if classifier is None:
            if example is None:
                raise ValueError("example: None, and classifier is not given; pass an example input or classifier=name")
            classifier = find_heads(called_layers(model, example))
        names = [classifier] if isinstance(classifier, str) else classifier
        self.classifiers = tuple(check_modules("classifier", model, names))
        self._handles: list[RemovableHandle] = []
        self._features: dict[str, Tensor] = {}
        self._stepped: dict[str, Tensor] = {}
        self._warned = False

    def attach(self, *optimizers: Optimizer, group: Group | None = None) -> Self:
        """Act on every forward and backward pass in training mode, as long as one of these optimizers exists."""
        super().attach(*optimizers, group=group)
        if not self._handles:
            modules = map(self.model.get_submodule, self.classifiers)
            hooks = [(module, ModuleHook(module, self._see)) for module in modules]
            self._handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Stop acting for these optimizers, or for all if none is given. With the last one, the hook is removed."""
        super().detach(*optimizers)
        if not self._attachments:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def step(self) -> None:
        """Raise a TypeError: the gradient enters during `backward()`."""
        raise TypeError(f"{self.name} acts during backward(), on the features of the batch; call attach()")

    def value(self) -> Tensor:
        """Return λ(σ₁² − σ_d²) of the last batch of features, summed over heads; 0 before the first one."""
        terms = [feature_rank(features)[0] for features in self._features.values()]
        return self.lam * torch.stack(terms).sum() if terms else torch.zeros(())

    @property
    def receipt(self) -> Receipt | None:
        """The term and the norm of its gradient at the features of the last step."""
        if not self._stepped:
            return None
        found = [feature_rank(features) for features in self._stepped.values()]
        details = {
            "value": self.lam * math.fsum(float(value) for value, _ in found),
            "gradient_norm": self.lam * math.hypot(*(float(gradient.norm()) for _, gradient in found)),
            "steps": sum(self.steps),
        }
        entries = sum(gradient.numel() for _, gradient in found)
        return Receipt(self.name, "add gradient at the features", len(found), entries, details)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handles": [], "_features": {}, "_stepped": {}}

    def _match(self, optimizer: Optimizer) -> Attachment:
        attachment = super()._match(optimizer)
        if ascending_names(optimizer, attachment.names, attachment.groups):
            raise ValueError(
                f"optimizers: this {type(optimizer).__name__} maximizes, so {self.name} would be maximized too; "
                "negate the objective and minimize it"
            )
        return attachment

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [before_step(optimizer, self._before_step)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        count_step(self.steps, self._attachment(optimizer).slot)
        closure = closure_of(args, kwargs)
        if closure is None:
            self._stepped = dict(self._features)
            if not self._features and not self._warned:
                self._warned = True
                warn_user(
                    f"{self.name} saw no features before this step: {self.classifiers[-1]!r} was not called in "
                    "training mode on an input with a gradient, only inside torch.func, or was compiled before attach()"
                )
            return None

        def closure_with_penalty() -> Any:
            # A line search compares the returned values, so they must include the term.
            loss = closure()
            self._stepped = dict(self._features)
            return loss if loss is None else loss + self.value().to(loss)

        return with_closure(args, kwargs, closure_with_penalty)

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = input_of(args, kwargs)
        if not self._attachments or not module.training or not torch.is_grad_enabled() or not features.requires_grad:
            return
        # The features do not learn if the network is frozen (an actor learns through its critic) or if functional_call
        # has replaced its parameters (by a target network's).
        own = {id(parameter) for parameter in self.parameters.values()}
        name = next((each for each in self.classifiers if self.model.get_submodule(each) is module), "")
        network = self.model.get_submodule(name.rpartition(".")[0])
        learning = [p for p in network.parameters() if p.requires_grad]
        if not any(id(p) in own or self._shards is not None for p in learning):
            return
        if features.ndim > 3:
            raise ValueError(
                f"classifier: {name!r} takes inputs of shape {tuple(features.shape)}, but features are "
                "[examples, features] or [examples, tokens, features]; name the linear layer that reads them"
            )
        group = data_group(self.model, self.group)
        seen, mine = gather_rows(_as_matrix(whole_of(features.detach())), group)
        self._features[name] = seen

        def add_gradient(gradient: Tensor) -> Tensor:
            scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
            own = feature_rank(seen)[1][mine].view(gradient.shape)
            # The gradients of the parameters are averaged over the ranks; the term's must be summed.
            added: Tensor = add_whole(gradient, (own * (self.lam * scale * rank_count(group))).to(gradient.dtype))
            return added

        features.register_hook(add_gradient)


def _as_matrix(features: Tensor) -> Tensor:
    """Return the features as a matrix with one row per example or token, finite and at least in float32.

    After an overflow the loss itself tells the GradScaler; the eigenvalue solver must not fail before.
    """
    rows = features.unsqueeze(0) if features.ndim == 1 else features.flatten(0, -2)
    return torch.nan_to_num(widen(rows), nan=0.0, posinf=0.0, neginf=0.0)
