"""The matrices inside a model's weights: linear maps, the spatial slices of convolutions, and packed q, k and v.

A weight is not always one matrix. A convolution holds one [C_out, C_in] map for each place of its kernel, and attention
often packs its query, key and value maps into one tensor. A method that speaks of a layer's matrix asks here which ones
there are. Attention is recognized by the names that its projections usually bear, a query beside a key; a layer that
packs its maps under another name, or in another order, is named by the user. A weight of three or more dimensions may
also be a stack, one matrix for each member of an ensemble or each expert: what is no kernel of a convolution may be.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

Role = Literal["q", "k", "v"]
Packed = Sequence[str] | Mapping[str, Sequence[int]]
_ROLES: tuple[Role, Role, Role] = ("q", "k", "v")

_FUSED_NAMES = frozenset({"qkv", "to_qkv", "qkv_proj", "in_proj", "c_attn", "wqkv"})
_SEPARATE_NAMES: dict[str, Role] = {
    f"{prefix}{name}{suffix}": role
    for role, word in zip(_ROLES, ("query", "key", "value"), strict=True)
    for name in (role, word)
    for prefix in ("", "to_", "w", "w_", "c_")
    for suffix in ("", "_proj", "_lin", "_linear")
}

_CONVOLUTION = re.compile(r"conv(?:_transpose)?([123])d|convolution")
_CONTAINERS = (ParametrizationList, nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Matrix:
    """One linear map in a weight, or one for each place of a convolution's kernel.

    Attributes:
        parameter: The weight's name in `named_parameters()`.
        role: "q", "k" or "v" if it is a projection of attention, else None.
        start: Where its outputs start in a weight that packs several; None for the whole weight.
        stop: Where they end (exclusive).
        transposed: Whether the weight is stored as [in, out].
    """

    parameter: str
    role: Role | None = None
    start: int | None = None
    stop: int | None = None
    transposed: bool = False

    def __str__(self) -> str:
        return self.parameter if self.start is None else f"{self.parameter}[{self.role}]"

    def view(self, weight: Tensor) -> Tensor:
        """Return the map as a view of the weight: [out, in], after the dimensions of a convolution's kernel."""
        matrix = weight.movedim((0, 1), (-2, -1))
        if self.transposed:
            matrix = matrix.mT
        if self.start is not None and self.stop is not None:
            matrix = matrix.narrow(-2, self.start, self.stop - self.start)
        return matrix


def find_matrices(model: nn.Module, packed: Packed = ()) -> list[Matrix]:
    """Return the matrices of all linear, convolution and attention layers, in the model's order; tied ones once.

    Known are `nn.Linear`, `nn.Conv*d` (also transposed), `nn.MultiheadAttention` with packed and with separate maps,
    and the transposed `Conv1D` of the transformers library. A linear layer whose name is usual for packed maps
    (`qkv`, `c_attn`, `in_proj` …) and that is three times as wide as its input is cut in three.

    Args:
        model: The model.
        packed: The linear layers that pack q, k and v one after the other under another name, or with other sizes than
            a third each: module names, or a mapping from module name to the three numbers of outputs.

    Raises:
        ValueError: If a module that is named in `packed` is no linear layer, or has another number of outputs.
    """
    sizes = _packed_sizes(model, packed)
    attentions = _attentions(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[tuple[str, int | None], Matrix] = {}
    for path, module in model.named_modules():
        separate = _separate_role(path) if path.rpartition(".")[0] in attentions else None
        for leaf, roles in _roles(module, path, sizes.get(path), separate):
            weight = getattr(module, leaf)
            # Nothing could be written to a weight that is computed.
            if id(weight) not in names:
                continue
            start = None if len(roles) == 1 else 0
            for role, width in roles:
                stop = None if start is None else start + width
                matrix = Matrix(names[id(weight)], role, start, stop, _is_transposed(module))
                found.setdefault((matrix.parameter, start), matrix)
                start = stop
    return list(found.values())


def find_computed(model: nn.Module) -> list[str]:
    """Return the linear, convolution and attention layers whose weight is computed from others, by name.

    Nothing can be written to such a weight: a parametrization's, or that of a hook.

    Example:
        >>> find_computed(nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
        ['1']
    """
    own = {id(parameter) for parameter in model.parameters()}
    computed = []
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | _ConvNd) or is_linear(module):
            leaves = (leaf for leaf, _ in _roles(module, path, None, None))
            if _is_parametrized(module) or any(id(getattr(module, leaf)) not in own for leaf in leaves):
                computed.append(path)
    return computed


def is_stack(model: nn.Module, name: str, weight: Tensor) -> bool:
    """Say whether a weight may hold several matrices: the members of an ensemble, the experts of a mixture.

    One of three or more dimensions may, [n, in, out] or [n, out, in] or in any other order, unless it is known what it
    is: a kernel, of a convolution of torch's or of a module whose own code calls one for as many dimensions by its
    usual name (`F.conv2d`), or the weight of `nn.Bilinear`. One that is tied is known if one of its modules tells.

    Args:
        model: The model that holds the weight.
        name: Its name in the model; that of a parametrization's tensor too.
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


def _is_one_map(model: nn.Module, name: str, weight: Tensor) -> bool:
    path = name.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), _CONTAINERS):
        path = path.rpartition(".")[0]  # it is the module around a container that reads what it holds
    module = model.get_submodule(path)
    return isinstance(module, _ConvNd | nn.Bilinear) or _calls_convolution(module, weight.ndim)


def _calls_convolution(module: nn.Module, ndim: int) -> bool:
    """Say whether the code of a module's class calls a convolution, by a kernel of so many dimensions.

    Submodules do not count.
    """
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


def _roles(
    module: nn.Module, path: str, sizes: Sequence[int] | None, separate: Role | None
) -> Iterator[tuple[str, list[tuple[Role | None, int]]]]:
    """Yield the weights of a module, each with its maps in order: what they are for, and how many outputs they have."""
    if _is_parametrized(module):
        # It is computed whenever it is read, and a spectral norm takes that for a step of training.
        return
    if isinstance(module, nn.MultiheadAttention):
        if module.in_proj_weight is not None:
            yield "in_proj_weight", [(role, module.embed_dim) for role in _ROLES]
        else:
            for role in _ROLES:
                yield f"{role}_proj_weight", [(role, module.embed_dim)]
    elif isinstance(module, _ConvNd):
        yield "weight", [(None, module.out_channels)]
    elif is_linear(module):
        leaf = path.rpartition(".")[2].lower()
        out, inputs = _out_and_in(module)
        if sizes is None and leaf in _FUSED_NAMES and out == 3 * inputs:
            sizes = (inputs, inputs, inputs)
        if sizes is not None:
            yield "weight", list(zip(_ROLES, sizes, strict=True))
        else:
            yield "weight", [(separate, out)]


def _separate_role(path: str) -> Role | None:
    return _SEPARATE_NAMES.get(path.rpartition(".")[2].lower())


def _attentions(model: nn.Module) -> set[str]:
    """Return the modules that hold a query map beside a key map: one alone may be any layer that is called so."""
    held: dict[str, set[Role | None]] = {}
    for path, module in model.named_modules():
        if is_linear(module):
            held.setdefault(path.rpartition(".")[0], set()).add(_separate_role(path))
    return {parent for parent, roles in held.items() if {"q", "k"} <= roles}


def _packed_sizes(model: nn.Module, packed: Packed) -> dict[str, Sequence[int]]:
    if isinstance(packed, str):
        raise ValueError(f"packed: {packed!r} is a string; it must be a list of module names, [{packed!r}]")
    modules = dict(model.named_modules())
    sizes: dict[str, Sequence[int]] = {}
    for path in packed:
        module = modules.get(path)
        if module is None or not is_linear(module):
            kind = "no module of the model" if module is None else f"a {type(module).__name__}, not a linear layer"
            raise ValueError(f"packed: {path!r} is {kind}")
        out = _out_and_in(module)[0]
        given = packed[path] if isinstance(packed, Mapping) else (out // 3,) * 3
        if len(given) != 3 or sum(given) != out:
            raise ValueError(f"packed: {path!r} has {out} outputs, which {tuple(given)} of q, k and v do not add up to")
        sizes[path] = given
    return sizes


def is_linear(module: nn.Module) -> bool:
    """Say whether a module is a linear layer: torch's, or the `Conv1D` of the transformers library."""
    # transformers is no dependency, so its class is known by name.
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, _ConvTransposeNd) or (is_linear(module) and not isinstance(module, nn.Linear))


def _out_and_in(module: nn.Module) -> tuple[int, int]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    out, inputs = weight.shape
    return (inputs, out) if _is_transposed(module) else (out, inputs)
