"""ReDo and continual backprop against one-unit-at-a-time references, and what every recycler must keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from pliant import ContinualBackprop, ReDo, SpectralRegularization
from pliant.methods._core.initial import draw_fresh, seeded
from pliant.methods._core.recycler import SumByUnit, sum_except
from pliant.models import create
from tests import zoo
from tests.loops import snapshot, steady_adam, train, training_step
from tests.reference import recycling as reference
from tests.reference.recycling import Wire


def wires_of(model: nn.Module, paths: list[tuple[str, str | None, str]]) -> list[Wire]:
    get = model.get_submodule
    return [Wire(get(p), None if n is None else get(n), get(r)) for p, n, r in paths]


Case = tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, str | None, str]]]

CASES: dict[str, Case] = {
    "mlp": (zoo.mlp, (8, 12), [("0", None, "2"), ("2", None, "4")]),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(27, 6), nn.Tanh(), nn.Linear(6, 5),
        ),
        (8, 1, 12, 12),
        [("0", None, "3"), ("3", None, "6"), ("6", None, "8")],
    ),
    "cnn_bn": (zoo.cnn_bn, (8, 1, 12, 12), [("0", "1", "4"), ("4", "5", "9"), ("9", None, "11")]),
    "resnet": (
        lambda: create("resnet18", (3, 8, 8), 5, width=3),
        (16, 3, 8, 8),  # The last layers normalize one value an image: of few images, they magnify rounding.
        [(f"{i}.conv1", f"{i}.norm1", f"{i}.conv2") for i in range(3, 11)],
    ),
    "vit": (
        lambda: create("vit_tiny", (3, 8, 8), 5, width=6, depth=2, heads=2),
        (4, 3, 8, 8),
        [(f"{i}.mlp.0", None, f"{i}.mlp.2") for i in (1, 2)],
    ),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, list[Wire], Callable[[int], tuple[Tensor, Tensor]]]:
    make, shape, paths = CASES[name]
    torch.manual_seed(11)
    model = make().double()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
        return inputs, torch.randint(0, 5, (shape[0],), generator=generator)

    return model, wires_of(model, paths), batch


def assert_equal_runs(left: nn.Module, right: nn.Module, one: Optimizer, two: Optimizer) -> None:
    for (name, a), b in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(one.state[a][key], two.state[b][key], rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_redo_matches_the_reference(name: str) -> None:
    model, _, batch = build(name)
    control, wires, _ = build(name)
    one, two = steady_adam(model), steady_adam(control)
    redo = ReDo(model, batch(0)[0], tau=0.95, every=3, seed=5).attach(one)
    total = 0
    for step in range(1, 8):
        training_step(model, one, batch(step))
        seen = reference.watch(control, wires, batch(step)[0])
        training_step(control, two, batch(step))
        if step % 3 == 0:
            with seeded(5, step // 3 - 1):
                renewed = reference.redo(wires, seen, 0.95, lambda m: draw_fresh(m)["weight"], two)
            receipt = redo.receipt
            assert receipt is not None
            found = [receipt.details["units"].get(group, []) for group in redo.groups]
            assert found == renewed
            total += sum(map(len, renewed))
    assert total > 0
    assert sum(redo.receipt.details["units_so_far"].values()) == total
    assert_equal_runs(model, control, one, two)


@pytest.mark.parametrize(
    ("name", "utility"),
    [*((name, "contribution") for name in CASES), *(("cnn_bn", u) for u in ("adaptation", "adaptable", "weight"))],
)
def test_continual_backprop_matches_the_reference(name: str, utility: str) -> None:
    model, _, batch = build(name)
    control, wires, _ = build(name)
    one, two = steady_adam(model), steady_adam(control)
    cbp = ContinualBackprop(model, batch(0)[0], rate=0.07, maturity=2, utility=utility, seed=5).attach(one)
    plain = reference.ContinualBackprop(wires, rate=0.07, maturity=2, kind=utility)
    draws = total = 0
    for step in range(1, 16):
        training_step(model, one, batch(step))
        seen = reference.watch(control, wires, batch(step)[0])
        training_step(control, two, batch(step))
        with seeded(5, draws):
            renewed = plain.step(seen, _kaiming, two)
        draws += any(renewed)
        total += sum(map(len, renewed))
        for group, utilities, ages in zip(cbp.groups, plain.utility, plain.age, strict=True):
            torch.testing.assert_close(cbp.utilities[group].tolist(), utilities, rtol=1e-8, atol=1e-12)
            assert cbp.ages[group].tolist() == ages
    assert total > len(wires)
    assert sum(int(n.sum()) for n in cbp.renewals.values()) == total
    assert_equal_runs(model, control, one, two)


def test_random_choices_are_seeded_and_spare_young_units() -> None:
    def renewed(seed: int) -> dict[str, list[int]]:
        model, _, batch = build("mlp")
        optimizer = SGD(model.parameters(), lr=0.0)
        cbp = ContinualBackprop(model, batch(0)[0], rate=0.2, maturity=3, utility="random", seed=seed).attach(optimizer)
        for step in range(5):
            training_step(model, optimizer, batch(step))
            assert step >= 3 or not any(int(n.sum()) for n in cbp.renewals.values())
        return {name: n.tolist() for name, n in cbp.renewals.items()}

    assert renewed(1) == renewed(1) != renewed(2)


@pytest.mark.parametrize("reset_step", [False, True])
def test_redo_can_let_the_step_counts_start_again(reset_step: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([5.0, -100.0, 5.0, 5.0]))
        model[2].bias.fill_(5.0)
    optimizer = Adam(model.parameters(), lr=0.0)
    redo = ReDo(model, torch.zeros(1, 3), tau=0.0, every=3, reset_step=reset_step, seed=0).attach(optimizer)
    for _ in range(3):
        training_step(model, optimizer, (torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)))
    assert redo.receipt is not None
    assert redo.receipt.details["units"] == {"0": [1]}
    counts = {name: int(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    started = 0 if reset_step else 3
    touched = {"0.weight": started, "0.bias": started, "2.weight": started}
    assert counts == {"2.bias": 3, "4.weight": 3, "4.bias": 3, **touched}


def _kaiming(layer: nn.Module) -> Tensor:
    fan_in = layer.weight[0].numel()
    bound = (2 * 3 / fan_in) ** 0.5
    return torch.empty(layer.weight.shape, dtype=torch.float64).uniform_(-bound, bound)


def test_the_mean_moves_into_the_next_bias() -> None:
    """With constant activations, to renew a unit of continual backprop leaves the function exactly as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.ones(5, 3, dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, x, rate=0.34, maturity=1, seed=0).attach(optimizer)
    expected = model(x).detach()
    for _ in range(3):
        cross_entropy(model(x), torch.zeros(5, dtype=torch.int64)).backward()
        optimizer.step()
    assert cbp.receipt is not None
    assert sum(cbp.receipt.details["units_so_far"].values()) == (2 + 1) + (1 + 1)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "reader", [nn.Conv2d(3, 2, 3), nn.ConvTranspose2d(3, 2, 4), nn.ConvTranspose2d(3, 2, 4, stride=2, padding=1)]
)
def test_the_mean_activation_is_measured_on_the_inputs_of_the_reader(reader: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(), reader).double()
    with torch.no_grad():
        model[0].bias.fill_(1.0)
        model[0].weight.zero_()  # every unit is 1 everywhere
    x = torch.zeros(1, 1, 12, 12, dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.0)
    ContinualBackprop(model, x, rate=1.0, maturity=1, seed=0).attach(optimizer)
    inside = (slice(None), slice(None), slice(4, -4), slice(4, -4))  # where the whole kernel reads
    expected = model(x)[inside].mean((0, 2, 3)).detach()
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    assert not model[2].weight.any()
    torch.testing.assert_close(model[2].bias.detach(), expected, rtol=1e-12, atol=1e-12)


def flattened(rows: Tensor) -> nn.Module:
    """Two channels that show the image of 2 × 2 pixels as it is, read pixel by pixel by three outputs with `rows`."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
        model[3].weight.copy_(rows.flatten().expand(3, 8))
    return model


def test_a_flattened_channel_is_as_useful_as_the_places_where_it_is_read() -> None:
    """Of the image's one bright pixel, channel 0 tells; channel 1 is read, with larger weights, where all is dark."""
    model = flattened(torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0]]))
    x = torch.zeros(8, 1, 2, 2, dtype=torch.float64)
    x[:, 0, 0, 0] = 1.0
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, x, rate=0.5, maturity=1, decay=0.0, seed=0).attach(optimizer)
    expected = model(x).detach()
    for step in range(2):
        model(x).sum().backward()
        optimizer.step()
        assert cbp.utilities["0"].tolist() == [0.25, 0.0], step
    assert cbp.receipt is not None
    assert cbp.receipt.details["units"] == {"0": [1]}
    assert torch.equal(model(x), expected)


def test_the_mean_of_each_place_moves_into_the_next_bias() -> None:
    """Where images do not differ, but pixels do, to renew a flattened channel leaves the function as it was."""
    torch.manual_seed(0)
    model = flattened(torch.randn(2, 4)).double()
    x = torch.rand(1, 1, 2, 2, dtype=torch.float64).expand(5, 1, 2, 2)
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, x, rate=1.0, maturity=1, seed=0).attach(optimizer)
    expected = model(x).detach()
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    assert cbp.receipt is not None
    assert cbp.receipt.details["units"] == {"0": [0, 1]}
    assert not model[3].weight.any()
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


class TwoHeads(nn.Module):
    """Channels that are read pixel by pixel, and by another layer in the mean over their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 3, 2)
        self.pixels = nn.Linear(12, 4)
        self.means = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.body(x))
        return self.pixels(h.flatten(1)), self.means(h.mean((2, 3)))


def test_all_weights_that_read_a_unit_count_alike() -> None:
    torch.manual_seed(0)
    model = TwoHeads().double()
    with torch.no_grad():
        model.body.bias.fill_(1.0)  # all awake
    x = torch.rand(1, 1, 3, 3, dtype=torch.float64).expand(5, 1, 3, 3)
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, x, rate=1.0, maturity=2, decay=0.0, seed=0).attach(optimizer)
    h = torch.relu(model.body(x)).mean(0).flatten(1).detach()
    expected = []
    for unit in range(3):
        by_pixel = [h[unit, i] * w.abs() for i in range(4) for w in model.pixels.weight[:, 4 * unit + i].detach()]
        in_the_mean = [h[unit].mean() * w.abs() for w in model.means.weight[:, unit].detach()]
        expected.append(float(sum(by_pixel + in_the_mean)) / (4 * 4 + 2))
    outputs = [each.detach() for each in model(x)]
    for _ in range(3):
        assert cbp.receipt is None
        sum(each.sum() for each in model(x)).backward()
        optimizer.step()
        torch.testing.assert_close(cbp.utilities["body"].tolist(), expected if cbp.receipt is None else [0.0] * 3)
    assert not model.pixels.weight.any()
    for left, right in zip(model(x), outputs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_redo_lets_no_renewed_unit_read_another() -> None:
    """All draws come first, the same ones as layer by layer; then all outgoing weights become zero."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.0)
    redo = ReDo(model, x, tau=0.9, every=1, seed=3).attach(optimizer)
    training_step(model, optimizer, (x, y))
    units = redo.receipt.details["units"]
    others = [u for u in range(16) if u not in units["0"]]
    assert units["0"]
    assert units["2"]
    with seeded(3, 0):
        drawn = [draw_fresh(model[i])["weight"] for i in (0, 2)]
    assert torch.equal(model[0].weight[units["0"]], drawn[0][units["0"]])
    assert torch.equal(model[2].weight[units["2"]][:, others], drawn[1][units["2"]][:, others])
    assert not model[2].weight[:, units["0"]].any()
    assert not model[4].weight[:, units["2"]].any()


def test_redo_of_dead_units_leaves_the_function_as_it_was() -> None:
    torch.manual_seed(0)
    model = zoo.build("cnn_bn").train()
    with torch.no_grad():
        model[1].bias[1] = model[5].bias[[0, 3]] = -100.0
        model[9].bias[[2, 7]] = -100.0
    x = zoo.batch("cnn_bn")[0]
    optimizer = SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model[9].bias.add_(10.0)  # the others are wide awake
    redo = ReDo(model, x, tau=0.0, every=1, seed=0).attach(optimizer)
    expected = model(x).detach()
    cross_entropy(model(x), zoo.batch("cnn_bn")[1]).backward()
    optimizer.step()
    assert redo.receipt is not None
    assert redo.receipt.details["units"] == {"0": [1], "4": [0, 3], "9": [2, 7]}
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    # Incoming, its bias, norm (4 tensors) and outgoing of each; of two tensors that are both, shared entries count once
    assert redo.receipt.tensors == 7 + 7 + 3 - 2
    each = (9 + 1 + 4 + 54) + 2 * (36 + 1 + 4 + 10) + 2 * (6 + 1 + 5)
    assert redo.receipt.entries == each - 2 * 9 - 2 * 2


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_a_renewed_unit_is_born_without_a_past_and_alive(make: Any) -> None:
    """Moments of all its slices are zero right after, its weights differ, and it learns at the next step."""
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2, amsgrad=True)
    x, y = zoo.batch("mlp")
    settings = {"tau": 0.6, "every": 4} if make is ReDo else {"rate": 0.2, "maturity": 3}
    method = make(model, x, seed=0, **settings).attach(optimizer)
    for _ in range(3):
        training_step(model, optimizer, (x, y))
    assert method.receipt is None
    before = snapshot(model)
    training_step(model, optimizer, (x, y))
    units = method.receipt.details["units"]["0"]
    assert units
    assert method.receipt.details["optimizer_tensors_cleared"] == 2 * 3 * 3  # two layers, three tensors, three moments
    others = [u for u in range(16) if u not in units]
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert not optimizer.state[model[0].weight][key][units].any()
        assert not optimizer.state[model[0].bias][key][units].any()
        assert not optimizer.state[model[2].weight][key][:, units].any()
        assert optimizer.state[model[0].weight][key][others].any(1).all()
    assert optimizer.state[model[0].weight]["step"] == 4
    assert not torch.isclose(model[0].weight[units], before["0.weight"][units]).any()
    assert not model[0].bias[units].any()
    # With continual backprop, a unit of the next layer that was renewed too has fresh weights; its readers are zero.
    old = [u for u in range(16) if make is ReDo or u not in method.receipt.details["units"]["2"]]
    assert not model[2].weight[old][:, units].any()
    method.detach()
    training_step(model, optimizer, (x, y))
    assert model[2].weight[old][:, units].any()


def test_a_batch_norm_is_reset() -> None:
    model = zoo.build("cnn_bn")
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    x, y = zoo.batch("cnn_bn")
    redo = ReDo(model, x, tau=1.0, every=3, seed=0).attach(optimizer)
    for _ in range(3):
        training_step(model, optimizer, (x, y))
    units = redo.receipt.details["units"]["0"]
    norm = model[1]
    assert units
    assert (norm.running_mean[units] == 0).all()
    assert (norm.running_var[units] == 1).all()
    assert (norm.weight[units] == 1).all()
    assert (norm.bias[units] == 0).all()
    assert not optimizer.state[norm.weight]["momentum_buffer"][units].any()


def test_score_is_taken_after_norm_and_nonlinearity() -> None:
    """Of units that are loud before the norm layer but silent after the ReLU, all are dormant."""
    model = zoo.build("cnn_bn")
    with torch.no_grad():
        model[0].weight.mul_(50)
        model[1].bias[2] = -50.0
    x, y = zoo.batch("cnn_bn")
    optimizer = SGD(model.parameters(), lr=1e-3)
    redo = ReDo(model, x, tau=0.0, every=1).attach(optimizer)
    training_step(model, optimizer, (x, y))
    assert redo.receipt.details["units"]["0"] == [2]


def test_a_unit_is_new_even_if_the_initializer_does_not_know_its_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[0].bias, -5.0)
    optimizer = Adam(model.parameters(), lr=1e-2)
    redo = ReDo(model, torch.zeros(1, 4), every=1, init=lambda layer: None).attach(optimizer)
    training_step(model, optimizer, (torch.randn(16, 4), torch.randint(0, 2, (16,))))
    assert redo.receipt is not None
    assert redo.receipt.details["units"] == {"0": list(range(8))}
    assert (model[0].weight != 0).all()


def test_where_chooses_layers() -> None:
    model = zoo.build("mlp")
    redo = ReDo(model, zoo.batch("mlp")[0], where=lambda name, _: name.startswith("2."))
    assert list(redo.groups) == ["2"]


def test_composes_with_a_penalty() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    spectral = SpectralRegularization(model, lam=1e-2).attach(optimizer)
    redo = ReDo(model, x, tau=0.6, every=2, seed=0).attach(optimizer)
    for _ in range(4):
        training_step(model, optimizer, (x, y))
    assert redo.receipt.entries > 0
    assert spectral.receipt.details["steps"] == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_means_are_over_the_entries_of_each_unit() -> None:
    totals = torch.tensor([10.0, 20.0, 40.0, 80.0])
    assert SumByUnit(torch.tensor([0, 0, 1, -1]), 2).mean(totals, 5).tolist() == [3.0, 8.0]
    assert SumByUnit(torch.tensor([0, 1, 0, 1]), 2).mean(totals, 5).tolist() == [5.0, 10.0]


def test_a_state_is_aged_by_the_threshold_that_it_is_loaded_into() -> None:
    def start(maturity: int) -> tuple[nn.Module, SGD, ContinualBackprop]:
        model = zoo.build("mlp")
        optimizer = SGD(model.parameters(), lr=0.1)
        cbp = ContinualBackprop(model, zoo.batch("mlp")[0], rate=0.1, maturity=maturity, seed=0).attach(optimizer)
        return model, optimizer, cbp

    model, optimizer, cbp = start(2)
    for step in range(6):
        training_step(model, optimizer, zoo.batch("mlp", seed=step))
    state = cbp.state_dict()
    ages = cbp.ages["0"].clone()
    assert set(ages.tolist()) >= {0, 6}
    for maturity, mature in ((1000, 0), (6, 0), (5, int((ages > 5).sum()))):
        other, optimizer, old = start(maturity)
        other.load_state_dict(model.state_dict())
        old.load_state_dict(state)
        owed = old.owed["0"]
        training_step(other, optimizer, zoo.batch("mlp", seed=6))
        # One step later those of age `maturity` are mature too.
        grown = mature + int((ages == maturity).sum())
        assert int(old.renewals["0"].sum() - cbp.renewals["0"].sum()) == int(owed + 0.1 * grown)
        assert old.owed["0"] == pytest.approx((owed + 0.1 * grown) % 1)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 3, 3), (4, 3, 7, 7), (0, 3, 3, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_sums_over_all_dimensions_but_one(shape: tuple[int, ...], dim: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = values.double().movedim(dim, 0).flatten(1).sum(1)
    layouts = [values, values.to(memory_format=torch.channels_last)] if values.ndim == 4 else [values]
    for layout in layouts:
        torch.testing.assert_close(sum_except(layout, dim).double(), exact, rtol=1e-6, atol=1e-6)
        assert sum_except(layout.half(), dim).dtype == torch.float32


def test_one_example_without_its_dimension_is_a_batch_of_one() -> None:
    def utilities(unsqueezed: bool) -> torch.Tensor:
        model = zoo.build("mlp")
        optimizer = SGD(model.parameters(), lr=0.0)
        cbp = ContinualBackprop(model, zoo.batch("mlp")[0], rate=0.0, decay=0.0).attach(optimizer)
        x = zoo.batch("mlp")[0][0]
        model(x[None] if unsqueezed else x).sum().backward()
        optimizer.step()
        return cbp.utilities["0"]

    torch.testing.assert_close(utilities(unsqueezed=False), utilities(unsqueezed=True), rtol=1e-12, atol=1e-12)


def test_errors() -> None:
    x = zoo.batch("mlp")[0]
    with pytest.raises(ValueError, match="example: None, but redo finds the units by tracing one"):
        ReDo(zoo.build("mlp"))
    with pytest.raises(
        ValueError, match=r"no units that can be renewed one by one \(encode: it is made by 'encode.weight'"
    ):
        ReDo(zoo.build("tied"), x)
    with pytest.raises(ValueError, match="no units that can be renewed one by one"):
        ContinualBackprop(nn.Linear(12, 3).double(), x)
    with pytest.raises(ValueError, match="tau: -1 is not allowed"):
        ReDo(zoo.build("mlp"), x, tau=-1)
    with pytest.raises(ValueError, match="every: 0 is not allowed"):
        ReDo(zoo.build("mlp"), x, every=0)
    with pytest.raises(ValueError, match="rate: 2 is not allowed"):
        ContinualBackprop(zoo.build("mlp"), x, rate=2)
    with pytest.raises(ValueError, match=r"decay: 1 is not allowed; it must be a number that is in \[0, 1\)"):
        ContinualBackprop(zoo.build("mlp"), x, decay=1)
    with pytest.raises(TypeError, match="redo acts on activations, which it sees once attached"):
        ReDo(zoo.build("mlp"), x).step()


def test_a_layer_without_inputs_makes_no_units() -> None:
    class Optional(nn.Module):
        """A network that takes further inputs, of which there are none here."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.more = nn.Linear(12, 8), nn.Linear(0, 8)
            self.head = nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([torch.relu(self.body(x)), torch.relu(self.more(x[:, :0]))], 1))

    with pytest.warns(UserWarning, match="zero-element"):
        model = Optional().double()
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    cbp = ContinualBackprop(model, x, rate=0.5, maturity=1).attach(optimizer)
    assert cbp.skipped["more"] == "the weight that makes it has no entries"
    for _ in range(2):
        training_step(model, optimizer, (x, y))
    assert len(cbp.receipt.details["units"]["body"]) == 4


def test_the_receipt_counts_no_cleared_state_without_a_renewal() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    redo = ReDo(model, zoo.batch("mlp")[0], tau=0.0, every=2)
    redo.attach(optimizer)
    with torch.no_grad():
        model[0].bias.fill_(5.0)  # so that no unit is dormant
        model[2].bias.fill_(5.0)
    train(model, optimizer, "mlp", range(2))
    assert redo.receipt is not None
    assert (redo.receipt.entries, redo.receipt.details["optimizer_tensors_cleared"]) == (0, 0)
