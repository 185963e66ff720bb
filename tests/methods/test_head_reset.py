"""Head reset: which layers it re-draws."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from pliant import FullReset, HeadReset
from tests import zoo
from tests.loops import snapshot, train

# apply() without an optimizer warns that no moments are reset; these tests do so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


def trained(name: str) -> tuple[nn.Module, Adam]:
    model = zoo.build(name)
    optimizer = Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, name, range(5))
    return model, optimizer


@pytest.mark.parametrize(
    ("name", "head"),
    [("mlp", ["4"]), ("cnn", ["7", "9"]), ("cnn_bn", ["9", "11"]), ("vgg", ["15", "18", "20"])],
)
def test_only_the_fully_connected_tail_is_redrawn(name: str, head: list[str]) -> None:
    model, optimizer = trained(name)
    method = HeadReset(model, zoo.batch(name)[0], seed=1)
    assert list(method.head) == head
    before = snapshot(model)
    receipt = method.apply(optimizer)
    for key, p in model.named_parameters():
        inside = key.rpartition(".")[0] in head
        assert torch.equal(p, before[key]) != inside, key
        assert (p in optimizer.state) != inside, key
    assert receipt.details["optimizer_tensors_reset"] == 3 * 2 * len(head)


def test_head_must_be_found_or_given() -> None:
    with pytest.raises(ValueError, match="pass an example input or head="):
        HeadReset(zoo.build("mlp"))
    with pytest.raises(ValueError, match=r"it ends in '0' \(Conv2d\), not in a linear layer"):
        HeadReset(nn.Sequential(nn.Conv2d(1, 1, 1)), torch.ones(1, 1, 2, 2))
    model = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert HeadReset(model, head=["0"]).head == ("0",)


def changed_since(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    now = snapshot(model)
    return [name for name in before if not torch.equal(before[name], now[name])]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_model_with_a_weight_computed_by_a_hook() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="of module '0' does not write its parameter 'weight_g'"):
        FullReset(model)
    before = snapshot(model)
    HeadReset(model, head=["2"], optimizer_state="keep").apply()
    assert changed_since(before, model) == ["2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("model", "heads"), [(zoo.TwinCritics(), ("first.2", "second.2")), (zoo.SharedActor(), ("mean", "deviation"))]
)
def test_every_head_of_a_fully_connected_network_is_reset(model: nn.Module, heads: tuple[str, ...]) -> None:
    before = snapshot(model)
    method = HeadReset(model, torch.randn(4, 6), seed=0)
    assert method.head == heads
    method.apply()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"{head}.{kind}" for head in heads for kind in ("weight", "bias")}
