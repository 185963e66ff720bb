"""Feature rank: pull the largest and the smallest singular value of the last hidden features together.

The term is λ(σ₁²(Φ) − σ_d²(Φ)), Φ the batch of features that enter the classifier (Kumar et al. 2021; "Directions of
Curvature as an Explanation for Loss of Plasticity", §3, where it raises the rank but does not save plasticity).
σ_d is the smallest of the min(n, d) singular values of n examples and d features. With the singular pairs u₁, v₁ and
u_d, v_d, the gradient at the features is 2(σ₁u₁v₁ᵀ − σ_d u_d v_dᵀ).

This penalty depends on data, so its gradient cannot be added before the step: it enters during the user's own
`backward()`, at the features, and reaches the parameters together with the loss's. A hook on the classifier sees the
features on their way in, in training mode only, and not while all parameters of the model are frozen: then the pass
trains another one through it (an actor through its critic).

What the loop multiplies its loss by before `backward()` the method cannot see. Say it with `loss_scale`, so that the
term weighs as it would in the loss: `scaler.get_scale` under a GradScaler, 1/n where n micro-batches are accumulated as
a mean. (Each micro-batch has features, and a term, of its own.) Each backward pass that reaches the features takes the
term along: where two of them go through one forward pass, `loss_scale=1/2`. In a second derivative the term counts as a
constant.
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
from pliant._validation import check_number
from pliant._warnings import warn_user
from pliant.anatomy.layers import called_layers, classifier_names
from pliant.methods._core.attachment import Attachment, ascending_names, closure_of, with_closure
from pliant.methods._core.gram_matrix import gram
from pliant.methods._core.method import Kind, Method, Receipt
from pliant.methods._core.module_hooks import ModuleHook, input_of
from pliant.methods._core.naming import check_modules

LossScale = float | Callable[[], float | Tensor]


@without_autocast
def feature_rank(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return σ₁² − σ_d² of a matrix, and its gradient.

    Args:
        features: Φ, one row an example.

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
        loss_scale: What the loop multiplies its loss by before `backward()`: a number, or a function that returns
            it (`scaler.get_scale`).
    """

    name = "feature_rank"
    kind: ClassVar[Kind] = "penalty"

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
                raise ValueError("example: None, and no classifier is named; pass an example input or classifier=name")
            classifier = classifier_names(called_layers(model, example))[-1]
        (self.classifier,) = check_modules("classifier", model, [classifier])
        self._module = model.get_submodule(classifier)
        self._network = model.get_submodule(classifier.rpartition(".")[0])
        self._handle: RemovableHandle | None = None
        self._features: Tensor | None = None
        self._warned = False

    def attach(self, *optimizers: Optimizer) -> Self:
        """Act on every forward and backward pass in training mode, as long as one of these optimizers lives."""
        super().attach(*optimizers)
        if self._handle is None:
            self._handle = self._module.register_forward_pre_hook(ModuleHook(self._module, self._see), with_kwargs=True)
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Stop acting for these optimizers, or for all if none is given; no hook is left when it was the last."""
        super().detach(*optimizers)
        if not self._attachments and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def step(self) -> None:
        """Raise a TypeError: the gradient enters during `backward()`."""
        raise TypeError(f"{self.name} acts during backward(), on the features of the batch: call attach()")

    def value(self) -> Tensor:
        """Return λ(σ₁² − σ_d²) of the features that were seen last; 0 before any."""
        if self._features is None:
            return torch.zeros(())
        return self.lam * feature_rank(_as_matrix(self._features))[0]

    @property
    def receipt(self) -> Receipt | None:
        """The term and its gradient's norm at the features that were seen last."""
        if self._features is None:
            return None
        value, gradient = feature_rank(_as_matrix(self._features))
        details = {
            "value": self.lam * float(value),
            "gradient_norm": self.lam * float(gradient.norm()),
            "steps": sum(self.steps.values()),
        }
        return Receipt(self.name, "add gradient at the features", 1, gradient.numel(), details)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_handle": None, "_features": None}

    def _match(self, optimizer: Optimizer) -> Attachment:
        attachment = super()._match(optimizer)
        if ascending_names(optimizer, attachment.names, attachment.groups):
            raise ValueError(
                f"optimizers: this {type(optimizer).__name__} maximizes, and {self.name} would be maximized with the "
                "objective; negate the objective and minimize"
            )
        return attachment

    def _register_hooks(self, optimizer: Optimizer) -> list[RemovableHandle]:
        return [before_step(optimizer, self._before_step)]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._count_step(self._attachment(optimizer).counter)
        closure = closure_of(args, kwargs)
        if closure is None:
            if self._features is None and not self._warned:
                self._warned = True
                warn_user(
                    f"{self.name} saw no features before this step: {self.classifier!r} was not called in training "
                    "mode on an input that has a gradient, only inside torch.func, or was compiled before attach()"
                )
            return None

        def closure_with_penalty() -> Any:
            # A line search compares the values that the closure returns, so these must hold the term.
            loss = closure()
            return loss if loss is None else loss + self.value().to(loss)

        return with_closure(args, kwargs, closure_with_penalty)

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = input_of(args, kwargs)
        if not self._attachments or not module.training or not torch.is_grad_enabled() or not features.requires_grad:
            return
        # A pass through a frozen critic trains the actor; by functional_call one may be of other parameters than the
        # model's own, a target network's. In neither do the features learn that the term is for.
        own = {id(parameter) for parameter in self.parameters.values()}
        if not any(p.requires_grad and id(p) in own for p in self._network.parameters()):
            return
        if features.ndim > 3:
            raise ValueError(
                f"classifier: {self.classifier!r} takes inputs of shape {tuple(features.shape)}; features are "
                "[examples, features] or [examples, tokens, features]: name the linear layer that reads them"
            )
        self._features = seen = features.detach()

        def add_gradient(gradient: Tensor) -> Tensor:
            scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
            own = feature_rank(_as_matrix(seen))[1].view(gradient.shape)
            return gradient + (own * (self.lam * scale)).to(gradient.dtype)

        features.register_hook(add_gradient)


def _as_matrix(features: Tensor) -> Tensor:
    """Return the features as a matrix, one row an example (or a token), in float32 at least and finite.

    A batch that overflowed must reach the GradScaler as an overflow of the loss, not fail in the eigenvalues here.
    """
    rows = features.unsqueeze(0) if features.ndim == 1 else features.flatten(0, -2)
    return torch.nan_to_num(widen(rows), nan=0.0, posinf=0.0, neginf=0.0)
