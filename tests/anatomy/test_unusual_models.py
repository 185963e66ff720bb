"""Models that people write otherwise than in textbooks: computed weights, shared norm layers, preallocated results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pliant import SWR, ReDo
from pliant.anatomy import GraphError
from pliant.anatomy.unit_tracker import find_units


class Computed(nn.Module):
    """A layer whose weight is made of two parameters by a function, and one behind it."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor], rows: int = 8) -> None:
        super().__init__()
        self.make = make
        self.a, self.b = (nn.Parameter(torch.randn(rows, 8)) for _ in "ab")
        self.out = nn.Linear(len(make(self.a, self.b)), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(F.linear(x, self.make(self.a, self.b))))


NOISE = torch.randn(8, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a + b * NOISE.to(b),
        lambda a, b: a + b * torch.randn_like(b),
        lambda a, b: torch.tril(a) + b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: F.dropout(a, 0.5) + b,
        lambda a, b: a.abs() - b,
        lambda a, b: a + b @ b,
    ],
)
def test_tensors_that_a_weight_is_computed_from_are_weights(make: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = Computed(make).double(), torch.randn(4, 8, dtype=torch.float64)
    swr = SWR(model, x, lam=1.0)
    assert set(swr._weight_names) == {"a", "b", "out.weight"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(float(torch.rand(())) + 0.5)

    def outputs() -> Tensor:
        torch.manual_seed(0)
        return model(x).detach()

    before = outputs()
    swr.step()
    ratio = outputs() / before
    torch.testing.assert_close(ratio, ratio.flatten()[:1].expand_as(ratio).contiguous(), rtol=1e-10, atol=0)


class Centred(nn.Module):
    """A norm layer by hand whose scale is 1 + γ, and a temperature: neither has a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.temperature = nn.Parameter(torch.randn(8)), nn.Parameter(torch.tensor(0.5))
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-12) * (1 + self.gamma)
        return self.out(F.relu(h)) * self.temperature.exp()


@pytest.mark.parametrize("on_conflict", ["preserve", "rescale"])
def test_a_tensor_without_a_scale_is_not_a_weight(on_conflict: str) -> None:
    assert SWR(Centred(), torch.randn(4, 8), plan={"on_conflict": on_conflict})._weight_names == [
        "inner.weight",
        "out.weight",
    ]


class Twins(nn.Module):
    """One encoder with a norm layer for two views."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(x), self.encoder(y)


class SharedNorm(nn.Module):
    """One norm layer behind two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(torch.relu(self.norm(self.a(x)))))


@pytest.mark.parametrize(("model", "inputs"), [(Twins(), 2), (SharedNorm(), 1)])
def test_a_norm_layer_that_is_called_twice_is_the_same_in_both_modes(model: nn.Module, inputs: int) -> None:
    example = tuple(torch.randn(4, 8) for _ in range(inputs))
    trained, evaluated = (SWR(model.train(mode), example)._weight_names for mode in (True, False))
    assert set(trained) == set(evaluated) == {name for name, p in model.named_parameters() if "bias" not in name}


class Interleaving(nn.Module):
    """Writes into what it has allocated, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        turned = torch.empty_like(q)
        turned[..., 0::2] = q[..., 0::2] - q[..., 1::2]
        turned[..., 1::2] = q[..., 1::2] + q[..., 0::2]
        return self.out(F.relu(turned))


def test_tensors_that_are_allocated_first_and_written_later() -> None:
    for _ in range(5):
        swr = SWR(Interleaving(), torch.randn(2, 5, 8))
        assert swr._weight_names == ["query.weight", "out.weight"]


class Aliases(nn.Module):
    """Calls by their second names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        left = torch.clip(self.a(x), min=0)
        right = torch.absolute(torch.multiply(torch.subtract(self.b(x), 0), 2.0))
        return self.out(torch.concat([left, torch.true_divide(right, 3.0)], 1))


def test_second_names_of_calls_are_known() -> None:
    assert SWR(Aliases(), torch.randn(4, 8))._weight_names == ["a.weight", "b.weight", "out.weight"]


class Trace(nn.Module):
    """A sum over a diagonal, without a named result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(3, 3)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * torch.einsum("ii", self.weight)


def test_einsum_without_an_arrow() -> None:
    assert set(SWR(Trace(), torch.randn(4, 8))._weight_names) == {"weight", "out.weight"}


class Masked(nn.Module):
    """Looks at some of the positions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out(F.relu(self.inner(x)[mask]))


@pytest.mark.parametrize("method", [SWR, ReDo])
def test_a_size_that_depends_on_data_is_an_error_with_its_line(method: type) -> None:
    with pytest.raises(GraphError, match=r"the size of index in the model \(Masked\), .*depends on the data"):
        method(Masked(), (torch.randn(4, 8), torch.tensor([True, False, True, True])))


def test_an_example_of_another_precision_is_an_error() -> None:
    with pytest.raises(GraphError, match=r"^example: Linear cannot be called with it: .*same dtype.*Float$"):
        SWR(nn.Linear(4, 2), torch.randn(3, 4).double())


class ReLUSquared(nn.Module):
    """Homogeneous, of degree two."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) ** 2


class GELUNet(nn.Module):
    """Has the name of an activation, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.body(x))


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.SELU(), nn.CELU(), nn.GELU(), ReLUSquared()])
def test_only_the_given_activations_are_approximated(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 2))
    told = SWR(model, torch.randn(4, 8), plan={"approximate": {"elu"}}).explain().splitlines()[-1]
    assert told == "Treated as relu, so the function is kept approximately: 1 × elu."


def test_a_model_named_after_an_activation_is_not_approximated() -> None:
    assert "Treated as relu" not in SWR(GELUNet(), torch.randn(4, 8), plan={"approximate": {"gelu"}}).explain()


def test_pooling_over_units_mixes_them() -> None:
    def groups(model: nn.Module, *shape: int) -> list[str]:
        return [group.name for group in find_units(model, torch.randn(shape)).groups]

    mixing = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.MaxPool1d(3, 1, 1), nn.Linear(6, 2))
    assert groups(mixing, 4, 8) == []
    images = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3))
    assert groups(images, 3, 8, 8) == groups(images, 2, 3, 8, 8) == ["0"]


class GaussianPolicy(nn.Module):
    """Makes a distribution of what it computes, which checks its arguments: a look at the data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.distributions.Normal(self.body(x), torch.ones(2)).mean


@pytest.mark.parametrize("validates", [True, False])
def test_distributions_do_not_check_their_arguments_while_they_are_traced(validates: bool) -> None:
    usual = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(validates)
    try:
        assert [group.name for group in find_units(GaussianPolicy(), torch.randn(4, 8)).groups] == ["body.0"]
        assert torch.distributions.Distribution._validate_args is validates
    finally:
        torch.distributions.Distribution.set_default_validate_args(usual)
