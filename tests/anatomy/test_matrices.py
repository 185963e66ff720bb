"""Which weights may be several matrices."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pliant.anatomy.matrices import is_stack


class Stacked(nn.Module):
    """A linear layer for each member of an ensemble, beside a convolution that does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4, 3))
        self.conv1d = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.conv1d((x @ self.weight).mT)


def decorated(function: Any) -> Any:
    return functools.wraps(function)(lambda *args: function(*args))


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.weight)


class Inheriting(Kernel):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Decorated(Kernel):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return (lambda weight: torch.conv1d(x, weight))(self.weight)


class Kernels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.ModuleDict({"deep": nn.ParameterList([torch.zeros(4, 3, 2, 2)])})

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv_transpose2d(x, self.held["deep"][0])


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Blurring(nn.Module):
    """An ensemble that blurs its frames: the convolution reads a kernel of four dimensions, not what has three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.blur = nn.Parameter(torch.zeros(5, 4, 3)), nn.Parameter(torch.zeros(1, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.blur).flatten(1) @ self.weight


def stacks(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if is_stack(model, name, parameter)]


@pytest.mark.parametrize("outer", [lambda m: m, nn.Sequential])
def test_what_no_convolution_reads_may_be_several_matrices(outer: Any) -> None:
    model = outer(Stacked())
    assert [name.rpartition("0.")[2] for name in stacks(model)] == ["weight"]
    assert [name.rpartition("0.")[2] for name in stacks(outer(Blurring()))] == ["weight"]


@pytest.mark.parametrize(
    "module", [nn.Conv1d(4, 5, 3), nn.ConvTranspose3d(4, 5, 3), nn.Bilinear(3, 4, 5), nn.Linear(3, 4), nn.LSTM(3, 4),
               Kernel(), Inheriting(), Decorated(), Kernels()],
    ids=lambda module: type(module).__name__,
)  # fmt: skip
def test_kernels_and_matrices_are_none(module: nn.Module) -> None:
    assert stacks(module) == stacks(nn.Sequential(module)) == []


def test_what_a_weight_is_computed_from_is_what_the_weight_is() -> None:
    model = nn.ModuleDict({"stacked": Stacked(), "kernel": Kernel(), "conv": nn.Conv2d(2, 3, 3)})
    for module in model.values():
        nn.utils.parametrize.register_parametrization(module, "weight", Half())
    assert stacks(model) == ["stacked.parametrizations.weight.original"]
    assert is_stack(model, "stacked.weight", model["stacked"].weight)
    assert not is_stack(model, "kernel.weight", model["kernel"].weight)


def test_a_tied_weight_is_known_by_any_of_its_modules() -> None:
    model = nn.Sequential(Stacked(), nn.Conv1d(4, 5, 3))
    assert stacks(model) == ["0.weight"]
    model[0].weight = model[1].weight
    assert stacks(model) == []
