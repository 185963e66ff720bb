"""Pieces that several of the networks share."""

from collections.abc import Callable

from torch import Tensor, nn

from pliant.spelling import suggest

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """Make an activation module by name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; {suggest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


_INITIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "he": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
    "xavier": nn.init.xavier_uniform_,
}


def initialise_(model: nn.Module, initial: str) -> None:
    """Draw the weights of linear maps anew, with biases of zero; "torch" leaves all as PyTorch has drawn it."""
    if initial == "torch":
        return
    if initial not in _INITIAL:
        raise ValueError(f"initial is {initial!r}; {suggest(initial, ('torch', *_INITIAL))}")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _INITIAL[initial](module.weight)
            nn.init.zeros_(module.bias)


def require_image(shape: tuple[int, ...], network: str) -> tuple[int, int, int]:
    """Check that inputs are images and return channels, height and width."""
    if len(shape) != 3:
        raise ValueError(f"shape is {shape}; {network} takes images [channels, height, width]")
    channels, height, width = shape
    return channels, height, width
