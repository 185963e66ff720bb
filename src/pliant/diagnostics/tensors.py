"""Which tensors of a model are measured, and under which name."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from pliant.anatomy.parameters import is_stack, matrices_in_use


def layer_names(model: nn.Module) -> dict[str, str]:
    """Return for each parameter the name of the module that owns it, or its own name if that is the model itself.

    Example:
        >>> layer_names(nn.Sequential(nn.Linear(2, 2)))
        {'0.weight': '0', '0.bias': '0'}
    """
    return {name: name.rpartition(".")[0] or name for name, _ in model.named_parameters()}


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are matrices, by layer; one that shares its layer with another goes by its own name."""
    found = matrices_in_use(model)
    return {layer: found[name] for layer, name in _by_layer(found).items()}


def stacks(model: nn.Module) -> list[str]:
    """Return which of the matrices may each be several, whose singular values would be of none of them."""
    found = matrices_in_use(model)
    return [layer for layer, name in _by_layer(found).items() if is_stack(model, name, found[name])]


def _by_layer(names: Iterable[str]) -> dict[str, str]:
    layers = {name: name.rpartition(".")[0] or name for name in names}
    several = Counter(layers.values())
    return {name if several[layer] > 1 else layer: name for name, layer in layers.items()}


def same_parameters(model: nn.Module, other: nn.Module) -> bool:
    """Say whether two models have parameters of the same names and shapes."""
    ours, theirs = ({name: p.shape for name, p in m.named_parameters()} for m in (model, other))
    return ours == theirs


def tensors_by_layer(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return all parameters, those of a module together."""
    found: dict[str, list[Tensor]] = {}
    for name, layer in layer_names(model).items():
        found.setdefault(layer, []).append(model.get_parameter(name))
    return found
