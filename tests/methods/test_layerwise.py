"""Layerwise re-initialization: what each stage keeps, rescales and re-draws."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from pliant import LayerwiseReset
from pliant.anatomy.layers import called_layers
from pliant.methods.layerwise import called_blocks, rescale_to_norm_
from tests import zoo
from tests.loops import assert_same, snapshot, train

# apply() without an optimizer warns that no moments are reset; these tests do so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


def trained(name: str) -> tuple[nn.Module, Adam, LayerwiseReset]:
    model = zoo.build(name)
    method = LayerwiseReset(model, zoo.batch(name)[0], seed=4)
    optimizer = Adam(model.parameters(), lr=3e-2)
    train(model, optimizer, name, range(6))
    return model, optimizer, method


@pytest.mark.parametrize("name", zoo.PAPER_MODELS)
def test_stages_rescale_the_first_blocks_and_redraw_the_rest(name: str) -> None:
    """Stage t rescales the first t blocks to their initial norms and re-draws the others."""
    initial = {key: p.detach().clone() for key, p in zoo.build(name).named_parameters()}
    model, optimizer, method = trained(name)
    count = len(method.blocks)
    for stage in range(1, 4):
        train(model, optimizer, name, [10 * stage])
        before = snapshot(model)
        receipt = method.apply(optimizer)
        kept = min(stage, count - 1)
        assert receipt.details["blocks_kept"] == kept
        assert receipt.details["blocks_redrawn"] == count - kept
        for number, members in enumerate(method._members):
            for key in members:
                now, old = model.get_parameter(key).detach(), before[key]
                if number >= kept:
                    assert not torch.equal(now, old), key
                elif key in method.norms:
                    factor = float(initial[key].norm() / old.norm())
                    torch.testing.assert_close(now, old * factor, rtol=1e-12, atol=1e-14)
                else:
                    assert torch.equal(now, old), key
    assert not optimizer.state


def test_later_blocks_have_fresh_weights_and_statistics() -> None:
    model, optimizer, method = trained("cnn_bn")
    assert method.blocks == (("0", "1"), ("4", "5"), ("9",), ("11",))
    method.apply(optimizer)
    bound = (4 * 9) ** -0.5
    drawn = model[4].weight.detach()
    assert 0.8 * bound < float(drawn.abs().max()) <= bound
    assert torch.equal(model[5].weight, torch.ones(6, dtype=torch.float64))
    assert torch.equal(model[5].running_mean, torch.zeros(6, dtype=torch.float64))
    assert int(model[5].num_batches_tracked) == 0
    assert int(model[1].num_batches_tracked) == 6  # the first block keeps its statistics
    assert not torch.equal(model[1].running_mean, torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_weights_use_float32(dtype: torch.dtype) -> None:
    weight = (3.3 * torch.randn(300, 300)).to(dtype)
    wanted = torch.randn(300, 300).norm()
    rescale_to_norm_(weight, wanted)
    assert float(weight.float().norm() / wanted) == pytest.approx(1, abs=1e-3)


def test_every_stage_redraws_the_head() -> None:
    model, optimizer, method = trained("mlp")
    for _ in range(5):
        before = snapshot(model)
        receipt = method.apply(optimizer)
        assert not torch.equal(before["4.weight"], model[4].weight)
    assert receipt.details == {"stage": 5, "blocks_kept": 2, "blocks_redrawn": 1, "optimizer_tensors_reset": 0}
    assert torch.equal(before["0.bias"], model[0].bias)


def test_moments_are_reset_by_default() -> None:
    model, optimizer, method = trained("mlp")
    assert method.apply(optimizer).details["optimizer_tensors_reset"] == 18
    model, optimizer, _ = trained("mlp")
    keeping = LayerwiseReset(model, zoo.batch("mlp")[0], optimizer_state="keep", seed=1)
    keeping.apply(optimizer)
    assert len(optimizer.state) == 6


def test_given_blocks() -> None:
    model = zoo.build("cnn")
    method = LayerwiseReset(model, blocks=[["0", "3"], ["7"]], seed=0)
    before = snapshot(model)
    method.apply()
    changed = {name for name, value in snapshot(model).items() if not torch.allclose(value, before[name])}
    assert changed == {"7.weight", "7.bias"}  # "9" is not in a block; "0" and "3" have their initial norms
    with pytest.raises(ValueError, match=r"blocks: .* at least two"):
        LayerwiseReset(model, blocks=[["0"]])
    with pytest.raises(ValueError, match="example: None, and blocks is not given"):
        LayerwiseReset(model)


def test_attention_belongs_to_the_block_of_its_module() -> None:
    """nn.MultiheadAttention reads the weight of its `out_proj` without calling it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return self.head(self.attention(x, x, x, need_weights=False)[0])

    model = Net()
    example = torch.randn(2, 3, 4)
    assert called_blocks(model, called_layers(model, example)) == [["norm", "attention"], ["head"]]
    method = LayerwiseReset(model, example)
    assert "attention.out_proj.weight" in method._members[0]


def test_parameter_of_an_uncalled_layer_is_an_error() -> None:
    model = zoo.build("mlp")
    model.register_module("spare", nn.Linear(2, 2))
    model.forward = lambda x: model[4](torch.relu(model[2](torch.relu(model[0](x)))))
    with pytest.raises(ValueError, match=r"'spare\.weight' is not in a layer that was called"):
        LayerwiseReset(model, zoo.batch("mlp")[0])


def test_same_seed_gives_the_same_stages() -> None:
    results = []
    for seed in (1, 1, 2):
        model = zoo.build("mlp")
        method = LayerwiseReset(model, zoo.batch("mlp")[0], seed=seed)
        method.apply()
        method.apply()
        results.append(snapshot(model))
    assert_same(results[0], results[1])
    assert not torch.equal(results[0]["4.weight"], results[2]["4.weight"])


def test_block_may_use_a_second_name_of_its_module() -> None:
    model = zoo.build("mlp")
    model.body, model.head = model[0], model[4]
    method = LayerwiseReset(model, blocks=[["body", "2"], ["head"]])
    assert method._members == [["0.weight", "0.bias", "2.weight", "2.bias"], ["4.weight", "4.bias"]]


@pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")
def test_frozen_head_is_left_alone() -> None:
    model = zoo.build("mlp")
    model[4].requires_grad_(False)
    before = snapshot(model)
    method = LayerwiseReset(model, zoo.batch("mlp")[0], seed=0)
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.mul_(2.0)
        method.apply()
    after = snapshot(model)
    assert torch.equal(after["4.weight"], before["4.weight"])
    torch.testing.assert_close(after["0.weight"].norm(), before["0.weight"].norm())


def test_failing_stage_changes_nothing() -> None:
    model = zoo.build("mlp")
    broken = False

    def init(model: nn.Module) -> None:
        if broken:
            raise RuntimeError("no more")
        nn.init.zeros_(model[0].bias)

    method = LayerwiseReset(model, zoo.batch("mlp")[0], init=init)
    with torch.no_grad():
        model[0].weight.mul_(3)
    before = snapshot(model)
    broken = True
    with pytest.raises(RuntimeError, match="no more"):
        method.apply()
    assert_same(snapshot(model), before)
    assert method.stage == 0


def test_moments_outside_the_blocks_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    receipt = LayerwiseReset(model, blocks=[["0"], ["2"]]).apply(optimizer)
    assert receipt.details["optimizer_tensors_reset"] == 4 * 3  # two moments and a step count
    assert set(optimizer.state) == set(model[4].parameters())


class WithToken(nn.Module):
    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 3))
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 2)
        if unused:
            self.unused = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.token)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x + self.token))


def test_uncalled_submodule_of_a_called_model_is_an_error() -> None:
    LayerwiseReset(WithToken(unused=False), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"'unused.weight' is not in a layer that was called"):
        LayerwiseReset(WithToken(unused=True), torch.zeros(1, 3))


def test_first_block_needs_no_initializer() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = nn.Sequential(Bare(), nn.Linear(3, 2))
    LayerwiseReset(model, blocks=[["0"], ["1"]]).apply()
    with pytest.raises(ValueError, match="no reset_parameters"):
        LayerwiseReset(model, blocks=[["1"], ["0"]])
