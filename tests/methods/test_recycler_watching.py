"""Which passes a recycler watches, and which not."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from pliant import DASH, ContinualBackprop, ReDo
from tests import zoo
from tests.loops import assert_same, snapshot, training_step
from tests.methods.trajectories import assert_close


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
    with pytest.warns(UserWarning, match="saw no activations of '0' before this step: the module that reads them, '2'"):
        training_step(model, optimizer, (x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training_step(model, optimizer, (x, y))


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
    assert_close(compiled, plain, rtol=1e-9, atol=1e-11)


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


def test_activations_seen_without_an_optimizer_are_dropped() -> None:
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


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_passes_through_a_frozen_reader_are_not_watched(make: Any) -> None:
    """An actor's update goes through the critic, frozen meanwhile: it is none of the critic's passes."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    settings = {"every": 1} if make is ReDo else {}
    method = make(model, x, **settings).attach(optimizer)
    model.requires_grad_(False)
    model(100 * x.clone().requires_grad_()).sum().backward()
    assert not method._seen
    model.requires_grad_(True)
    cross_entropy(model(x), y).backward()
    assert set(method._seen) == {"0", "2"}


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_per_sample_gradients_do_not_count_as_training(make: Any) -> None:
    def run(looking: bool) -> nn.Module:
        model = zoo.build("mlp")
        x, y = zoo.batch("mlp")
        optimizer = SGD(model.parameters(), lr=0.1)
        settings = {"every": 1, "tau": 0.6} if make is ReDo else {"rate": 0.2, "maturity": 1}
        make(model, x, seed=0, **settings).attach(optimizer)

        def loss(parameters: dict[str, Tensor], inputs: Tensor, label: Tensor) -> Tensor:
            return cross_entropy(functional_call(model, parameters, (inputs[None],)), label[None])

        for _ in range(3):
            if looking:
                parameters = {name: p.detach() for name, p in model.named_parameters()}
                vmap(grad(loss), in_dims=(None, 0, 0))(parameters, 100 * x, y)
            training_step(model, optimizer, (x, y))
        return model

    assert_same(snapshot(run(True)), snapshot(run(False)))


def test_another_thread_may_look_at_its_data_meanwhile() -> None:
    """DASH keeps the hooks from seeing its own passes, and those of its own thread alone."""
    model, other = zoo.build("mlp"), zoo.build("mlp")
    x, y = zoo.batch("mlp")
    inside, trained = threading.Event(), threading.Event()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield x, y
        inside.set()
        assert trained.wait(60)

    dash = DASH(other)
    thread = threading.Thread(target=lambda: dash.apply(batches=batches(), loss_fn=cross_entropy))
    optimizer = SGD(model.parameters(), lr=0.1)
    redo = ReDo(model, x, every=1).attach(optimizer)
    thread.start()
    try:
        assert inside.wait(60)
        cross_entropy(model(x), y).backward()
        assert set(redo._seen) == {"0", "2"}
    finally:
        trained.set()
        thread.join()


def test_units_that_have_just_joined_were_not_overlooked() -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = SGD(model[2:].parameters(), lr=0.1)
    redo = ReDo(model, x, tau=0.6, every=2).attach(optimizer)
    training_step(model, optimizer, (x, y))
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2, 5):
            training_step(model, optimizer, (x, y))
            assert bool(redo.receipt.details["units"].get("0")) == (step == 4)


class Halves(nn.Module):
    """One layer reads the first half of the units, another one all or the rest."""

    def __init__(self, rest: slice) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 8), nn.Linear(4, 2), nn.Linear(8 - (rest.start or 0), 2)
        self.rest = rest
        with torch.no_grad():
            self.body.bias[0] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))
        return self.left(hidden[:, :4]) + self.right(hidden[:, self.rest])


def test_units_are_watched_where_all_of_them_are_read() -> None:
    torch.manual_seed(0)
    model, x, y = Halves(slice(None)), torch.randn(16, 4), torch.randint(0, 2, (16,))
    optimizer = SGD(model.parameters(), lr=0.1)
    redo = ReDo(model, x, tau=0.0, every=1, seed=0).attach(optimizer)
    training_step(model, optimizer, (x, y))
    assert redo.receipt.details["units"] == {"body": [0]}


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_units_that_no_layer_reads_all_of_are_left_alone(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="body: no linear or convolution layer reads all of its units"):
        make(Halves(slice(4, None)), torch.randn(16, 4))


def test_a_step_without_a_renewal_does_not_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = ContinualBackprop(model, zoo.batch("mlp")[0], rate=1e-2, maturity=2, seed=0).attach(optimizer)
    asked: list[int] = []
    monkeypatch.setattr(Tensor, "__bool__", lambda self: asked.append(1) or self.item() != 0)
    quiet = 0
    for step in range(40):
        asked.clear()
        before = sum(int(counts.sum()) for counts in method.renewals.values())
        training_step(model, optimizer, zoo.batch("mlp", seed=step))
        if before and before == sum(int(counts.sum()) for counts in method.renewals.values()):
            quiet += 1
            assert not asked
    assert quiet > 5


@pytest.mark.parametrize("make", [lambda m, x: ReDo(m, x, every=1, tau=0.9, seed=0), ContinualBackprop])
def test_activations_seen_before_a_checkpoint_are_resumed(make: Any) -> None:
    x, y = zoo.batch("mlp")
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.1)
    method = make(model, x).attach(optimizer)
    training_step(model, optimizer, (x, y))
    cross_entropy(model(2 * x), y).backward()  # a step that a GradScaler skips, say, or the first half of one
    saved = copy.deepcopy((model.state_dict(), method.state_dict()))
    training_step(model, optimizer, (x, y))

    again = zoo.build("mlp")
    other = SGD(again.parameters(), lr=0.1)
    resumed = make(again, x)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    resumed.attach(other)
    training_step(again, other, (x, y))
    assert_same(snapshot(again), snapshot(model))
    with pytest.raises(ValueError, match="has seen units of 'x' that this model has not"):
        resumed.load_state_dict({**saved[1], "seen": {"x": {"total": torch.zeros(3)}}})


def test_tells_of_layers_that_the_example_does_not_reach() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(12, 8), nn.ReLU())
            self.heads = nn.ModuleList([nn.Linear(8, 2) for _ in range(2)])

        def forward(self, x: Tensor, task: int = 0) -> Tensor:
            return self.heads[task](self.trunk(x))

    with pytest.warns(UserWarning, match=r"redo: the example does not reach heads\.1, so it cannot know whose units"):
        ReDo(Heads(), torch.zeros(2, 12))


def test_a_layer_that_activates_its_own_input_is_not_watched() -> None:
    class Activating(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu())

    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 8), Activating(8, 2))
    redo = ReDo(model, torch.zeros(2, 12))
    assert list(redo.groups) == ["0"]
    assert redo.skipped["2"].startswith("no linear or convolution layer reads all of its units as its input")


@pytest.mark.parametrize("make", [ReDo, ContinualBackprop])
def test_functional_calls_with_other_weights_are_ignored(make: Any) -> None:
    """A target network may be the same module with other parameters: its units are not those that are renewed."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    target = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    optimizer = SGD(model.parameters(), lr=0.0)
    method = make(model, x, **({"every": 1} if make is ReDo else {})).attach(optimizer)
    functional_call(model, target, (100 * x,))
    assert not method._seen
    cross_entropy(model(x), y).backward()
    assert all(activity.entries == len(x) for activity in method._seen.values())
    assert method._seen
