"""Fresh draws of a model's initial values, in the distribution that its own modules initialize themselves with."""

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

Init = Callable[[nn.Module], object]


def reset_function(module: nn.Module) -> Callable[[], object] | None:
    """Return the module's own initializer (torch names it in two ways), or None if it has none."""
    function = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return function if callable(function) else None


def check_redrawable(model: nn.Module, init: Init | None, parameters: Iterable[str], *, whole: bool = True) -> None:
    """Raise a ValueError naming the first of these parameters that cannot be re-drawn, or what cannot be copied.

    Args:
        model: The model.
        init: A function that initializes a model in place, after each module's own `reset_parameters`.
        parameters: The parameters to re-draw, by their names in the model.
        whole: Whether the model is re-drawn, and so copied, as a whole, not only modules of it.
    """
    names = list(parameters)
    if init is None:
        _check_resets(model, names)
        if whole:
            trial = _copy(model, type(model).__name__)
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
    """Raise a ValueError naming the first parameter that its module's own initializer does not write."""
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
                f"model: reset_parameters() of module {shown} leaves its parameter {leaf!r} as it is (that of a hook "
                "such as spectral_norm?); pass init=, a function that initializes a model in place"
            )


def _check_init(module: nn.Module, shown: str, init: Init, names: Iterable[str], *, given_whole: bool) -> None:
    """Try on a copy whether an initializer runs, and whether all that is to be drawn is written.

    A single layer may be none of those that it initializes; that it writes nothing in a whole model is a mistake.
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
            f"init: it writes nothing in a copy of {shown}, whose parameters all have values already (init_weights() "
            "of transformers passes over such); pass what initializes them all the same, or none"
        )


def _warn_of_tied(model: nn.Module, names: Iterable[str]) -> None:
    """Warn of parameters that modules of several kinds hold, each of which would draw them in its own way."""
    chosen = {id(model.get_parameter(name)): name for name in names}
    holders: dict[int, dict[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in chosen and reset_function(module) is not None:
                holders.setdefault(id(parameter), {})[path] = module
    tied = {key: held for key, held in holders.items() if len({type(module) for module in held.values()}) > 1}
    if not tied:
        return
    decided = {id(parameter) for parent in _split_resets(model)[1] for parameter in parent.parameters()}
    for key, held in tied.items():
        if key not in decided:
            shown = " and ".join(f"{type(module).__name__} {path!r}" for path, module in held.items())
            warn_user(
                f"model: {chosen[key]!r} is shared by {shown}, which initialize it differently, and is drawn as the "
                "last of them draws it; pass init=, a function that initializes a model in place, if that is wrong"
            )


@contextmanager
def seeded(seed: int | None, draw: int) -> Iterator[None]:
    """Draw from torch's global generators, or, given a seed, from a stream of our own that leaves them as they are.

    They are the same for all threads: what another one draws meanwhile comes from our stream too.

    Args:
        seed: The stream; None for the global generators.
        draw: Which draw of the stream this is, counted from 0, so that a resumed run goes on where it stopped.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed("draw", seed, draw))
        yield


def draw_fresh(model: nn.Module, init: Init | None = None) -> dict[str, Tensor]:
    """Return newly initialized values of all parameters and buffers by name; the model itself is not touched.

    Args:
        model: The model.
        init: A function that initializes a model in place, after each module's own `reset_parameters`: what it does
            not write is new all the same. Where it is given, a `reset_parameters` that fails does not matter.
    """
    fresh = _copy(model, type(model).__name__)
    for parameter in fresh.parameters():
        # A draw fills memory in order: the layout of the weights must not decide which entry gets which value.
        parameter.data = parameter.data.contiguous()
    _reset_all(fresh, strict=init is None)
    if init is not None:
        init(fresh)
    # Tied tensors appear under each of their names, so that a caller finds whichever it knows.
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
    """Re-draw these parameters in place, and start the buffers of the modules that own them anew.

    Args:
        model: The model.
        parameters: The parameters to re-draw, by their names in the model.
        init: A function that initializes a model in place, after each module's own `reset_parameters`.
        bare: Modules without parameters whose buffers start anew too.
    """
    fresh = draw_fresh(model, init)
    if parameters:
        torch._foreach_copy_(list(parameters.values()), [fresh[name] for name in parameters])
    owners = {name.rpartition(".")[0] for name in parameters} | set(bare)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[0] in owners:
            buffer.copy_(fresh[name])


def bare_modules(model: nn.Module, below: Iterable[str] = ("",)) -> list[str]:
    """Return the modules that are, or lie below, one of these and hold buffers but no parameter of their own.

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
    """Run the initializers of all modules, a parent's before its children's unless it writes to these.

    Args:
        model: The model.
        strict: Whether one that fails is an error; one that another initializer follows may be passed over.
    """
    first, last = _split_resets(model, strict=strict)
    for module in (*first, *reversed(last)):
        _reset(module, strict=strict)


def _split_resets(model: nn.Module, *, strict: bool = True) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules whose initializers write to themselves alone, and those that write to their children."""
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
    except Exception as error:  # whatever it says: an argument that is missing, or that it is not meant to be called
        if strict:
            raise ValueError(
                f"model: reset_parameters() of {type(module).__name__} fails: {type(error).__name__}: {error}; "
                "pass init=, a function that initializes a model in place"
            ) from error


def _writes_to_children(module: nn.Module, *, strict: bool = True) -> bool:
    """Try on a copy whether a module's initializer changes parameters of its children."""
    if all(next(child.parameters(), None) is None for child in module.children()):
        return False
    reset = partial(_reset, strict=strict)
    return any("." in name for name in _parameters_written(module, repr(type(module).__name__), reset))


def _parameters_written(module: nn.Module, shown: str, initialize: Init) -> set[str]:
    """Try on a copy which parameters of a module an initializer writes, its own and those of what it holds."""
    mark, trial = 0.123, _copy(module, shown)
    named = trial.named_parameters(remove_duplicate=False)
    marked = {name: parameter.detach().fill_(mark) for name, parameter in named}
    with torch.no_grad(), torch.random.fork_rng():
        initialize(trial)
    return {name for name, parameter in marked.items() if not (parameter == torch.full_like(parameter, mark)).all()}


def _copy(module: nn.Module, shown: str) -> nn.Module:
    try:
        with _DetachedCopies():
            return copy.deepcopy(module)
    except Exception as error:  # whatever the parts of a model say: a lock, sharded parameters
        raise ValueError(
            f"model: {shown} cannot be copied, to be re-drawn aside: {type(error).__name__}: {error}"
        ) from error


class _DetachedCopies(TorchFunctionMode):
    """Copy tensors that have a graph without it: a policy may hold its last distribution, which could not be copied."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def draw_normal(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Draw standard normal noise for each tensor.

    By shape: `randn_like` fills in the order of memory, so that another layout would get another noise.
    """
    return [torch.randn(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
