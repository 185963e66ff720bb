"""ReDo and continual backprop against one-unit-at-a-time references, and what every recycler must keep."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer, Rprop

from pliant import ContinualBackprop, ReDo, Spectral
from pliant.methods.recycler import SumByUnit, sum_except
from pliant.methods.redraw import draw_fresh, seeded
from pliant.models import create
from tests import zoo
from tests.loops import snapshot
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
        (4, 3, 8, 8),
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


def training_step(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


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
    one, two = Adam(model.parameters(), lr=1e-2), Adam(control.parameters(), lr=1e-2)
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


@pytest.mark.parametrize("name", CASES)
def test_continual_backprop_matches_the_reference(name: str) -> None:
    model, _, batch = build(name)
    control, wires, _ = build(name)
    one, two = Adam(model.parameters(), lr=1e-2), Adam(control.parameters(), lr=1e-2)
    cbp = ContinualBackprop(model, batch(0)[0], rate=0.07, maturity=2, seed=5).attach(one)
    plain = reference.ContinualBackprop(wires, rate=0.07, maturity=2)
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
def test_the_mean_that_moves_is_the_mean_of_what_the_reader_adds(reader: nn.Module) -> None:
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
    # incoming, its bias, norm (4 tensors) and outgoing of each; entries: (9+1+4+6·9) + 2(36+1+4+10) + 2(6+1+5)
    assert redo.receipt.tensors == 7 + 7 + 3
    assert redo.receipt.entries == (9 + 1 + 4 + 54) + 2 * (36 + 1 + 4 + 10) + 2 * (6 + 1 + 5)


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
    # A unit of the next layer that was renewed too has fresh weights, but its own readers are zero.
    old = [u for u in range(16) if u not in method.receipt.details["units"]["2"]]
    assert not model[2].weight[old][:, units].any()
    method.detach()
    training_step(model, optimizer, (x, y))
    assert model[2].weight[old][:, units].any()


def test_a_batch_norm_starts_anew() -> None:
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


def test_watches_only_passes_that_train() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, x, decay=0.0).attach(optimizer)
    training_step(model, optimizer, (x, y))
    expected = cbp.utilities["0"].clone()
    model.eval()
    model(100 * x)
    model.train()
    with torch.no_grad():
        model(100 * x)
    training_step(model, optimizer, (x, y))
    assert torch.equal(cbp.utilities["0"], expected)


def test_redo_watches_only_the_pass_before_it_acts() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.0)
    redo = ReDo(model, x, every=3).attach(optimizer)
    for step in range(1, 7):
        cross_entropy(model(x), y).backward()
        assert bool(redo._seen) == (step % 3 == 0)
        optimizer.step()
        assert not redo._seen
        assert redo._is_due(step) == (step % 3 == 0)


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_says_once_that_it_saw_nothing(make: Any) -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = {"every": 1} if make is ReDo else {}
    make(model, x, **settings).attach(optimizer)
    model.eval()
    with pytest.warns(
        UserWarning, match="saw nothing of the units of '0' before this step: the module that reads them, '2'"
    ):
        training_step(model, optimizer, (x, y))
    training_step(model, optimizer, (x, y))  # a second warning would be an error


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_acts_inside_a_compiled_model(make: Any) -> None:
    def run(compiled: bool) -> nn.Module:
        model = zoo.build("mlp")
        x, y = zoo.batch("mlp")
        optimizer = Adam(model.parameters(), lr=1e-2)
        settings = {"tau": 0.6, "every": 2} if make is ReDo else {"rate": 0.2, "maturity": 1}
        make(model, x, seed=0, **settings).attach(optimizer)
        callable_ = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(6):
            training_step(callable_, optimizer, (x, y))
        return model

    torch._dynamo.reset()
    compiled, plain = run(True), run(False)
    assert_close(compiled, plain)


def assert_close(left: nn.Module, right: nn.Module) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=name)


def test_a_copy_of_a_watched_model_is_not_watched() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    redo = ReDo(model, x, every=1).attach(optimizer)
    clone = copy.deepcopy(model)
    cross_entropy(clone(x), y).backward()
    assert not redo._seen


def test_units_whose_optimizer_left_are_not_watched() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    body, rest = SGD(model[0].parameters(), lr=0.1), SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
    redo = ReDo(model, x, every=1).attach(body, rest)
    cross_entropy(model(x), y).backward()
    assert set(redo._seen) == {"0", "2"}
    redo.detach(body)
    assert set(redo._seen) == {"2"}
    cross_entropy(model(x), y).backward()
    assert set(redo._seen) == {"2"}
    redo.detach()
    assert not redo._seen


def test_where_chooses_layers() -> None:
    model = zoo.build("mlp")
    redo = ReDo(model, zoo.batch("mlp")[0], where=lambda name, _: name.startswith("2."))
    assert list(redo.groups) == ["2"]


def test_composes_with_a_penalty() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    spectral = Spectral(model, lam=1e-2).attach(optimizer)
    redo = ReDo(model, x, tau=0.6, every=2, seed=0).attach(optimizer)
    for _ in range(4):
        training_step(model, optimizer, (x, y))
    assert redo.receipt.entries > 0
    assert spectral.receipt.details["steps"] == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_entries_are_counted_for_each_unit() -> None:
    values = torch.zeros(5, 4)
    uneven = SumByUnit(torch.tensor([0, 0, 1, -1]), 2).count_entries(values, 1)
    assert isinstance(uneven, Tensor)
    assert uneven.tolist() == [10, 5]
    assert SumByUnit(torch.tensor([0, 1, 0, 1]), 2).count_entries(values, 1) == 10


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 3, 3), (4, 3, 7, 7), (0, 3, 3, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_sums_over_all_dimensions_but_one(shape: tuple[int, ...], dim: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = values.double().movedim(dim, 0).flatten(1).sum(1)
    layouts = [values, values.to(memory_format=torch.channels_last)] if values.ndim == 4 else [values]
    for layout in layouts:
        torch.testing.assert_close(sum_except(layout, dim).double(), exact, rtol=1e-6, atol=1e-6)
        assert sum_except(layout.half(), dim).dtype == torch.float32


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


def test_an_optimizer_whose_memory_cannot_be_cut_is_an_error() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = Rprop(model.parameters())
    ReDo(model, x, tau=1.0, every=1).attach(optimizer)
    with pytest.raises(ValueError, match="Rprop keeps 'prev', which cannot be rewritten in part"):
        training_step(model, optimizer, (x, y))


def recycled_once() -> tuple[nn.Module, Tensor, SGD, ReDo, ContinualBackprop]:
    """A network that stands still under both recyclers, after one of ReDo's two steps."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.0)
    redo = ReDo(model, x, tau=0.3, every=2, seed=0).attach(optimizer)
    cbp = ContinualBackprop(model, x, rate=0.0).attach(optimizer)
    training_step(model, optimizer, (x, y))
    return model, x, optimizer, redo, cbp


@pytest.mark.parametrize("order", ["bad, good", "good, bad"])
def test_a_pass_that_overflowed_is_not_counted(order: str) -> None:
    """A loop that meets an infinity skips the step, and nobody tells the method."""

    def run(*scales: float) -> tuple[Tensor, Tensor, dict[str, list[int]]]:
        model, x, optimizer, redo, cbp = recycled_once()
        for scale in scales:
            model(scale * x)
        optimizer.step()
        return cbp.utilities["0"], cbp.means["2"], redo.receipt.details["units"]

    *averages, units = run(*[torch.inf, 1.0] if order == "bad, good" else [1.0, torch.inf])
    *expected, expected_units = run(1.0)
    assert all(torch.equal(a, b) for a, b in zip(averages, expected, strict=True))
    assert units == expected_units


def test_a_step_on_nothing_but_overflow_changes_no_average_and_renews_nothing() -> None:
    model, x, optimizer, redo, cbp = recycled_once()
    before = cbp.utilities["2"].clone()
    with torch.no_grad():
        model[2].bias[3] = torch.inf
    model(x)
    model(x)
    optimizer.step()
    assert torch.equal(cbp.utilities["2"], before)
    assert redo.receipt.details["units"].get("2", []) == []


def test_a_fused_step_that_was_skipped_leaves_nothing_behind() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.0, fused=True)
    cbp = ContinualBackprop(model, x, rate=0.0, decay=0.0).attach(optimizer)
    training_step(model, optimizer, (x, y))
    before = cbp.utilities["0"].clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(100 * x).sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert not cbp._seen
    training_step(model, optimizer, (x, y))
    assert torch.equal(cbp.utilities["0"], before)


def test_what_was_seen_while_no_optimizer_lived_is_forgotten() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    cbp = ContinualBackprop(model, x, rate=0.0, decay=0.0)
    for _ in range(2):
        optimizer = SGD(model.parameters(), lr=0.0)
        cbp.attach(optimizer)
        training_step(model, optimizer, (x, y))
        seen = cbp.utilities["0"].clone()
        del optimizer
        model(100 * x)
    assert torch.equal(cbp.utilities["0"], seen)
    expected = ContinualBackprop(model, x, rate=0.0, decay=0.0).attach(optimizer := SGD(model.parameters(), lr=0.0))
    training_step(model, optimizer, (x, y))
    assert torch.equal(seen, expected.utilities["0"])


def test_a_reader_may_be_called_by_keyword() -> None:
    class ByKeyword(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](input=torch.relu(self[0](input=x)))

    torch.manual_seed(0)
    model = ByKeyword(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).double()
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    redo = ReDo(model, x, tau=0.9, every=1).attach(optimizer)
    training_step(model, optimizer, (x, y))
    assert redo.receipt.details["units"]["0"]
