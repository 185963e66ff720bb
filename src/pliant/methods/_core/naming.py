"""Modules that a user names."""

from collections.abc import Sequence

from torch import nn

from pliant._names import suggest


def check_modules(argument: str, model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names if each is a module of the model, else raise a ValueError that says so.

    Args:
        argument: What the user gave them as.
        model: The model.
        names: The names.

    Example:
        >>> check_modules("head", nn.Sequential(nn.Linear(1, 1)), ["0"])
        ('0',)
    """
    if isinstance(names, str):
        raise ValueError(f"{argument}: {names!r} is a string; it must be a list of module names, [{names!r}]")
    if not names:
        raise ValueError(f"{argument}: {names!r} names no module")
    known = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            raise ValueError(f"{argument}: the model has no module {name!r}; {suggest(str(name), filter(None, known))}")
    return tuple(names)
