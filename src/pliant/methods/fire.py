"""FIRE: when data is new, replace weights by the nearest isometries (Han et al. 2026).

Paper: "FIRE: Frobenius-isometry reinitialization for balancing the stability–plasticity tradeoff", §3, Algorithm 1 and
A.2. Of all matrices W̃ with DfI(W̃) = ‖W̃ᵀW̃ − I‖² = 0, the polar factor of W has the smallest SFE(W, W̃) = ‖W − W̃‖².
FIRE approaches it by Newton–Schulz iteration from W/‖W‖ and scales the result by √(d_out/d_in). A convolution is one
matrix per kernel position, scaled by √(C_out/C_in)/(k_h·k_w). Biases, norm layers and embeddings stay.

Where we deviate:

- Ten cubic iterations leave small singular values below 1 (for a square Gaussian matrix of size 512, a third of them
  below 0.9). This is the default, as in the paper, and the receipt reports the remaining DfI. `polynomial="exact"`
  leaves none.
- Where it is cheaper, the iterations run on the spectrum of the small Gram matrix (`pliant.methods._core.orthogonal`).
- A weight of zeros stays zero instead of becoming NaN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pliant._precision import wide_dtype, without_autocast
from pliant._validation import check_choice, check_number
from pliant._warnings import warn_user
from pliant.anatomy.parameters import Matrix, Packed, find_computed, find_matrices, role_of
from pliant.distributed import held, merge_over_ranks, whole_norms
from pliant.methods._core.filters import Filter, learnable_parameters
from pliant.methods._core.method import Batches, LossFunction
from pliant.methods._core.on_ranks import Sharding
from pliant.methods._core.orthogonal import (
    Iteration,
    Orthogonalized,
    Polynomial,
    Solver,
    check_solver,
    isometry_deviation,
    orthogonalize,
)
from pliant.methods._core.reinitializer import Reinitializer, Steps
from pliant.methods._core.surgery import forget_state_, map_moments_, zero_moments_

Layers = Literal["auto", "all", "qk"]

_CHUNK = 2**24
"""The number of entries to orthogonalize at once: enough to fill a device, few enough to fit beside the model."""


def isometric_scale(shape: Sequence[int]) -> float:
    """Return √(d_out/d_in)/(k_h·k_w) for the shape [k_h, k_w, d_out, d_in], or √(d_out/d_in) for [d_out, d_in].

    Example:
        >>> isometric_scale((3, 3, 8, 2))
        0.2222222222222222
    """
    *kernel, outputs, inputs = shape
    return float((outputs / inputs) ** 0.5 / torch.Size(kernel).numel())


def nearest_isometries(weights: Tensor, iteration: Iteration, solver: Solver = "auto") -> Orthogonalized:
    """Return √(d_out/d_in)/(k_h·k_w) times the orthogonalized W/‖W‖ of each weight, with DfI and maps before scaling.

    Args:
        weights: [count, k_h, k_w, d_out, d_in], or [count, d_out, d_in].
        iteration: The Newton–Schulz iteration, or its limit.
        solver: How to compute it.

    Example:
        >>> nearest_isometries(torch.tensor([[[3.0, 0.0], [0.0, -0.5]]]), Iteration("exact")).matrices
        tensor([[[ 1.,  0.],
                 [ 0., -1.]]])
    """
    result = orthogonalize(weights.flatten(end_dim=-3), iteration, solver)
    return result._replace(matrices=result.matrices.mul_(isometric_scale(weights.shape[1:])).view_as(weights))


class FIRE(Reinitializer):
    """Move weights to the nearest isometries, on `apply()`.

    Args:
        model: The model.
        lam: How far to go, from 0 (stay) to 1 (all the way, as in the paper).
        iterations: The number of Newton–Schulz iterations. The paper uses 10 for vision and 5 for language.
        polynomial: "cubic" (the paper's Algorithm 1), "quintic" (its A.2) or "exact" (the polar factor itself).
        layers: "all" acts on every linear and convolution layer, and on packed q, k and v separately (the paper's
            ResNet, VGG and GPT). "qk" acts on the q and k projections of attention only (its ViT). "auto" is "qk" if
            the model has such projections, else "all". Separate q and k projections count if one module holds both.
        packed: Linear layers that pack q, k and v and are not recognized by name: their module names, or a mapping from
            module name to the three numbers of outputs.
        solver: How to compute it: "auto", or a solver of `pliant.methods._core.orthogonal`.
        optimizer_state: "reset" the moments of the weights (the paper starts a new optimizer), "keep" them, or
            "rotate" them: if a weight becomes W·T, first moments become M·T and second moments V·(T∘T).
        where: Which of the weights that `layers` selects to act on; all if None.
        at: Steps after which the method acts by itself, counted from 1.
        every: The number of steps between two actions by itself; None for none.

    Attributes:
        skipped: Weights that FIRE leaves alone although one might expect otherwise: the names of layers whose weight is
            computed from other parameters, and, unless only q and k are meant, the names of matrices outside linear,
            convolution and attention layers that pass `where` (recurrent layers, experts, custom modules).
    """

    name = "fire"
    sharding: Sharding = "owned"
    reads_values: ClassVar[bool] = False
    optimizer_states: ClassVar[tuple[str, ...]] = ("keep", "reset", "rotate")

    def __init__(
        self,
        model: nn.Module,
        *,
        lam: float = 1.0,
        iterations: int = 10,
        polynomial: Polynomial = "cubic",
        layers: Layers = "auto",
        packed: Packed = (),
        solver: Solver = "auto",
        optimizer_state: Literal["keep", "reset", "rotate"] = "reset",
        where: Filter | None = None,
        at: Steps = (),
        every: int | None = None,
    ) -> None:
        self.lam = check_number("lam", lam, high=1.0)
        self.iteration = Iteration(polynomial, iterations)
        check_choice("layers", layers, get_args(Layers))
        check_solver(solver, polynomial)
        if optimizer_state == "rotate" and solver == "loop":
            raise ValueError(
                "optimizer_state: 'rotate' needs the map from old to new weights, which solver='loop' does not form; "
                "use 'eigh' or 'svd'"
            )
        self.solver: Solver = "eigh" if optimizer_state == "rotate" and solver == "auto" else solver
        learnable_parameters(model)  # rejects unsuitable parameters before their layers are examined
        computed, known = find_computed(model), find_matrices(model, packed)
        found = _choose(known, layers, computed)
        chosen = {matrix.parameter for matrix in found}
        unknown = _find_unknown(model, known, computed, where) if found is known else []
        super().__init__(
            model,
            optimizer_state=optimizer_state,
            where=lambda name, p: name in chosen and (where is None or where(name, p)),
            at=at,
            every=every,
        )
        self.matrices = [matrix for matrix in found if matrix.parameter in self.parameters]
        self.skipped = computed + unknown
        if computed and where is None:
            warn_user(
                "fire leaves these layers alone, because their weights are computed from other parameters: "
                f"{', '.join(computed)}"
            )
        if unknown:
            warn_user(
                "fire leaves these weights alone, because they are not in a linear, convolution or attention layer: "
                f"{', '.join(unknown)}; exclude them with where= to silence this warning"
            )
        self._maps: dict[Matrix, Tensor] = {}
        self._whole = {name for name in self.parameters if self._covers(name)}
        if optimizer_state == "rotate":
            self.sharding = "whole"  # the moments are rotated by maps of whole weights

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        _check_finite(self._free())
        deviation: dict[str, float] = {}
        error: dict[str, float] = {}
        self._maps = {}
        for names in self._in_batches(list(self._free()), gradients=False):
            self._orthogonalize(names, deviation, error)
        # Each rank has the values of the weights that it owns.
        deviation, error = (merge_over_ranks(found, self.group) for found in (deviation, error))
        acted_on = [str(matrix) for matrix in self.matrices if str(matrix) in deviation]
        return {
            "deviation_from_isometry": {name: deviation[name] for name in acted_on},
            "squared_frobenius_error": {name: error[name] for name in acted_on},
        }

    def _orthogonalize(self, names: Sequence[str], deviation: dict[str, float], error: dict[str, float]) -> None:
        """Act on these parameters; add the remaining DfI and the SFE of each matrix to the dictionaries."""
        acted_on = [matrix for matrix in self.matrices if matrix.parameter in names]
        views = {matrix: matrix.view(self.parameters[matrix.parameter].detach()) for matrix in acted_on}
        for group in _groups_of_equal_shape(views):
            old = torch.stack([views[matrix] for matrix in group])
            new, left, maps = nearest_isometries(old, self.iteration, self.solver)
            scale = isometric_scale(old.shape[1:])
            if self.lam < 1:
                new = old.to(new.dtype).lerp(new, self.lam)
                left = isometry_deviation(new.flatten(end_dim=-3) / scale)
            torch._foreach_copy_([views[matrix] for matrix in group], list(new.unbind()))
            if self.optimizer_state == "rotate":
                self._remember_maps(group, old, maps, scale)
            per_matrix = left.view(len(group), -1).sum(1).tolist()
            squares = (new.sub_(old).flatten(1).norm(dim=1) ** 2).tolist()
            deviation |= zip(map(str, group), per_matrix, strict=True)
            error |= zip(map(str, group), squares, strict=True)

    def _remember_maps(self, group: Sequence[Matrix], old: Tensor, maps: Tensor | None, scale: float) -> None:
        assert maps is not None
        norms = torch.linalg.matrix_norm(old.to(maps.dtype), keepdim=True)
        maps = maps.view(*norms.shape[:-2], *maps.shape[-2:]) * (scale * self.lam / norms)
        # A weight of zeros stays, and so do its moments.
        maps = maps.where(norms > 0, self.lam * torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device))
        maps.diagonal(dim1=-2, dim2=-1).add_(1 - self.lam)
        self._maps |= zip(group, maps.unbind(), strict=True)

    def _check_state(self, optimizers: Sequence[Optimizer]) -> None:
        if self.optimizer_state == "rotate":
            for parameter in self._free().values():
                map_moments_(optimizers, parameter, lambda moment, power: None)
        elif self.optimizer_state == "reset":
            for name, parameter in self._free().items():
                if name not in self._whole:
                    zero_moments_(optimizers, parameter, torch.zeros((), dtype=torch.bool, device=parameter.device))

    def _covers(self, name: str) -> bool:
        """Return whether the matrices that FIRE acts on cover a whole parameter."""
        parameter = self.parameters[name]
        parts = [matrix.view(parameter).numel() for matrix in self.matrices if matrix.parameter == name]
        return sum(parts) == parameter.numel()

    def _treat_state(self, optimizers: Sequence[Optimizer]) -> Mapping[str, Any]:
        if self.optimizer_state == "keep" or self.lam == 0:
            return {}
        if self.optimizer_state == "rotate":
            maps, self._maps = self._maps, {}
            rotated = sum(
                map_moments_(optimizers, self.parameters[m.parameter], _Rotation(m, t)) for m, t in maps.items()
            )
            return {"optimizer_tensors_rotated": rotated}
        reset = 0
        for name, parameter in self._free().items():
            if name in self._whole:
                reset += forget_state_(optimizers, [parameter])
            else:
                # Only some matrices of this parameter changed. The moments of the others and the step count stay.
                mask = torch.zeros(held(parameter).shape, dtype=torch.bool, device=parameter.device)
                for matrix in self.matrices:
                    if matrix.parameter == name:
                        matrix.view(mask).fill_(True)
                reset += zero_moments_(optimizers, parameter, mask)
        return {"optimizer_tensors_reset": reset}


@dataclass(frozen=True)
class _Rotation:
    """Rotates the moments of a weight that became W·T: first moments to M·T, second moments to V·(T∘T)."""

    matrix: Matrix
    new_from_old: Tensor

    @without_autocast
    def __call__(self, moment: Tensor, power: int) -> None:
        view = self.matrix.view(moment)
        old, factor = view.to(self.new_from_old.dtype), self.new_from_old**power
        view.copy_(factor @ old if view.shape[-2] < view.shape[-1] else old @ factor)


def _choose(found: list[Matrix], layers: Layers, computed: Sequence[str]) -> list[Matrix]:
    projections = [matrix for matrix in found if matrix.role in ("q", "k")]
    if layers == "qk" and not projections:
        raise ValueError(
            "layers: 'qk', but the model has no query and key projections that FIRE recognizes; name packed ones in "
            "packed="
        )
    if layers == "all" or not projections:
        if not found:
            why = f"; the weights of {', '.join(computed)} are computed from other parameters" if computed else ""
            raise ValueError(f"model: it has no linear or convolution layer for fire to act on{why}")
        return found
    return projections


def _find_unknown(
    model: nn.Module, known: Sequence[Matrix], computed: Sequence[str], where: Filter | None
) -> list[str]:
    """Return the matrices, or stacks of matrices, outside the known layers; embeddings do not count."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    tables = {id(p) for module in embeddings for p in module.parameters()}
    names = {matrix.parameter for matrix in known}
    prefixes = tuple(path and f"{path}." for path in computed)
    return [
        name
        for name, p in learnable_parameters(model).items()
        if name not in names and not name.startswith(prefixes)
        if id(p) not in tables and "embed" not in name.rpartition(".")[2]
        if role_of(model, name, p) == "matrix" and (where is None or where(name, p))
    ]


def _groups_of_equal_shape(views: Mapping[Matrix, Tensor]) -> list[list[Matrix]]:
    groups: dict[tuple[object, ...], list[list[Matrix]]] = {}
    for matrix, view in views.items():
        alike = groups.setdefault((view.shape, view.dtype, view.device), [[]])
        if (len(alike[-1]) + 1) * view.numel() > _CHUNK and alike[-1]:
            alike.append([])
        alike[-1].append(matrix)
    return [group for alike in groups.values() for group in alike]


def _check_finite(parameters: Mapping[str, nn.Parameter]) -> None:
    # The norm is one pass without a copy. In half precision it would overflow for finite weights.
    tensors = list(parameters.values())
    norms = [p.detach().norm(dtype=wide_dtype(p.dtype)) for p in tensors]
    for name, norm in zip(parameters, whole_norms(norms, tensors), strict=True):
        if not norm.isfinite():
            raise ValueError(f"model: the weight {name!r} holds NaN or infinity; restore finite values first")
