"""Activations, initialization and checks that several networks share."""

from collections.abc import Callable

from torch import Tensor, nn

from pliant._names import suggest

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


class Linear(nn.Linear):
    """A linear layer whose `reset_parameters` uses the network's initialization."""

    initial = "torch"

    def reset_parameters(self) -> None:
        """Draw the weights as PyTorch does, or by `initial` with biases of zero."""
        if self.initial == "torch":
            super().reset_parameters()
        else:
            _INITIAL[self.initial](self.weight)
            nn.init.zeros_(self.bias)


def initialize_(model: nn.Module, initial: str) -> None:
    """Set the initialization of each `Linear` and draw its weights; "torch" changes nothing."""
    if initial == "torch":
        return
    if initial not in _INITIAL:
        raise ValueError(f"initial is {initial!r}; {suggest(initial, ('torch', *_INITIAL))}")
    for module in model.modules():
        if isinstance(module, Linear):
            module.initial = initial
            module.reset_parameters()


def require_image(shape: tuple[int, ...], network: str) -> tuple[int, int, int]:
    """Check that inputs are images and return channels, height and width."""
    if len(shape) != 3:
        raise ValueError(f"shape is {shape}; {network} takes images [channels, height, width]")
    channels, height, width = shape
    return channels, height, width
