"""What a parameter does in its layer: multiply as a matrix, scale each unit, or be added."""

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from pliant._warnings import warn_user
from pliant.anatomy.layers import NORM_LAYERS
from pliant.anatomy.matrices import find_computed, is_stack
from pliant.methods._core.method import Filter, Method
from pliant.methods._core.selection import learnable_parameters

Role = Literal["matrix", "scale", "shift"]
ROLES: tuple[Role, ...] = get_args(Role)


def role_of(model: nn.Module, name: str, parameter: Tensor) -> Role | None:
    """Return the role of a parameter, or None if it has none of them (a slope of PReLU, a policy's log_std, a number).

    A norm layer's weight is a "scale" and its bias a "shift". Elsewhere a name with "std" or "sigma" in it is the scale
    of a noise and one with "logit" that of a softmax, which is nothing, and one with "bias" a "shift"; of the rest, a
    vector (also as [C, 1, 1]) is a "scale" if it is called weight, scale, gamma or gain and a "shift" if it is called
    beta, and a tensor of more dimensions a "matrix", unless it is one row that is broadcast over the batch and no
    weight by name: a class token or a table of positions, which is added, a "shift". What a parametrization computes a
    tensor from plays the role of that tensor; the magnitudes of a weight norm are a "scale".

    Args:
        model: The model that holds the parameter.
        name: Its name in the model.
        parameter: The parameter.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> [role_of(model, name, p) for name, p in model.named_parameters()]
        ['matrix', 'shift', 'scale', 'shift']
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, ParametrizationList):
        magnitudes = leaf == "original0" and hasattr(module, "original1") and parameter.numel() == max(parameter.shape)
        path, _, leaf = path.rpartition(".")
        module, leaf = model.get_submodule(path.rpartition(".")[0]), "weight_g" if magnitudes else leaf
    if isinstance(module, NORM_LAYERS):
        return "shift" if leaf == "bias" else "scale"
    if isinstance(module, nn.PReLU) or parameter.ndim == 0 or any(word in leaf for word in ("std", "sigma", "logit")):
        return None
    is_vector = parameter.ndim == 1 or (parameter.numel() == max(parameter.shape) and is_stack(model, name, parameter))
    if "bias" in leaf or (is_vector and leaf == "beta"):
        return "shift"
    if leaf == "weight_g" or (is_vector and any(word in leaf for word in ("weight", "scale", "gamma", "gain"))):
        return "scale"
    if parameter.ndim > 1 and len(parameter) == 1 and "weight" not in leaf:
        return "shift"
    return None if is_vector else "matrix"


def having_role(model: nn.Module, where: Filter | None, *roles: Role) -> Filter:
    """Return a filter that passes the parameters with one of these roles which also pass `where`."""
    return lambda name, p: role_of(model, name, p) in roles and (where is None or where(name, p))


def without_stacks(method: str, model: nn.Module, where: Filter | None) -> Filter:
    """Return a filter that passes what `where` does, but no weight that may hold several matrices; warn of those.

    Read as one matrix, the members of an ensemble would be held to what none of them is (see `is_stack`).

    Args:
        method: The name of the method, whose `__init__` calls this.
        model: The model.
        where: The filter; all pass if None.
    """
    stacks = [
        name
        for name, p in learnable_parameters(model).items()
        if is_stack(model, name, p) and role_of(model, name, p) == "matrix" and (where is None or where(name, p))
    ]
    if stacks:
        warn_user(
            f"{method} leaves these weights alone, they have three or more dimensions, no convolution is seen to read "
            f"them, and each may hold several matrices: {', '.join(stacks)} (to act on them, give each matrix a "
            "parameter of its own; where= leaves them out)"
        )
    return lambda name, p: name not in stacks and (where is None or where(name, p))


def warn_of_computed(method: Method) -> None:
    """Warn if a method takes for weights what weights are computed from, as the directions of a weight norm.

    Args:
        method: The method, its parameters chosen.
    """
    matrices = [name for name, p in method.parameters.items() if role_of(method.model, name, p) == "matrix"]
    layers = [
        path for path in find_computed(method.model) if any(name.startswith(path and f"{path}.") for name in matrices)
    ]
    if layers:
        warn_user(
            f"{method.name} acts on what the weights of these layers are computed from, not on the weights themselves: "
            f"{', '.join(layers)} (where= leaves them out)"
        )


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a weight as the matrix [rows, all other dimensions]: C_out × C_in·kh·kw for a convolution.

    A transposed convolution's weight starts with C_in. It is the adjoint of a convolution with that weight,
    so its matrix, with C_in rows, has the same claim to be called the layer's.
    """
    return tensor.detach().flatten(1)
