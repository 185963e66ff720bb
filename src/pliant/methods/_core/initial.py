"""Draw new initial values for a model, from the distributions of its own initializers."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pliant._seeding import derive_seed
from pliant._warnings import warn_user
from pliant.distributed import held, is_shard, own_part

Init = Callable[[nn.Module], object]


def reset_function(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's `reset_parameters` or `_reset_parameters`, or None."""
    function = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return function if callable(function) else None


def library_init(model: nn.Module, path: str | None = None) -> Init | None:
    """Return how Hugging Face transformers initialize a model, or one of its layers; None for other models.

    Their models draw weights in `_init_weights(module)` from `config`, and leave alone what has the flag
    `_is_hf_initialized`. A nested transformers model initializes its own modules.

    Args:
        model: The model.
        path: The layer that is to be initialized; the whole model if None.
    """
    roots = {name: module for name, module in model.named_modules() if _is_of_transformers(module)}
    if path is None:
        return _init_transformers if roots else None
    above = [name for name in roots if name == "" or path == name or path.startswith(name + ".")]
    return partial(_init_transformers, root=roots[max(above, key=len)]) if above else None


def _is_of_transformers(module: nn.Module) -> bool:
    return callable(getattr(module, "_init_weights", None)) and hasattr(module, "config")


@torch.no_grad()
def _init_transformers(module: nn.Module, root: nn.Module | None = None) -> None:
    """Initialize what belongs to models of transformers, children before their parents.

    Args:
        module: The module.
        root: The model that it belongs to; itself, or the models in it, if None.
    """
    root = module if _is_of_transformers(module) else root
    for child in module.children():
        _init_transformers(child, root)
    if root is not None:
        for tensor in (*module.parameters(), *module.buffers()):
            if hasattr(tensor, "_is_hf_initialized"):
                del tensor._is_hf_initialized
        root._init_weights(module)  # type: ignore[operator]


def check_redrawable(model: nn.Module, init: Init | None, parameters: Iterable[str], *, whole: bool = True) -> None:
    """Raise a ValueError if one of these parameters cannot be re-drawn, or if the model cannot be copied.

    Args:
        model: The model.
        init: A function that initializes a model in place, after each module's own `reset_parameters`.
        parameters: The names of the parameters to re-draw.
        whole: Whether the whole model is re-drawn, not only some of its modules.
    """
    names = list(parameters)
    if init is None and whole:
        init = library_init(model)
    if init is None and not whole:
        known = {name: library_init(model, name.rpartition(".")[0]) for name in names}
        for name in [name for name in names if known[name] is not None]:
            check_redrawable(model, known[name], [name], whole=False)
        names = [name for name in names if known[name] is None]
    if init is None:
        _check_resets(model, names)
        if whole:
            trial = copy_module(model, type(model).__name__)
            with torch.no_grad(), torch.random.fork_rng():
                _reset_all(trial)
            _warn_of_tied(model, names)
    elif whole:
        _check_init(model, type(model).__name__, init, names, given_whole=True)
    else:
        leaves: dict[str, list[str]] = {}
        for name in names:
            leaves.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
        for path, own in leaves.items():
            _check_init(model.get_submodule(path), repr(path or type(model).__name__), init, own, given_whole=False)


def _check_resets(model: nn.Module, names: Iterable[str]) -> None:
    """Raise a ValueError if a module's own initializer does not write one of its parameters."""
    written: dict[str, set[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        module, shown = model.get_submodule(path), repr(path or type(model).__name__)
        if reset_function(module) is None:
            raise ValueError(
                f"model: module {shown} holds the parameter {leaf!r} but has no "
                "reset_parameters(); give it one, or pass init=, a function that initializes a model in place"
            )
        if path not in written:
            written[path] = _parameters_written(module, shown, _reset)
        if leaf not in written[path]:
            raise ValueError(
                f"model: reset_parameters() of module {shown} does not write its parameter {leaf!r}, which a "
                "hook such as spectral_norm may own; pass init=, a function that initializes a model in place"
            )


def _check_init(module: nn.Module, shown: str, init: Init, names: Iterable[str], *, given_whole: bool) -> None:
    """Try on a copy whether `init` runs, and whether it or the modules' initializers write these parameters.

    `init` may ignore a single layer, but it must write something in a whole model.
    """
    given = "the whole model: init=lambda model: model.apply(…)" if given_whole else "single layers"

    def initialize(trial: nn.Module) -> None:
        _reset_all(trial, strict=False)
        try:
            init(trial)
        except Exception as error:
            raise ValueError(
                f"init: it fails on {shown}: {type(error).__name__}: {error}; it is given {given}"
            ) from error

    written = _parameters_written(module, shown, initialize)
    for name in names:
        if name not in written:
            raise ValueError(f"init: it leaves the parameter {name!r} as it is, and no reset_parameters() writes it")
    if given_whole and not _parameters_written(module, shown, init):
        raise ValueError(
            f"init: it changes nothing in a copy of {shown}. Functions such as transformers' init_weights() skip "
            "parameters that have values; pass a function that overwrites them, or leave init out"
        )


def _drawing(module: nn.Module) -> Any:
    """Return the key that says how a module is drawn: the function of its class, or the class."""
    return getattr(type(module), "reset_parameters", type(module))


def _warn_of_tied(model: nn.Module, names: Iterable[str]) -> None:
    """Warn of parameters that modules share whose types have different `reset_parameters`."""
    chosen = {id(model.get_parameter(name)): name for name in names}
    holders: dict[int, dict[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in chosen and reset_function(module) is not None:
                holders.setdefault(id(parameter), {})[path] = module
    tied = {key: held for key, held in holders.items() if len({_drawing(module) for module in held.values()}) > 1}
    if not tied:
        return
    decided = {id(parameter) for parent in _split_resets(model)[1] for parameter in parent.parameters()}
    for key, modules in tied.items():
        if key not in decided:
            shown = " and ".join(f"{type(module).__name__} {path!r}" for path, module in modules.items())
            warn_user(
                f"model: {chosen[key]!r} is shared by {shown}, which initialize it differently, and is drawn as the "
                "last of them draws it; pass init=, a function that initializes a model in place, if that is wrong"
            )


@contextmanager
def seeded(seed: int | None, draw: int) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them afterwards; do nothing if the seed is None.

    The generators are shared by all threads: draws of other threads inside the block use the seed too.

    Args:
        seed: The seed.
        draw: The number of the draw, counted from 0. A resumed run continues with the next number.
    """
    if seed is None:
        yield
        return
    with drawing_from(derive_seed("draw", seed, draw)):
        yield


@contextmanager
def drawing_from(number: int) -> Iterator[None]:
    """Let torch's global generators draw as after `torch.manual_seed(number)`, and restore them afterwards."""
    with torch.random.fork_rng():
        # Without an accelerator, `torch.manual_seed` notes a stack trace for each: more time than drawing.
        seed_all = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
        seed_all(number)
        yield


def draw_fresh(model: nn.Module, init: Init | None = None) -> dict[str, Tensor]:
    """Return newly initialized values of all parameters and buffers by name; the model keeps its values.

    Args:
        model: The model.
        init: A function that initializes a model in place, after each module's own `reset_parameters`. If it is given,
            a `reset_parameters` that fails is ignored.
    """
    init = init or library_init(model)
    fresh = copy_module(model, type(model).__name__)
    for parameter in fresh.parameters():
        # A draw fills memory in order, so the result must not depend on the memory layout of the weights.
        parameter.data = parameter.data.contiguous()
    _reset_all(fresh, strict=init is None)
    if init is not None:
        init(fresh)
    # Tied tensors appear under each of their names.
    return {
        name: tensor.detach()
        for tensors in (
            fresh.named_parameters(remove_duplicate=False),
            fresh.named_buffers(remove_duplicate=False),
        )
        for name, tensor in tensors
    }


@torch.no_grad()
def redraw_(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], init: Init | None = None, bare: Collection[str] = ()
) -> None:
    """Re-draw these parameters in place, and reset the buffers of their modules.

    Args:
        model: The model.
        parameters: The parameters to re-draw, by name.
        init: A function that initializes a model in place, after each module's own `reset_parameters`.
        bare: Modules without parameters whose buffers are reset too.
    """
    fresh = draw_fresh(model, init)
    if parameters:
        torch._foreach_copy_(list(parameters.values()), [fresh[name] for name in parameters])
    owners = {name.rpartition(".")[0] for name in parameters} | set(bare)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[0] in owners:
            buffer.copy_(fresh[name])


def bare_modules(model: nn.Module, below: Iterable[str] = ("",)) -> list[str]:
    """Return the modules at or below these paths that have buffers but no parameters of their own.

    Example:
        >>> bare_modules(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)))
        ['1']
    """
    tops = tuple(below)
    return [
        name
        for name, module in model.named_modules()
        if any(top in ("", name) or name.startswith(top + ".") for top in tops)
        and next(module.buffers(recurse=False), None) is not None
        and next(module.parameters(recurse=False), None) is None
    ]


def _reset_all(model: nn.Module, *, strict: bool = True) -> None:
    """Run the initializers of all modules: parents before children, unless a parent's initializer writes to children.

    Args:
        model: The model.
        strict: Whether an initializer that fails is an error.
    """
    first, last = _split_resets(model, strict=strict)
    for module in (*first, *reversed(last)):
        _reset(module, strict=strict)


def _split_resets(model: nn.Module, *, strict: bool = True) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules whose initializers write only their own parameters, and the others."""
    first: list[nn.Module] = []
    last: list[nn.Module] = []
    for module in model.modules():
        if reset_function(module) is not None:
            (last if _writes_to_children(module, strict=strict) else first).append(module)
    return first, last


def _reset(module: nn.Module, *, strict: bool = True) -> None:
    reset = reset_function(module)
    assert reset is not None
    try:
        reset()
    except Exception as error:  # a missing argument, or an initializer that refuses to be called
        if strict:
            raise ValueError(
                f"model: reset_parameters() of {type(module).__name__} fails: {type(error).__name__}: {error}; "
                "pass init=, a function that initializes a model in place"
            ) from error


def _writes_to_children(module: nn.Module, *, strict: bool = True) -> bool:
    """Try on a copy whether a module's initializer writes parameters of its children."""
    if all(next(child.parameters(), None) is None for child in module.children()):
        return False
    reset = partial(_reset, strict=strict)
    return any("." in name for name in _parameters_written(module, repr(type(module).__name__), reset))


def _parameters_written(module: nn.Module, shown: str, initialize: Init) -> set[str]:
    """Return the parameters of a module and its children that an initializer writes, as tried on a copy."""
    mark, trial = 0.123, copy_module(module, shown)
    named = trial.named_parameters(remove_duplicate=False)
    marked = {name: parameter.detach().fill_(mark) for name, parameter in named}
    with torch.no_grad(), torch.random.fork_rng():
        initialize(trial)
    return {name for name, parameter in marked.items() if not (parameter == torch.full_like(parameter, mark)).all()}


def copy_module(module: nn.Module, shown: str) -> nn.Module:
    """Return a deep copy of a module; tensors in it that have a graph are detached.

    Args:
        module: The module.
        shown: Its name in the error if it cannot be copied.
    """
    try:
        with _DetachedCopies():
            return copy.deepcopy(module)
    except Exception as error:  # e.g. a lock, or sharded parameters
        raise ValueError(
            f"model: {shown} cannot be copied, so its weights cannot be drawn again: {type(error).__name__}: {error}"
        ) from error


class _DetachedCopies(TorchFunctionMode):
    """Let deepcopy detach tensors that have a graph, such as the last distribution that a policy holds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def draw_normal(tensors: Iterable[Tensor], seed: int | None = None, draw: int = 0) -> list[Tensor]:
    """Draw standard normal noise for each tensor, independent of its memory layout (unlike `randn_like`).

    Of the noise for a sharded parameter, each rank keeps its part.

    Args:
        tensors: The tensors.
        seed: The seed: the noise is what the global generators would draw inside `seeded`, and they keep their state.
            None draws from the global generators.
        draw: The number of the draw.
    """
    generators: dict[torch.device, torch.Generator] = {}
    noise = []
    for each in tensors:
        if seed is not None and each.device not in generators:
            generators[each.device] = torch.Generator(each.device).manual_seed(derive_seed("draw", seed, draw))
        whole = held(each) if is_shard(each) else each
        drawn = torch.randn(whole.shape, dtype=each.dtype, device=each.device, generator=generators.get(each.device))
        noise.append(drawn if whole is each else own_part(drawn, whole).contiguous())
    return noise
