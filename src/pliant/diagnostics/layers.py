"""Which tensors of a model are measured, and under which name."""

from collections import Counter

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pliant.diagnostics.spectra import as_matrix


def layer_names(model: nn.Module) -> dict[str, str]:
    """Return for each parameter the name of the module that owns it, or its own name if that is the model itself.

    Example:
        >>> layer_names(nn.Sequential(nn.Linear(2, 2)))
        {'0.weight': '0', '0.bias': '0'}
    """
    return {name: name.rpartition(".")[0] or name for name, _ in model.named_parameters()}


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are matrices, by layer; one that shares its layer with another goes by its own name.

    All parameters of two or more dimensions are, except those with a single row that belong to no linear or
    convolution layer: tokens and positions.
    """
    found: dict[str, Tensor] = {}
    layers = layer_names(model)
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if parameter.ndim >= 2 and (isinstance(owner, nn.Linear | _ConvNd) or min(as_matrix(parameter).shape) > 1):
            found[name] = parameter
    several = Counter(layers[name] for name in found)
    return {name if several[layers[name]] > 1 else layers[name]: weight for name, weight in found.items()}


def tensors_by_layer(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return all parameters, those of a module together."""
    found: dict[str, list[Tensor]] = {}
    for name, layer in layer_names(model).items():
        found.setdefault(layer, []).append(model.get_parameter(name))
    return found
