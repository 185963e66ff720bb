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

from collections.abc import Callable
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
from pliant.anatomy.layers import called_layers, classifier_names
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


class FeatureRankRegularization(Method):
    """Add λ(σ₁² − σ_d²) of the last hidden features to the loss.

    Args:
        model: The model.
        example: An example input (tensor, tuple of arguments or dictionary of keyword arguments), from which the
            classifier is found: the last linear layer. Not needed if `classifier` is given.
        lam: λ.
        classifier: The name of the module whose input is Φ.
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
        lam: float = 1e-4,
        classifier: str | None = None,
        loss_scale: LossScale = 1.0,
    ) -> None:
        super().__init__(model)
        self.lam = check_number("lam", lam)
        self.loss_scale = loss_scale if callable(loss_scale) else check_number("loss_scale", loss_scale)
        if classifier is None:
            if example is None:
                raise ValueError("example: None, and classifier is not given; pass an example input or classifier=name")
            classifier = classifier_names(called_layers(model, example))[-1]
        (self.classifier,) = check_modules("classifier", model, [classifier])
        self._module = model.get_submodule(classifier)
        self._network = model.get_submodule(classifier.rpartition(".")[0])
        self._handle: RemovableHandle | None = None
        self._features: Tensor | None = None
        self._warned = False

    def attach(self, *optimizers: Optimizer, group: Group | None = None) -> Self:
        """Act on every forward and backward pass in training mode, as long as one of these optimizers exists."""
        super().attach(*optimizers, group=group)
        if self._handle is None:
            self._handle = self._module.register_forward_pre_hook(ModuleHook(self._module, self._see), with_kwargs=True)
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Stop acting for these optimizers, or for all if none is given. With the last one, the hook is removed."""
        super().detach(*optimizers)
        if not self._attachments and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def step(self) -> None:
        """Raise a TypeError: the gradient enters during `backward()`."""
        raise TypeError(f"{self.name} acts during backward(), on the features of the batch; call attach()")

    def value(self) -> Tensor:
        """Return λ(σ₁² − σ_d²) of the last batch of features; 0 before the first one."""
        if self._features is None:
            return torch.zeros(())
        return self.lam * feature_rank(self._features)[0]

    @property
    def receipt(self) -> Receipt | None:
        """The term and the norm of its gradient at the last batch of features."""
        if self._features is None:
            return None
        value, gradient = feature_rank(self._features)
        details = {
            "value": self.lam * float(value),
            "gradient_norm": self.lam * float(gradient.norm()),
            "steps": sum(self.steps),
        }
        return Receipt(self.name, "add gradient at the features", 1, gradient.numel(), details)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handle": None, "_features": None}

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
            if self._features is None and not self._warned:
                self._warned = True
                warn_user(
                    f"{self.name} saw no features before this step: {self.classifier!r} was not called in training "
                    "mode on an input with a gradient, only inside torch.func, or was compiled before attach()"
                )
            return None

        def closure_with_penalty() -> Any:
            # A line search compares the returned values, so they must include the term.
            loss = closure()
            return loss if loss is None else loss + self.value().to(loss)

        return with_closure(args, kwargs, closure_with_penalty)

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = input_of(args, kwargs)
        if not self._attachments or not module.training or not torch.is_grad_enabled() or not features.requires_grad:
            return
        # The features do not learn if the network is frozen (an actor learns through its critic) or if functional_call
        # has replaced its parameters (by a target network's).
        own = {id(parameter) for parameter in self.parameters.values()}
        learning = [p for p in self._network.parameters() if p.requires_grad]
        if not any(id(p) in own or self._shards is not None for p in learning):
            return
        if features.ndim > 3:
            raise ValueError(
                f"classifier: {self.classifier!r} takes inputs of shape {tuple(features.shape)}, but features are "
                "[examples, features] or [examples, tokens, features]; name the linear layer that reads them"
            )
        group = data_group(self.model, self.group)
        seen, mine = gather_rows(_as_matrix(whole_of(features.detach())), group)
        self._features = seen

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
