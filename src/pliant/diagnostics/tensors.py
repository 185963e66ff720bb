"""Which tensors of a model are measured, and under which name."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pliant.anatomy.layers import NORM_LAYERS, WEIGHT_LAYERS
from pliant.anatomy.matrices import is_stack
from pliant.diagnostics.spectra import as_matrix


def layer_names(model: nn.Module) -> dict[str, str]:
    """Return for each parameter the name of the module that owns it, or its own name if that is the model itself.

    Example:
        >>> layer_names(nn.Sequential(nn.Linear(2, 2)))
        {'0.weight': '0', '0.bias': '0'}
    """
    return {name: name.rpartition(".")[0] or name for name, _ in model.named_parameters()}


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are matrices, by layer; one that shares its layer with another goes by its own name."""
    found = named_matrices(model)
    return {layer: found[name] for layer, name in _by_layer(found).items()}


def stacks(model: nn.Module) -> list[str]:
    """Return which of the matrices may each be several, whose singular values would be of none of them."""
    found = named_matrices(model)
    return [layer for layer, name in _by_layer(found).items() if is_stack(model, name, found[name])]


def _by_layer(names: Iterable[str]) -> dict[str, str]:
    layers = {name: name.rpartition(".")[0] or name for name in names}
    several = Counter(layers.values())
    return {name if several[layer] > 1 else layer: name for name, layer in layers.items()}


def named_matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are matrices, by their own names.

    All parameters of two or more dimensions are, except those of norm layers, biases, whole numbers, and those with a
    single row that belong to no linear or convolution layer: tokens and positions. In the place of what a
    parametrization stores stands the weight that it makes of it.

    Args:
        model: In eval mode, for a parametrization may count a reading of its weight as a step of training.
    """
    found: dict[str, Tensor] = {}
    for name, owner, tensor in _tensors(model):
        numbers = tensor.is_floating_point() or tensor.is_complex()
        if tensor.ndim < 2 or not numbers or isinstance(owner, NORM_LAYERS) or name.endswith("bias"):
            continue
        if isinstance(owner, WEIGHT_LAYERS) or min(as_matrix(tensor).shape) > 1:
            found[name] = tensor
    return found


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield parameters, each once, and what parametrizations compute, with names and owners."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        if "parametrizations" in path.split("."):
            continue
        prefix = f"{path}." if path else ""
        if is_parametrized(module):
            assert isinstance(module.parametrizations, nn.ModuleDict)
            for leaf in module.parametrizations:
                yield prefix + leaf, module, getattr(module, leaf).detach()
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + leaf, module, parameter


def hooked(model: nn.Module) -> list[str]:
    """Return the linear and convolution layers whose weight a hook computes when they are called."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, WEIGHT_LAYERS)]
    return [name for name, m in layers if "weight" not in m._parameters and not is_parametrized(m, "weight")]


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
