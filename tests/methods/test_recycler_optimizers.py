"""Recyclers beside the optimizers that hold the parts of their units: one, several, and ones that cannot be served."""

import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.optim import ASGD, Adafactor, Adam, AdamW, Muon, Optimizer, Rprop

from pliant import FIRE, ContinualBackprop, FullReset, ReDo
from tests import zoo
from tests.loops import training_step

MAKERS = {
    "redo": (ReDo, {"tau": 0.6, "every": 1}),
    "continual_backprop": (ContinualBackprop, {"rate": 0.5, "maturity": 1}),
}


def make(name: str, model: nn.Module) -> Any:
    maker, settings = MAKERS[name]
    return maker(model, zoo.batch("mlp")[0], seed=0, **settings)


@pytest.mark.parametrize("kind", [Adafactor, ASGD, Rprop])
def test_an_optimizer_whose_memory_cannot_be_cut_is_refused_after_its_first_step(kind: type[Optimizer]) -> None:
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = kind(model.parameters(), lr=1e-3)
    ReDo(model, x, every=1000).attach(optimizer)
    with pytest.raises(ValueError, match=rf"{kind.__name__} keeps '\w+', which cannot be rewritten in part"):
        training_step(model, optimizer, (x, y))


def test_each_optimizer_is_looked_at_when_it_remembers_something() -> None:
    """The second one has no memory yet when the first steps, and units are renewed."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    body, head = Adam(model[:4].parameters(), lr=1e-3), Rprop(model[4].parameters())
    redo = ReDo(model, x, tau=0.6, every=1).attach(body, head)
    cross_entropy(model(x), y).backward()
    body.step()
    assert redo.receipt is not None
    with pytest.raises(ValueError, match="Rprop keeps 'prev', which cannot be rewritten in part"):
        head.step()


@pytest.mark.usefixtures("process_group")
def test_state_of_an_inner_optimizer_is_found() -> None:
    """ZeroRedundancyOptimizer's own state is empty."""

    def results(kind: type[Optimizer], **settings: Any) -> list[Any]:
        model = zoo.build("mlp")
        x, y = zoo.batch("mlp")
        optimizer = kind(model.parameters(), lr=1e-2, **settings)
        redo = make("redo", model).attach(optimizer)
        training_step(model, optimizer, (x, y))
        rotated = FIRE(model, optimizer_state="rotate").apply(optimizer).details["optimizer_tensors_rotated"]
        reset = FullReset(model, seed=0).apply(optimizer).details["optimizer_tensors_reset"]
        training_step(model, optimizer, (x, y))
        return [redo.receipt.details["optimizer_tensors_cleared"], rotated, reset, *model.parameters()]

    plain, sharded = results(Adam), results(ZeroRedundancyOptimizer, optimizer_class=Adam)
    assert all(count > 0 for count in plain[:3])
    assert sharded[:3] == plain[:3]
    assert all(map(torch.equal, sharded[3:], plain[3:]))

    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Rprop, lr=1e-3)
    ReDo(model, x, every=1000).attach(optimizer)
    with pytest.raises(ValueError, match="Rprop keeps 'prev', which cannot be rewritten in part"):
        training_step(model, optimizer, (x, y))


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_of_a_renewed_unit_are_cleared(name: str, order: tuple[int, ...]) -> None:
    """Whoever steps first, the weights that read a new unit are zero after all have stepped, and so is its bias."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    optimizers = [Adam(model[i].parameters(), lr=1e-2) for i in (0, 2, 4)]
    method = make(name, model).attach(*optimizers)
    for _ in range(3):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        renewed = {key: counts.clone() for key, counts in method.renewals.items()}
        for i in order:
            optimizers[i].step()
    units = {key: (counts > renewed[key]).nonzero().flatten() for key, counts in method.renewals.items()}
    assert all(map(len, units.values()))
    assert not model[4].weight[:, units["2"]].any()
    kept = [u for u in range(16) if u not in units["2"]]  # between two renewed units each layer has its own draws
    assert not model[2].weight[kept][:, units["0"]].any()
    assert not model[0].bias[units["0"]].any()


def with_two_optimizers() -> tuple[nn.Module, Any, Adam, Adam]:
    """Return a network after a backward pass, ReDo, and the optimizers of its body and its head."""
    model = zoo.build("mlp")
    x, y = zoo.batch("mlp")
    body, head = Adam(model[:4].parameters(), lr=1e-2), Adam(model[4].parameters(), lr=1e-2)
    redo = make("redo", model).attach(body, head)
    cross_entropy(model(x), y).backward()
    return model, redo, body, head


def test_only_gradients_that_are_still_to_be_used_are_cleared() -> None:
    """Those that were used are left to whoever logs them after the step."""
    model, redo, body, _ = with_two_optimizers()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    body.step()
    units = redo.receipt.details["units"]["2"]
    others = [u for u in range(16) if u not in units]
    assert not model[4].weight.grad[:, units].any()
    assert torch.equal(model[4].weight.grad[:, others], before.pop("4.weight")[:, others])
    assert all(torch.equal(model.get_parameter(name).grad, gradient) for name, gradient in before.items())


def test_an_optimizer_without_units_leaves_the_receipt() -> None:
    _, redo, body, head = with_two_optimizers()
    body.step()
    receipt = redo.receipt
    assert receipt.entries > 0
    head.step()
    assert redo.receipt.entries == receipt.entries
    assert redo.receipt.details["units"] == receipt.details["units"]
    assert redo.draws == 1


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.actor(hidden), self.critic(hidden)

    def optimizer(self, head: nn.Module) -> Adam:
        return Adam([*self.trunk.parameters(), *head.parameters()], lr=1e-2)


@pytest.mark.parametrize("name", MAKERS)
def test_a_layer_of_two_optimizers_is_renewed_after_steps_of_both(name: str) -> None:
    model, x = ActorCritic(), torch.randn(16, 4)
    actor, critic = model.optimizer(model.actor), model.optimizer(model.critic)
    maker, settings = MAKERS[name]
    method = maker(model, x, seed=0, **settings).attach(actor, critic)

    def step(*optimizers: Optimizer) -> None:
        model.zero_grad()
        sum(output.pow(2).mean() for output in model(x)).backward()
        for optimizer in optimizers:
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while not method.draws:
            step(critic, actor)
        renewed = {key: int(counts.sum()) for key, counts in method.renewals.items()}
        # The actor's step finds nothing new to act on, and leaves the receipt.
        assert {key: len(units) for key, units in method.receipt.details["units"].items()} == renewed
        for optimizer in (actor, critic):
            before = method.draws
            step(optimizer)
            step(optimizer)
            assert method.draws > before
        del critic, optimizer
        gc.collect()
        before = method.draws
        step(actor)
        step(actor)
    assert method.draws > before


@pytest.mark.parametrize("name", MAKERS)
def test_says_once_that_a_part_is_held_by_another_optimizer(name: str) -> None:
    model = zoo.build("mlp", dtype=torch.float32)
    x, y = zoo.batch("mlp", dtype=torch.float32)
    matrices = Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    rest = AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)

    def step() -> None:
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        rest.step()
        matrices.step()

    method = make(name, model).attach(matrices)
    if name == "continual_backprop":
        step()  # nobody is mature yet
    with pytest.warns(
        UserWarning,
        match=r"renews units with parts that no attached optimizer holds: 0\.bias, 2\.bias\.",
    ):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        method.detach()
        one_by_one = make(name, model)
        one_by_one.attach(matrices)
        one_by_one.attach(rest)
        for _ in range(2):
            step()
    assert one_by_one.receipt is not None


def test_the_receipt_counts_each_tensor_and_entry_once() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = torch.randn(3, 4)
    method = ReDo(model, inputs, tau=1e9, every=1).attach(optimizer)
    model(inputs).sum().backward()
    optimizer.step()
    assert method.receipt is not None
    written = sum(p.numel() for p in model.parameters()) - model[4].bias.numel()
    assert (method.receipt.tensors, method.receipt.entries) == (5, written)


def test_the_receipt_counts_the_biases_that_means_move_to() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = torch.randn(3, 4)
    method = ContinualBackprop(model, inputs, rate=0.5, maturity=1).attach(optimizer)
    for _ in range(3):
        model(inputs).sum().backward()
        optimizer.step()
    assert method.receipt is not None
    count = len(method.receipt.details["units"]["0"])
    assert count > 0
    assert (method.receipt.tensors, method.receipt.entries) == (4, count * (4 + 1 + 2) + 2)
