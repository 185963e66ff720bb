"""Spectral normalization: divide every weight by its largest singular value (Miyato et al. 2018).

W/σ₁ takes the place of W, by torch's own `nn.utils.parametrizations.spectral_norm`: one power iteration at each forward
pass in training mode, with the vectors kept as buffers. Gogianu et al. 2021 and Bjorck et al. 2021 use it in
reinforcement learning on some layers only; `where` chooses them. The penalties `spectral` and `spectral_norm` pull the
largest singular value softly instead.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from pliant._validation import check_positive_int, check_seed
from pliant.anatomy.parameters import as_matrix, find_computed, find_matrices, is_stack
from pliant.methods._core.architecture import Architecture
from pliant.methods._core.filters import Filter, learnable_parameters
from pliant.methods._core.initial import seeded
from pliant.methods._core.method import Receipt
from pliant.running import eval_mode


def find_normalizable(model: nn.Module, where: Filter | None) -> tuple[list[str], dict[str, str]]:
    """Return the layers whose weight can be normalized, and the reasons against others, by name.

    Example:
        >>> find_normalizable(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)), None)
        (['0', '2'], {})
    """
    learnable = learnable_parameters(model)
    names = dict.fromkeys(matrix.parameter for matrix in find_matrices(model))
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    chosen: list[str] = []
    skipped = dict.fromkeys(find_computed(model), "its weight is computed already")
    for name in names:
        path, _, leaf = name.rpartition(".")
        if name not in learnable or (where is not None and not where(name, learnable[name])):
            continue
        if leaf != "weight" or is_stack(model, name, learnable[name]):
            skipped[path] = "its weight holds several maps"
        elif owners[id(learnable[name])] > 1:
            skipped[path] = "its weight is tied"
        else:
            chosen.append(path)
    return chosen, skipped


class SpectralNormalization(Architecture):
    """Divide the weights of linear and convolution layers by their largest singular values, from construction on.

    Args:
        model: The model, changed in place. Make other methods afterwards.
        iterations: Power iterations at each forward pass in training mode.
        seed: The seed of the first vectors. None draws from torch's global generators.
        where: Which layers, as a predicate on the name and value of their weight; all if None.
    """

    name = "spectral_normalization"

    def __init__(
        self,
        model: nn.Module,
        *,
        iterations: int = 1,
        seed: int | None = None,
        where: Filter | None = None,
    ) -> None:
        self.iterations = check_positive_int("iterations", iterations)
        self.seed = check_seed(seed)
        super().__init__(model, where=where)

    def _find(self, model: nn.Module, example: Any, where: Filter | None) -> tuple[Mapping[str, str], dict[str, str]]:
        chosen, skipped = find_normalizable(model, where)
        if not chosen:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
            raise ValueError(f"model: it has no weight to normalize ({reasons or '`where` passes none'})")
        return {name: name for name in chosen}, skipped

    def _change(self, model: nn.Module, place: str) -> None:
        module = model.get_submodule(place)
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        self._count(weight)
        with seeded(self.seed, len(self.changed)):
            parametrizations.spectral_norm(module, n_power_iterations=self.iterations)
        _refuse_plan(module, place)

    @property
    def receipt(self) -> Receipt:
        """The changed and skipped layers, and the largest singular values now, which are near one."""
        plain = super().receipt
        with eval_mode(self.model), torch.no_grad():
            norms = {
                name: float(torch.linalg.matrix_norm(as_matrix(self.model.get_submodule(name).weight).float(), 2))  # type: ignore[arg-type]
                for name in self.changed
            }
        return Receipt(plain.method, plain.action, plain.tensors, plain.entries, {**plain.details, "norms": norms})


def _refuse_plan(module: nn.Module, place: str) -> None:
    """Let `parallelize_module` say why it cannot split a layer whose weight is computed; torch raises a KeyError."""

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if "." in name or name in self.parametrizations:  # type: ignore[operator]
            raise ValueError(
                f"model: parallelize_module cannot split the weight of {place!r}, which spectral_normalization "
                "computes; leave the layer out of the plan, or leave it out with where="
            )
        nn.Module.register_parameter(self, name, param)

    type(module).register_parameter = register  # type: ignore[method-assign]  # the class is this module's alone
