"""FIRE: when data is new, replace weights by the nearest matrices that are orthogonal (Han et al. 2026).

Paper: "FIRE: Frobenius-isometry reinitialization for balancing the stability–plasticity tradeoff", §3, Algorithm 1 and
A.2. Of all matrices with DfI(W̃) = ‖W̃ᵀW̃ − I‖² = 0, the polar factor of W has the least SFE(W, W̃) = ‖W − W̃‖². FIRE
approaches it by Newton–Schulz iteration from W/‖W‖ and scales it by √(d_out/d_in); a convolution's kernel is treated
place by place, and scaled by √(C_out/C_in)/(k_h·k_w). Biases, norm layers and embeddings stay.

Where we deviate. Ten cubic iterations leave small singular values below 1 (a third of those of a square Gaussian matrix
of size 512 stay below 0.9): that is the default, as in the paper, and the receipt states what is left of DfI;
`polynomial="exact"` leaves nothing. Iterations are carried out on the spectrum of the small Gram matrix where that is
cheaper (`pliant.methods._core.orthogonal`). A weight that is all zero stays zero instead of turning into NaN.
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
from pliant.methods._core.method import Batches, Filter, LossFunction
from pliant.methods._core.orthogonal import (
    Iteration,
    Polynomial,
    Solver,
    check_solver,
    isometry_deviation,
    orthogonalize,
)
from pliant.methods._core.reinitializer import Reinitializer
from pliant.methods._core.selection import learnable_parameters
from pliant.methods._core.surgery import forget_state_, map_moments_, zero_moments_

Layers = Literal["auto", "all", "qk"]

_CHUNK = 2**24
"""How many entries to orthogonalize at once: enough to fill a device, little enough to fit beside the model."""


def isometric_scale(shape: Sequence[int]) -> float:
    """Return √(d_out/d_in)/(k_h·k_w) for maps of shape [k_h, k_w, d_out, d_in], or √(d_out/d_in) for [d_out, d_in].

    Example:
        >>> isometric_scale((3, 3, 8, 2))
        0.2222222222222222
    """
    *kernel, outputs, inputs = shape
    return float((outputs / inputs) ** 0.5 / torch.Size(kernel).numel())


class FIRE(Reinitializer):
    """Move weights to the nearest isometry, on `apply()`.

    Args:
        model: The model.
        lam: How far to go, 0 (stay) to 1 (all the way, as in the paper).
        iterations: Newton–Schulz iterations; the paper takes 10 for vision and 5 for language.
        polynomial: "cubic" (the paper's Algorithm 1), "quintic" (its A.2) or "exact" (the polar factor itself).
        layers: "all" acts on every linear and convolution layer, with q, k and v apart where a weight packs them (the
            paper's ResNet, VGG and GPT). "qk" acts on the q and k maps of attention alone (its ViT). "auto" is "qk" in
            a model that has any, else "all"; maps of their own count if q and k lie in one module.
        packed: Linear layers that pack q, k and v and are not recognized by their name: module names, or a mapping to
            the three numbers of outputs.
        solver: How to compute it: "auto", or one of `pliant.methods._core.orthogonal`.
        optimizer_state: "reset" the moments of the weights (the paper starts a new optimizer), "keep" them, or
            "rotate" them: a weight becomes W·T, so first moments become M·T and second moments V·(T∘T).
        where: Which weights to act on, of those that `layers` names; all if None.

    Attributes:
        skipped: What it leaves alone though one might expect it to act: layers whose weight is computed from others,
            by name, and, unless q and k alone are meant, the weights of other modules than linear, convolution and
            attention layers that `where` passes, by theirs: recurrent ones, experts, modules of one's own.
    """

    name = "fire"
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
    ) -> None:
        self.lam = check_number("lam", lam, high=1.0)
        self.iteration = Iteration(polynomial, iterations)
        check_choice("layers", layers, get_args(Layers))
        check_solver(solver, polynomial)
        if optimizer_state == "rotate" and solver == "loop":
            raise ValueError(
                "optimizer_state: 'rotate' needs the map from old to new weights, which 'loop' never forms"
            )
        self.solver: Solver = "eigh" if optimizer_state == "rotate" and solver == "auto" else solver
        learnable_parameters(model)  # An error that names what a model lacks, before anything looks into it.
        computed, known = find_computed(model), find_matrices(model, packed)
        found = _choose(known, layers, computed)
        chosen = {matrix.parameter for matrix in found}
        # Where q and k alone are meant, nothing else is expected.
        unknown = _find_unknown(model, known, computed, where) if found is known else []
        super().__init__(
            model,
            optimizer_state=optimizer_state,
            where=lambda name, p: name in chosen and (where is None or where(name, p)),
        )
        self.matrices = [matrix for matrix in found if matrix.parameter in self.parameters]
        self.skipped = computed + unknown
        if computed and where is None:
            warn_user(f"fire leaves these layers alone, their weights are computed from others: {', '.join(computed)}")
        if unknown:
            warn_user(
                "fire leaves these weights alone, they are of no linear, convolution or attention layer that it knows: "
                f"{', '.join(unknown)} (where= leaves them out)"
            )
        self._maps: dict[Matrix, Tensor] = {}

    def _reinitialize(self, batches: Batches | None, loss_fn: LossFunction | None) -> Mapping[str, Any]:
        free = self._free()
        acted_on = [matrix for matrix in self.matrices if matrix.parameter in free]
        views = {matrix: matrix.view(free[matrix.parameter].detach()) for matrix in acted_on}
        _check_finite(views)
        deviation: dict[str, float] = {}
        error: dict[str, float] = {}
        self._maps = {}
        for group in _groups_of_equal_shape(views):
            old = torch.stack([views[matrix] for matrix in group])
            result = orthogonalize(old.flatten(end_dim=-3), self.iteration, self.solver)
            scale = isometric_scale(old.shape[1:])
            new = result.matrices.mul_(scale).view_as(old)
            left = result.deviation
            if self.lam < 1:
                new = old.to(new.dtype).lerp(new, self.lam)
                left = isometry_deviation(new.flatten(end_dim=-3) / scale)
            torch._foreach_copy_([views[matrix] for matrix in group], list(new.unbind()))
            if self.optimizer_state == "rotate":
                self._remember_maps(group, old, result.maps, scale)
            per_matrix = left.view(len(group), -1).sum(1).tolist()
            squares = (new.sub_(old).flatten(1).norm(dim=1) ** 2).tolist()
            deviation |= zip(map(str, group), per_matrix, strict=True)
            error |= zip(map(str, group), squares, strict=True)
        return {"deviation_from_isometry": deviation, "squared_frobenius_error": error}

    def _remember_maps(self, group: Sequence[Matrix], old: Tensor, maps: Tensor | None, scale: float) -> None:
        assert maps is not None
        norms = torch.linalg.matrix_norm(old.to(maps.dtype), keepdim=True)
        maps = maps.view(*norms.shape[:-2], *maps.shape[-2:]) * (scale * self.lam / norms)
        # What is all zero stays as it is, and so do its moments.
        maps = maps.where(norms > 0, self.lam * torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device))
        maps.diagonal(dim1=-2, dim2=-1).add_(1 - self.lam)
        self._maps |= zip(group, maps.unbind(), strict=True)

    def _check_state(self, optimizers: Sequence[Optimizer]) -> None:
        if self.optimizer_state == "rotate":
            for parameter in self._free().values():
                map_moments_(optimizers, parameter, lambda moment, power: None)
        elif self.optimizer_state == "reset":
            for name, parameter in self._free().items():
                if not self._is_whole(name):
                    zero_moments_(optimizers, parameter, torch.zeros((), dtype=torch.bool, device=parameter.device))

    def _is_whole(self, name: str) -> bool:
        """Say whether the maps that are acted on make up the whole of a weight."""
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
            if self._is_whole(name):
                reset += forget_state_(optimizers, [parameter])
            else:
                # A weight of which only some maps changed: the others' moments, and the step count, are still good.
                mask = torch.zeros_like(parameter, dtype=torch.bool)
                for matrix in self.matrices:
                    if matrix.parameter == name:
                        matrix.view(mask).fill_(True)
                reset += zero_moments_(optimizers, parameter, mask)
        return {"optimizer_tensors_reset": reset}


@dataclass(frozen=True)
class _Rotation:
    """Rewrites moments of a weight that became W·T: first moments to M·T, second moments to V·(T∘T)."""

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
            "layers: 'qk', but no query and key maps were found in the model; name the layers that hold them in packed="
        )
    if layers == "all" or not projections:
        if not found:
            why = f"; the weights of {', '.join(computed)} are computed from others" if computed else ""
            raise ValueError(f"model: it has no linear and no convolution layer for fire to act on{why}")
        return found
    return projections


def _find_unknown(
    model: nn.Module, known: Sequence[Matrix], computed: Sequence[str], where: Filter | None
) -> list[str]:
    """Return the weights that are matrices, or stacks of them, but of no layer whose matrices are known.

    Embeddings are none, nor are tables that are called so.
    """
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    tables = {id(p) for module in embeddings for p in module.parameters()}
    names = {matrix.parameter for matrix in known}
    told = tuple(path and f"{path}." for path in computed)  # by the name of the layer
    return [
        name
        for name, p in learnable_parameters(model).items()
        if name not in names and not name.startswith(told)
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


def _check_finite(views: Mapping[Matrix, Tensor]) -> None:
    for matrix, view in views.items():
        # One pass without a copy; in half precision a norm would overflow before its weight does.
        if not view.norm(dtype=wide_dtype(view.dtype)).isfinite():
            raise ValueError(f"model: the weight {str(matrix)!r} holds NaN or infinity, which has no nearest isometry")
