"""Write the Python code that applies a remedy to a checkpoint."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from pliant import methods
from pliant.experiments.run_config import Part, RunConfig

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}


def write_code(config: RunConfig, shape: tuple[int, ...], classes: int) -> str:
    """Return a Python function that prepares tonight's network and optimizer as a run did.

    Args:
        config: The run: its network, checkpoint, methods, optimizer, and whether it started from scratch.
        shape: The shape of one input.
        classes: The number of outputs of the network.

    Returns:
        A module with a function `prepare(batches)`, which returns the network and its optimizer.
    """
    start, training = config.start, config.training
    if start is None:
        raise ValueError("config.start is None; there is code only for runs that start from a checkpoint")
    loads = not config.fresh
    model = _call("models.create", repr(config.model.name), repr(tuple(shape)), str(classes), **config.model.options)
    remembers = [part for part in config.methods if _takes(part, "example")]
    body = [
        f"model = {model}" + ("  # untrained: its values are the methods' initial values" if config.methods else ""),
        *(["example, _ = next(iter(batches))"] if remembers else []),
        *(
            f"{name} = {_call(f'pliant.{methods.info(part.name).cls.__name__}', *_arguments(part), **part.options)}"
            for name, part in _named(config.methods)
        ),
        *([f"load_into(model, {_literals(start.path, start.key)})"] if loads else []),
        f"optimizer = {_write_optimizer(training)}",
        *(
            [f"load_optimizer_into(optimizer, {_literals(start.path, start.optimizer)})"]
            if loads and start.optimizer
            else []
        ),
        *(_act(name, part) for name, part in _named(config.methods)),
        "return model, optimizer",
    ]
    loaders = [*(["load_into"] if loads else []), *(["load_optimizer_into"] if loads and start.optimizer else [])]
    imports = [
        "import torch",
        "",
        *(["import pliant"] if config.methods else []),
        "from pliant import models",
        *([f"from pliant.diagnostics.checkpoints import {', '.join(loaders)}"] if loaders else []),
    ]
    documented = [
        '"""Return the network and its optimizer for tonight\'s training.',
        "",
        "Args:",
        "    batches: Tonight's training data, pairs of inputs and labels.",
        '"""',
    ]
    lines = [*imports, "", "", "def prepare(batches):", *(f"    {line}".rstrip() for line in (*documented, *body))]
    return "\n".join(lines) + "\n"


def _named(parts: Iterable[Part]) -> list[tuple[str, Part]]:
    return [(part.name, part) for part in parts]


def _takes(part: Part, argument: str) -> bool:
    return argument in inspect.signature(methods.info(part.name).cls).parameters


def _arguments(part: Part) -> list[str]:
    return ["model", *(["example"] if _takes(part, "example") else [])]


def _act(name: str, part: Part) -> str:
    if methods.info(part.name).kind != "reinitializer":
        return f"{name}.attach(optimizer)"
    return f"{name}.apply(optimizer, batches=batches, loss_fn=torch.nn.functional.cross_entropy)"


def _write_optimizer(training: Any) -> str:
    options: Mapping[str, Any] = {
        "lr": training.lr,
        **({"momentum": training.momentum} if training.momentum else {}),
        **({"weight_decay": training.weight_decay} if training.weight_decay else {}),
    }
    return _call(f"torch.optim.{_OPTIMIZERS[training.optimizer]}", "model.parameters()", **options)


def _literals(path: str, key: str) -> str:
    return ", ".join(repr(each) for each in (path, key) if each)


def _call(function: str, *arguments: str, **options: Any) -> str:
    """Write a call.

    Example:
        >>> _call("torch.optim.Adam", "parameters", lr=0.1)
        'torch.optim.Adam(parameters, lr=0.1)'
    """
    return f"{function}({', '.join([*arguments, *(f'{key}={value!r}' for key, value in options.items())])})"
