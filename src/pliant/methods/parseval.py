"""Parseval regularization: keep the rows of every weight orthogonal and of one length (Chung et al. 2024).

As the FIRE paper states it (A.3): λ‖WWᵀ − sI‖² for every weight, a convolution as [C_out, C_in·kh·kw]. Its gradient is
4λ(WWᵀ − sI)W, two products where the term in the loss takes three.

Where we deviate. A weight with more rows than columns cannot have orthogonal rows; there the columns are kept
orthogonal, λ‖WᵀW − sI‖², the smaller side, where zero can be reached. The method's authors weigh each layer by
(64/width)² and use s = 2 for relu (the squared gain of the initialization): set `s`, and λ by pattern, for that. FIRE's
code also adds λ‖γ² − 1‖² for the scales of norm layers; here that is `norm_scales=True`.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from pliant._precision import without_autocast
from pliant._validation import check_number
from pliant.anatomy.parameters import Role, as_matrix, role_of
from pliant.methods._core.gram_matrix import gram
from pliant.methods._core.method import Filter
from pliant.methods._core.penalty import Penalty
from pliant.methods._core.selection import having_role, warn_of_computed, without_stacks
from pliant.methods._core.strengths import Strength, add_scaled_, half_squared_norm, resolve_strengths


@without_autocast
def deviation(weight: Tensor, s: float) -> Tensor:
    """Return WWᵀ − sI, or WᵀW − sI if that is smaller.

    Args:
        weight: W.
        s: The squared length that rows (columns) should have.

    Example:
        >>> import torch
        >>> deviation(torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), 1.0)
        tensor([[3., 0.],
                [0., 0.]])
    """
    rows, columns = weight.shape
    result = gram(weight if rows <= columns else weight.mT)
    result.diagonal().sub_(s)
    return result


@without_autocast
def add_parseval_gradient_(gradient: Tensor, weight: Tensor, s: float, factor: float, scale: Tensor | None) -> None:
    """Add factor · scale · 4(WWᵀ − sI)W to a gradient in place.

    Args:
        gradient: A tensor of any memory layout, of the weight's number of rows.
        weight: W as a matrix.
        s: The squared length that rows (columns) should have.
        factor: λ.
        scale: One more factor, on the device; none if None.
    """
    excess = deviation(weight, s)
    if scale is not None:
        excess.mul_(scale)
    left, right = (excess, weight) if len(excess) == len(weight) else (weight, excess)
    if gradient.is_contiguous():
        gradient.view(weight.shape).addmm_(left, right, alpha=4 * factor)
    else:
        gradient.add_((left @ right).view(gradient.shape), alpha=4 * factor)


class ParsevalRegularization(Penalty):
    """Pull all singular values of every weight towards √s.

    Args:
        model: The model.
        lam: λ, one for all or by name pattern.
        s: The squared length that rows should have.
        norm_scales: Whether the scales of norm layers are pulled towards ±1 too, by λ‖γ² − 1‖²; other vectors that
            scale by name, such as the gamma of a LayerScale, are pulled with them, unless `where` leaves them out.
        where: Which parameters to penalize; all learnable weights (and scales) if None.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> _ = model.weight.data.copy_(torch.diag(torch.tensor([2.0, 1.0])))
        >>> round(float(Parseval(model, lam=0.5).value()), 4)  # ½·(2² − 1)²
        4.5
    """

    name = "parseval"

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: Strength = 1e-4,
        s: float = 1.0,
        norm_scales: bool = False,
        where: Filter | None = None,
    ) -> None:
        roles: tuple[Role, ...] = ("matrix", "scale") if norm_scales else ("matrix",)
        super().__init__(model, where=having_role(model, without_stacks(self.name, model, where), *roles))
        warn_of_computed(self.name, model, self.parameters)
        self.s = check_number("s", s)
        self.strengths = resolve_strengths(lam, self.parameters)
        self._scales = {name for name in self.strengths if role_of(model, name, self.parameters[name]) == "scale"}

    def value(self, names: Sequence[str] | None = None) -> Tensor:
        """Return λ Σ‖WWᵀ − sI‖², and λ Σ‖γ² − 1‖² with the scales of norm layers."""
        excesses = {}
        for name in self.parameters if names is None else names:
            if name in self.strengths:
                parameter = self.parameters[name].detach()
                scale = name in self._scales
                excesses[name] = parameter**2 - 1 if scale else deviation(as_matrix(parameter), self.s)
        return 2 * half_squared_norm(excesses, self.strengths)

    def _add_to(self, gradients: Mapping[str, Tensor], scale: Tensor | None) -> None:
        directions = {}
        for name, gradient in gradients.items():
            parameter = self.parameters[name].detach()
            if name in self._scales:
                directions[name] = 4 * (parameter**2 - 1) * parameter
            elif name in self.strengths:
                add_parseval_gradient_(gradient, as_matrix(parameter), self.s, self.strengths[name], scale)
        add_scaled_({name: gradients[name] for name in directions}, directions, self.strengths, scale)
