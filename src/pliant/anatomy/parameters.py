"""What each parameter of a model is: its role, the matrices inside it, and whether a weight is computed from it.

- `role_of`: a parameter multiplies as a "matrix", scales each unit ("scale"), or is added ("shift").
- `find_matrices`: the linear maps inside the weights. A convolution holds one [C_out, C_in] map for each place of its
  kernel, and attention often packs its query, key and value maps into one tensor.
- `is_stack`, `stack_dims`, `members`: whether a parameter stacks the parameters of several networks (an ensemble of
  critics, the experts of a mixture), and the slice of each network.
- `find_computed`: the layers whose weight is computed by a parametrization or a hook.

Attention is recognized by the usual names of its projections. A layer that packs its maps under another name, or in
another order, must be named by the user.
"""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from pliant.anatomy.layers import is_norm

Role = Literal["matrix", "scale", "shift"]
ROLES: tuple[Role, ...] = get_args(Role)

Projection = Literal["q", "k", "v"]
Packed = Sequence[str] | Mapping[str, Sequence[int]]
_PROJECTIONS: tuple[Projection, ...] = get_args(Projection)

_FUSED_NAMES = frozenset({"qkv", "to_qkv", "qkv_proj", "in_proj", "c_attn", "wqkv"})
_SEPARATE_NAMES: dict[str, Projection] = {
    f"{prefix}{name}{suffix}": projection
    for projection, word in zip(_PROJECTIONS, ("query", "key", "value"), strict=True)
    for name in (projection, word)
    for prefix in ("", "to_", "w", "w_", "c_")
    for suffix in ("", "_proj", "_lin", "_linear")
}

_CONVOLUTION = re.compile(r"conv(?:_transpose)?([123])d|convolution")
_CONTAINERS = (ParametrizationList, nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


def role_of(model: nn.Module, name: str, parameter: Tensor) -> Role | None:
    """Return the role of a parameter, or None for anything else: a slope of PReLU, a policy's `log_std`, a number.

    The first rule that applies decides:

    1. A parameter of a norm layer (see `is_norm`) is a "shift" if it is called `shift` or begins with "b" (bias, beta),
       else a "scale".
    2. A slope of PReLU, a single number, whole numbers, and names with "std", "sigma" (noise) or "logit" (softmax
       temperature) have no role.
    3. Names with "bias" are a "shift". So is a vector called `beta`.
    4. A vector with "weight", "scale", "gamma" or "gain" in its name is a "scale". So is `weight_g` of a weight norm.
    5. A tensor [1, …] without "weight" in its name is a "shift": a class token or a table of positions, broadcast over
       the batch.
    6. Other vectors have no role. Everything else is a "matrix".

    A vector may be stored as [C, 1, 1]. A tensor from which a parametrization computes a weight has the role of that
    weight; the magnitudes of a weight norm are a "scale".

    Args:
        model: The model that holds the parameter.
        name: Its name in the model.
        parameter: The parameter, or the tensor that a parametrization computes in its place.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> [role_of(model, name, p) for name, p in model.named_parameters()]
        ['matrix', 'shift', 'scale', 'shift']
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    parameter = parameter[(0,) * _tensordict_dims(module)]
    if isinstance(module, ParametrizationList):
        magnitudes = leaf == "original0" and hasattr(module, "original1") and parameter.numel() == max(parameter.shape)
        path, _, leaf = path.rpartition(".")
        module, leaf = model.get_submodule(path.rpartition(".")[0]), "weight_g" if magnitudes else leaf
    if is_norm(module):
        return "shift" if leaf.startswith("b") or leaf == "shift" else "scale"
    whole = not (parameter.is_floating_point() or parameter.is_complex())
    if isinstance(module, nn.PReLU) or parameter.ndim == 0 or whole or re.search("std|sigma|logit", leaf):
        return None
    is_vector = parameter.ndim == 1 or (parameter.numel() == max(parameter.shape) and is_stack(model, name, parameter))
    if "bias" in leaf or (is_vector and leaf == "beta"):
        return "shift"
    if leaf == "weight_g" or (is_vector and re.search("weight|scale|gamma|gain", leaf)):
        return "scale"
    if parameter.ndim > 1 and len(parameter) == 1 and "weight" not in leaf:
        return "shift"
    return None if is_vector else "matrix"


def is_in_norm_layer(model: nn.Module, name: str) -> bool:
    """Say whether a parameter belongs to a norm layer, also to a stack of them in a `TensorDictParams` of TorchRL."""
    module = model.get_submodule(name.rpartition(".")[0])
    if not _is_tensordict(module):
        return is_norm(module)
    return getattr(module, "weight", torch.zeros(())).ndim == _tensordict_dims(module) + 1


def matrices_in_use(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters with the role "matrix" by name, each tied one once.

    A weight that a parametrization computes stands in the place of the tensors that it is computed from.

    Args:
        model: In eval mode, since a spectral norm counts each reading of its weight as a step of training.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if "parametrizations" in path.split("."):
            continue
        computed = module.parametrizations if is_parametrized(module) else {}
        assert isinstance(computed, nn.ModuleDict | dict)
        own: dict[str, Tensor] = {leaf: getattr(module, leaf).detach() for leaf in computed}
        own |= {leaf: p for leaf, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen.update(map(id, module.parameters(recurse=False)))
        named = {f"{path}.{leaf}" if path else leaf: tensor for leaf, tensor in own.items()}
        found |= {name: tensor for name, tensor in named.items() if role_of(model, name, tensor) == "matrix"}
    return found


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a weight as the matrix [rows, all other dimensions]: C_out × C_in·kh·kw for a convolution.

    The weight of a transposed convolution starts with C_in, and so does its matrix. That layer is the adjoint of a
    convolution with the same weight.
    """
    return tensor.detach().flatten(1)


@dataclass(frozen=True)
class Matrix:
    """A linear map inside a weight, or one for each place of a convolution's kernel.

    Attributes:
        parameter: The weight's name in `named_parameters()`.
        role: "q", "k" or "v" for a projection of attention, else None.
        start: The first output of the map in a weight that packs several maps; None for the whole weight.
        stop: The last output of the map, exclusive.
        transposed: Whether the weight is stored as [in, out].
        member: The number of the map in a stack; None for a weight that is not a stack.
    """

    parameter: str
    role: Projection | None = None
    start: int | None = None
    stop: int | None = None
    transposed: bool = False
    member: int | None = None

    def __str__(self) -> str:
        part = self.member if self.start is None else self.role
        return self.parameter if part is None else f"{self.parameter}[{part}]"

    def view(self, weight: Tensor) -> Tensor:
        """Return the map as a view of the weight: [out, in], after the dimensions of a convolution's kernel."""
        if self.member is not None:
            weight = weight[self.member]
        matrix = weight.movedim((0, 1), (-2, -1))
        if self.transposed:
            matrix = matrix.mT
        if self.start is not None and self.stop is not None:
            matrix = matrix.narrow(-2, self.start, self.stop - self.start)
        return matrix


def find_matrices(model: nn.Module, packed: Packed = ()) -> list[Matrix]:
    """Return the matrices of all linear, convolution and attention layers in the model's order, each tied one once.

    These layers are `nn.Linear`, `nn.Conv*d` (also transposed), `nn.MultiheadAttention` with packed or separate maps,
    and `Conv1D` of the transformers library. A linear layer with a usual name for packed maps (`qkv`, `c_attn`,
    `in_proj` …) is split in three if it has three times as many outputs as inputs. Weights that are computed are left
    out: nothing can be written to them. A stack [count, out, in] of an ensemble holds one matrix for each member.

    Args:
        model: The model.
        packed: Further linear layers that pack q, k and v in this order: their module names for thirds of equal size,
            or a mapping from module name to the three numbers of outputs.

    Raises:
        ValueError: If a module in `packed` is not a linear layer, or its number of outputs does not fit.
    """
    sizes = _packed_sizes(model, packed)
    attentions = _attentions(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[tuple[str, int | None], Matrix] = {}
    for path, module in model.named_modules():
        separate = _separate_projection(path) if path.rpartition(".")[0] in attentions else None
        for leaf, maps in _maps(module, path, sizes.get(path), separate):
            weight = getattr(module, leaf)
            if id(weight) not in names:
                continue
            start = None if len(maps) == 1 else 0
            for role, width in maps:
                stop = None if start is None else start + width
                matrix = Matrix(names[id(weight)], role, start, stop, _is_transposed(module))
                found.setdefault((matrix.parameter, start), matrix)
                start = stop
    return [*found.values(), *_stacked_matrices(model, {parameter for parameter, _ in found})]


def _stacked_matrices(model: nn.Module, known: Collection[str]) -> Iterator[Matrix]:
    """Yield the matrices of stacks [count, out, in] or [count, in, out] whose layout is known."""
    for name, parameter in model.named_parameters():
        if name in known or parameter.ndim < 3 or role_of(model, name, parameter) != "matrix":
            continue
        layout = stack_layout(model, name, parameter)
        if stack_dims(model, name, parameter) == 1 and layout is not None:
            for member in range(len(parameter)):
                yield Matrix(name, transposed=layout == "in_out", member=member)


def find_computed(model: nn.Module, *, hooks_only: bool = False) -> list[str]:
    """Return the names of the linear, convolution and attention layers whose weight is computed from other tensors.

    Args:
        model: The model.
        hooks_only: Whether to leave out parametrizations, so that only weights remain that a hook computes.

    Example:
        >>> find_computed(nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
        ['1']
    """
    own = {id(parameter) for parameter in model.parameters()}
    computed = []
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | _ConvNd) or is_linear(module):
            leaves = (leaf for leaf, _ in _maps(module, path, None, None))
            hooked = any(id(getattr(module, leaf)) not in own for leaf in leaves)
            if hooked or (_is_parametrized(module) and not hooks_only):
                computed.append(path)
    return computed


def is_stack(model: nn.Module, name: str, weight: Tensor) -> bool:
    """Say whether a weight may hold several matrices: the members of an ensemble, the experts of a mixture.

    A weight of three or more dimensions may, unless it is the kernel of a convolution or the weight of `nn.Bilinear`.
    Kernels belong to torch's convolutions, or to a module whose own code calls a convolution of as many dimensions by
    its usual name (`F.conv2d`). For a tied weight, one such module is enough.

    Args:
        model: The model that holds the weight.
        name: The weight's name in the model, or the name of a tensor from which a parametrization computes it.
        weight: The weight.

    Example:
        >>> import torch
        >>> model = nn.ParameterDict({"critics": torch.zeros(5, 4, 3), "matrix": torch.zeros(4, 3)})
        >>> [is_stack(model, name, p) for name, p in model.named_parameters()]
        [True, False]
    """
    if weight.ndim < 3 or _is_one_map(model, name, weight):
        return False
    named = model.named_parameters(remove_duplicate=False)
    return not any(_is_one_map(model, other, weight) for other, parameter in named if parameter is weight)


def stack_dims(model: nn.Module, name: str, parameter: Tensor) -> int:
    """Return how many leading dimensions of a parameter count the members of a stack; 0 if it is not a stack.

    All parameters in a `TensorDictParams` of TorchRL are stacks if it has a batch size. Elsewhere, matrices are (see
    `is_stack`), and so are the biases beside them.

    Args:
        model: The model that holds the parameter.
        name: Its name in the model.
        parameter: The parameter.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if _is_tensordict(module):
        return _tensordict_dims(module)
    if role_of(model, name, parameter) == "matrix":
        return parameter.ndim - 2 if is_stack(model, name, parameter) else 0
    weight = getattr(module, leaf.replace("bias", "weight"), None) if "bias" in leaf else None
    if not isinstance(weight, Tensor) or not is_stack(model, f"{path}.{leaf.replace('bias', 'weight')}", weight):
        return 0
    dims = weight.ndim - 2
    return dims if parameter.ndim > dims and parameter.shape[:dims] == weight.shape[:dims] else 0


def members(tensor: Tensor, dims: int) -> list[Tensor]:
    """Return views of the members of a stack, given the number of dimensions that count them.

    Example:
        >>> import torch
        >>> [tuple(member.shape) for member in members(torch.zeros(2, 4, 3), 1)]
        [(4, 3), (4, 3)]
    """
    found = [tensor]
    for _ in range(dims):
        found = [member for each in found for member in each.unbind()]
    return found


def stack_layout(model: nn.Module, name: str, weight: Tensor) -> Literal["out_in", "in_out"] | None:
    """Return how a stack of matrices is stored, [count, out, in] or [count, in, out]; None if nothing tells.

    TorchRL stacks torch's own layers, [out, in]. Elsewhere the bias beside the weight tells: it has one entry for each
    output. A stack of square matrices is the same either way.
    """
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    bias = getattr(module, leaf.replace("weight", "bias"), None) if "weight" in leaf else None
    rows, columns = weight.shape[-2:]
    if _is_tensordict(module) or rows == columns:
        return "out_in"
    if isinstance(bias, Tensor) and bias.numel() * columns == weight.numel():
        return "out_in"
    if isinstance(bias, Tensor) and bias.numel() * rows == weight.numel():
        return "in_out"
    return None


def _is_tensordict(module: nn.Module) -> bool:
    # tensordict is not a dependency, so its class is recognized by name.
    return type(module).__name__ == "TensorDictParams"


def _tensordict_dims(module: nn.Module) -> int:
    return len(module.batch_size) if _is_tensordict(module) else 0  # type: ignore[arg-type]


def _is_one_map(model: nn.Module, name: str, weight: Tensor) -> bool:
    path = name.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), _CONTAINERS):
        path = path.rpartition(".")[0]  # the module around a container uses the tensors inside it
    module = model.get_submodule(path)
    return isinstance(module, _ConvNd | nn.Bilinear) or _calls_convolution(module, weight.ndim)


def _calls_convolution(module: nn.Module, ndim: int) -> bool:
    """Say whether the code of a module's class, without its submodules, calls a convolution with an `ndim` kernel."""
    kinds = type(module).__mro__
    members = (member for kind in kinds[: kinds.index(nn.Module)] for member in vars(kind).values())
    functions = (inspect.unwrap(getattr(member, "__func__", member)) for member in members if callable(member))
    names = {name for function in functions for name in _names(getattr(function, "__code__", None))}
    calls = filter(None, map(_CONVOLUTION.search, names - module._modules.keys()))
    return any(call[1] is None or int(call[1]) + 2 == ndim for call in calls)


def _names(code: CodeType | None) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):  # a function within the function
                yield from _names(constant)


def _is_parametrized(module: nn.Module) -> bool:
    return is_parametrized(module, "weight") or is_parametrized(module, "in_proj_weight")


def _maps(
    module: nn.Module, path: str, sizes: Sequence[int] | None, separate: Projection | None
) -> Iterator[tuple[str, list[tuple[Projection | None, int]]]]:
    """Yield the weights of a module, each with its maps in order: their projection and number of outputs."""
    if _is_parametrized(module):
        return  # reading the weight would compute it, which a spectral norm counts as a step of training
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is not None:
            yield "in_proj_weight", [(role, module.embed_dim) for role in _PROJECTIONS]
        else:
            for role in _PROJECTIONS:
                yield f"{role}_proj_weight", [(role, module.embed_dim)]
    elif isinstance(module, _ConvNd):
        yield "weight", [(None, module.out_channels)]
    elif is_linear(module):
        leaf = path.rpartition(".")[2].lower()
        out, inputs = _out_and_in(module)
        if sizes is None and leaf in _FUSED_NAMES and out == 3 * inputs:
            sizes = (inputs, inputs, inputs)
        if sizes is not None:
            yield "weight", list(zip(_PROJECTIONS, sizes, strict=True))
        else:
            yield "weight", [(separate, out)]


def _separate_projection(path: str) -> Projection | None:
    return _SEPARATE_NAMES.get(path.rpartition(".")[2].lower())


def _attentions(model: nn.Module) -> set[str]:
    """Return the modules that hold both a query and a key map; a single one may be any layer of that name."""
    held: dict[str, set[Projection | None]] = {}
    for path, module in model.named_modules():
        if is_linear(module):
            held.setdefault(path.rpartition(".")[0], set()).add(_separate_projection(path))
    return {parent for parent, roles in held.items() if {"q", "k"} <= roles}


def _packed_sizes(model: nn.Module, packed: Packed) -> dict[str, Sequence[int]]:
    if isinstance(packed, str):
        raise ValueError(f"packed: {packed!r} is a string; it must be a list of module names, [{packed!r}]")
    modules = dict(model.named_modules())
    sizes: dict[str, Sequence[int]] = {}
    for path in packed:
        module = modules.get(path)
        if module is None or not is_linear(module):
            kind = "not a module of the model" if module is None else f"a {type(module).__name__}, not a linear layer"
            raise ValueError(f"packed: {path!r} is {kind}")
        out = _out_and_in(module)[0]
        given = packed[path] if isinstance(packed, Mapping) else (out // 3,) * 3
        if len(given) != 3 or sum(given) != out:
            raise ValueError(f"packed: {path!r} has {out} outputs, but its q, k and v have {tuple(given)}")
        sizes[path] = given
    return sizes


def is_linear(module: nn.Module) -> bool:
    """Say whether a module is a linear layer: torch's, or the `Conv1D` of the transformers library."""
    # transformers is not a dependency, so its class is recognized by name.
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, _ConvTransposeNd) or (is_linear(module) and not isinstance(module, nn.Linear))


def _out_and_in(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    out, inputs = weight.shape
    return (inputs, out) if _is_transposed(module) else (out, inputs)
