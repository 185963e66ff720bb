"""The networks of the papers, as plain modules with seeded initial weights."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pliant._importing import import_object
from pliant._names import check_names, keyword_options, suggest
from pliant._seeding import drawing_for
from pliant._validation import check_positive_int
from pliant.models.cnn import cnn, strided_cnn
from pliant.models.gpt import gpt
from pliant.models.mlp import mlp
from pliant.models.resnet import resnet18
from pliant.models.vgg import vgg16
from pliant.models.vit import vit_tiny
from pliant.running import eval_mode

__all__ = [
    "Builder",
    "ModelInfo",
    "cnn",
    "create",
    "gpt",
    "info",
    "mlp",
    "names",
    "options",
    "resnet18",
    "strided_cnn",
    "vgg16",
    "vit_tiny",
]

Builder = Callable[..., nn.Module]
"""Makes a network from the shape of an input, the number of classes and keyword options."""


@dataclass(frozen=True)
class ModelInfo:
    """A named network.

    Args:
        name: The name that `create` takes.
        build: The function that builds it.
        summary: A one-line description.
        paper: The papers that use it.
        preset: Options that differ from the builder's defaults.
    """

    name: str
    build: Builder
    summary: str
    paper: str
    preset: dict[str, Any] = field(default_factory=dict)


_MODELS = {
    model.name: model
    for model in (
        ModelInfo("mlp", mlp, "3 weight layers, 100 hidden units", "Soft weight rescaling, D.1"),
        ModelInfo("mlp_4x256", mlp, "4 hidden layers of 256", "Spectral regularization, B", {"widths": (256,) * 4}),
        ModelInfo(
            "mlp_4x256_ln",
            mlp,
            "4 hidden layers of 256, LayerNorm",
            "Spectral regularization, B",
            {"widths": (256,) * 4, "layer_norm": True},
        ),
        ModelInfo("mlp_3x256", mlp, "3 hidden layers of 256", "Curvature, B.1", {"widths": (256,) * 3}),
        ModelInfo(
            "mlp_residual",
            mlp,
            "5 hidden layers of 100, shortcuts around 4, no norm",
            "beyond the papers",
            {"widths": (100,) * 5, "residual": True},
        ),
        ModelInfo("cnn", cnn, "2 convolutions 5x5, 16 channels, 100 units", "Soft weight rescaling, D.1"),
        ModelInfo("cnn_bn", cnn, "the same with BatchNorm", "Soft weight rescaling, D.1", {"batch_norm": True}),
        ModelInfo("cnn_strided", strided_cnn, "4 convolutions with stride 2, 512 units", "Curvature, B.3"),
        ModelInfo("vgg16", vgg16, "VGG-16 with BatchNorm, 4096 units", "Soft weight rescaling, D.1; FIRE, §4.1"),
        ModelInfo("resnet18", resnet18, "ResNet-18 for small images", "Spectral regularization, B; FIRE, §4.1"),
        ModelInfo("gpt", gpt, "GPT, 4 blocks of width 128", "FIRE, §4.2 (0.1 billion parameters there)"),
        ModelInfo("vit_tiny", vit_tiny, "ViT-Tiny for small images", "Spectral regularization, B; FIRE, §4.1"),
    )
}


def names() -> tuple[str, ...]:
    """Return the names of the networks."""
    return tuple(_MODELS)


def info(name: str) -> ModelInfo:
    """Return the record of a network."""
    if name not in _MODELS:
        raise ValueError(f"model is {name!r}; {suggest(name, names())}")
    return _MODELS[name]


def options(name: str) -> dict[str, Any]:
    """Return a network's options with their defaults."""
    return keyword_options(info(name).build) | info(name).preset


def create(name: str, shape: tuple[int, ...], classes: int, /, *, seed: int = 0, **settings: Any) -> nn.Module:
    """Make a network with seeded initial weights, without touching the global generators.

    Args:
        name: One of `names()`, or a user's builder as `module:function` or `file.py:function`. A user's builder takes
            the shape and the number of classes, or neither. Its arguments with defaults are options, unless their
            names contain "shape" or "class".
        shape: Shape of one input.
        classes: Number of outputs.
        seed: Seed of the initial weights.
        settings: The builder's options.

    Returns:
        The network.
    """
    arguments = (shape, check_positive_int("classes", classes))
    if ":" in name:
        return create_own(name, arguments, settings, seed)
    check_names(f"model {name!r}", settings, options(name))
    return _build(name, info(name).build, arguments, info(name).preset | settings, seed)


def create_own(name: str, arguments: tuple[Any, ...], settings: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """Make a network with a user's builder, whose arguments may have any names.

    Args:
        name: `module:function` or `file.py:function`.
        arguments: The shape of one input and the number of classes; empty if unknown.
        settings: The builder's options.
        seed: Seed of the initial weights.

    Returns:
        The network. If the shape is known, lazy layers are initialized. A model of `transformers` returns its logits
        alone, as the training loop and the measures need them.
    """
    build: Builder = import_object(name)
    model = _build(name, build, _arguments_of(name, build, arguments, settings), settings, seed)
    if any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        model.register_forward_hook(_take_logits)
    if arguments and any(map(is_lazy, model.parameters())):
        # Methods, copies and checkpoints need weights, which lazy layers draw at the first forward pass.
        with drawing_for("lazy", seed), torch.no_grad(), eval_mode(model):
            model(torch.zeros(2, *arguments[0]))
    return model


def _take_logits(_: nn.Module, __: Any, output: Any) -> Any:
    logits = getattr(output, "logits", None)
    return output if logits is None else logits


_BUILT: WeakSet[nn.Module] = WeakSet()
"""All living networks. A builder that returns one of them again would return trained weights."""


def _build(name: str, build: Builder, arguments: tuple[Any, ...], settings: Mapping[str, Any], seed: int) -> nn.Module:
    with drawing_for("model", seed):
        model = build(*arguments, **settings)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} returned {type(model).__name__}; it must return a torch.nn.Module")
    if model in _BUILT:
        raise ValueError(f"model {name!r} returned the same network twice; it must build a new one each time")
    _BUILT.add(model)
    return model


def _arguments_of(name: str, build: Builder, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments to pass to a user's builder: these, or none."""
    signature = inspect.signature(build)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in signature.parameters.values() if p.kind in by_position and p.name not in options]
    # An argument with a default is an option, unless its name contains "shape" or "class".
    named = zip(places, ("shape", "class"), strict=False)
    own = any(p.default is not p.empty and word not in p.name for p, word in named)
    for chosen in ((),) if own else (arguments, ()):
        with contextlib.suppress(TypeError):
            signature.bind(*chosen, **options)
            return chosen
    given = ", ".join([*(("shape", "classes") if arguments else ()), *(f"{key}=…" for key in options)])
    other = (
        "or without shape and classes"
        if arguments
        else "because shape and classes are unknown without data: give the data too"
    )
    defaults = ". Arguments with defaults get neither, unless 'shape' and 'class' are in their names" if own else ""
    raise ValueError(f"model {name!r} takes {signature}; it is called with ({given}), {other}{defaults}")
