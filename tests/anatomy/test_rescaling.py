"""What `analyze` says, asks and refuses."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from pliant.anatomy import Block, GraphError, analyze
from pliant.anatomy.chain import chain_plan
from pliant.anatomy.layers import called_layers
from pliant.anatomy.walk import RULES
from pliant.methods import SWR
from tests.anatomy.architectures import (
    ALL,
    Branching,
    DenseNet,
    GatedLinear,
    Interleaved,
    ResNet18,
    ViT,
    images,
    sequences,
    vectors,
)


class Backwards(nn.Module):
    """A chain whose modules are made in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = nn.Linear(8, 3), nn.BatchNorm1d(8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


CHAINS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), vectors()),
    "unbiased": lambda: (nn.Sequential(nn.Linear(6, 5, bias=False), nn.LeakyReLU(), nn.Linear(5, 2)), vectors()),
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5, 2)
        ),
        images(),
    ),
    "norms": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(),
            nn.Flatten(), nn.Linear(96, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2),
        ),
        images(),
    ),
    "plain_norm": lambda: (
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.ReLU(), nn.Linear(5, 2)),
        vectors(),
    ),
    "backwards": lambda: (Backwards(), vectors()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_algorithm_1_to_the_bit(name: str) -> None:
    model, example = CHAINS[name]()
    plan, chain = analyze(model, example).plan(), chain_plan(called_layers(model, example))
    assert plan.wishes == chain.wishes
    assert plan.targets == chain.targets
    assert torch.equal(plan.matrix, chain.matrix)
    assert torch.equal(plan.outputs, chain.outputs)


def test_analyze_leaves_the_model_as_it_was() -> None:
    model, example = ALL["lstm"]()
    model.bn = nn.BatchNorm1d(8)
    before, hooks = copy.deepcopy(model.state_dict()), len(model._forward_hooks)
    random, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    grads = [parameter.grad for parameter in model.parameters()]
    analyze(model, example, strict=False)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.grad for parameter in model.parameters()] == grads
    assert len(model._forward_hooks) == hooks
    assert all(isinstance(weight, nn.Parameter) for weight in model.rnn._flat_weights)


# Calls without a rule, and graphs that cannot be traced.


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.special.i0e(self.first(x)))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Strange()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_an_unknown_call_is_named_with_its_line_and_the_option() -> None:
    with pytest.raises(GraphError) as error:
        analyze(Outer(), vectors())
    message = str(error.value)
    assert "special_i0e in inner (Strange)" in message
    assert "test_rescaling.py:" in message
    assert "self.last(torch.special.i0e(self.first(x)))" in message
    assert "analyze(…, strict=False)" in message


def test_operands_of_an_unknown_call_keep_their_scale_if_not_strict() -> None:
    graph = analyze(Outer(), vectors(), strict=False)
    fixed = {block.name for block in graph.blocks if graph.is_fixed(block)}
    assert fixed == {"inner.first.weight", "inner.first.bias"}
    assert max(graph.rescale_({"inner.last.weight": 0.5}).drift.values()) == 0


def test_control_flow_on_data_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GraphError, match=r"cannot trace Branching.*control flow"):
        analyze(Branching(), vectors())
    assert capfd.readouterr() == ("", "")  # torch.export would print the graph so far.


def test_swr_suggests_the_forward_order() -> None:
    for model in (Branching(), Outer()):
        with pytest.raises(GraphError, match=r"(cannot trace Branching|special_i0e in inner).*order='forward'"):
            SWR(model, vectors())


def test_a_wrong_rule_is_found_by_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "relu", lambda walk, node: walk.power(walk.of(node.args[0]), 2))
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 2))
    with pytest.raises(GraphError, match=r"the rule for relu in 1 \(ReLU\).* is wrong"):
        analyze(model, vectors())


# Parameters that are not to be touched, or not met.


def test_frozen_parameters_are_never_written() -> None:
    model, example = CHAINS["norms"]()
    model[3].requires_grad_(False)
    model[7].bias.requires_grad_(False)
    graph = analyze(model, example)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"3.weight", "3.bias", "7.bias"}
    assert not frozen & {block.name for block in graph.plan().targets}
    assert "requires_grad is False" in graph.explain()
    before = copy.deepcopy(model.state_dict())
    rescaling = graph.rescale_({name: 0.8 for name, _ in model.named_parameters()})
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in frozen)
    assert max(rescaling.drift.values()) < 1e-4


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_parameter_that_the_example_does_not_reach_is_an_error_if_strict() -> None:
    with pytest.raises(GraphError, match=r"does not reach unused\.weight, unused\.bias.*strict=False"):
        analyze(Unused(), vectors())
    model = Unused()
    graph = analyze(model, vectors(), strict=False)
    assert {block.name for block in graph.plan().targets} == {"used.weight", "used.bias"}
    assert "the example does not reach it" in graph.explain()
    model.unused.requires_grad_(False)
    assert analyze(model, vectors()).plan().wishes == (Block("used.weight"),)


class Ensemble(nn.Module):
    """A buffer that a running average of activations is kept in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 4), nn.Linear(4, 2)
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.layer(x))
        if self.training:
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.head(h)


def test_a_buffer_that_follows_activations_fixes_them() -> None:
    graph = analyze(Ensemble(), vectors())
    assert graph.is_fixed(Block("layer.weight"))
    assert not analyze(Ensemble().eval(), vectors()).is_fixed(Block("layer.weight"))


# Packed parameters.


def blocks(model: nn.Module, example: object, *names: str) -> list[str]:
    return [str(block) for block in analyze(model, example).blocks if block.name in names]


def test_packed_projections_are_split() -> None:
    model, example = ALL["encoder"]()
    name = "encoder.layers.0.self_attn.in_proj"
    expected = [f"{name}_{leaf}[{i}:{i + 12}]" for leaf in ("weight", "bias") for i in (0, 12, 24)]
    assert blocks(model, example, f"{name}_weight", f"{name}_bias") == expected
    model, example = ALL["cross_attention"]()
    assert len(blocks(model, example, "attention.in_proj_weight")) == 3
    model, example = ALL["hf_gpt2"]()
    name = "transformer.h.1.attn.c_attn.weight"
    assert blocks(model, example, name) == [f"{name}[:, {i}:{i + 12}]" for i in (0, 12, 24)]
    name = "qkv.weight"
    assert blocks(Interleaved(), sequences(), name) == [f"{name}[{i}:{i + 4} mod 12]" for i in (0, 4, 8)]
    assert blocks(GatedLinear(), vectors(), "packed.weight") == ["packed.weight[0:8]", "packed.weight[8:16]"]


def test_blocks_with_the_same_scale_in_every_solution_are_merged() -> None:
    model, example = ALL["hf_llama"]()  # rotary embeddings cut every head in half, and add the halves up again
    assert blocks(model, example, "model.layers.0.self_attn.q_proj.weight") == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
    model, example = ALL["vit_relu"]()  # the class token is taken out at the end
    assert blocks(model, example, "positions") == ["positions"]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions, self.head = nn.Linear(6, 4), nn.Parameter(torch.randn(1, 20, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.embed(x) + self.positions[:, : x.shape[1]]).mean(1))


def test_rows_that_the_example_does_not_reach_belong_to_their_table() -> None:
    model = Positions()
    graph = analyze(model, sequences())
    assert [str(block) for block in graph.blocks if block.name == "positions"] == ["positions"]
    longer = torch.randn(3, 20, 6)
    with torch.no_grad():
        before = model(longer)
        factor = graph.rescale_({"embed.weight": 0.25}).outputs["output"]
        torch.testing.assert_close(model(longer), before * factor)


def test_tied_weights_are_one_block() -> None:
    model, example = ALL["gpt_tied"]()
    names = [block.name for block in analyze(model, example).blocks]
    assert [name for name in names if "tokens" in name or "head" in name] == ["tokens.weight"]


def test_statistics_of_a_concatenation_are_split() -> None:
    graph = analyze(DenseNet(), images())
    pieces = [str(block) for block in graph.plan().targets if block.name == "transition.0.running_mean"]
    assert pieces == [f"transition.0.running_mean[{a}:{b}]" for a, b in ((0, 8), (8, 12), (12, 16), (16, 20))]


# Wishes.


class Scaled(nn.Module):
    """Parameters times numbers: a weight (as with equalized learning rates) and a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3))
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight * 0.5) + self.shift / 4) * self.gain


def test_weights_have_wishes_and_shifts_do_not() -> None:
    assert [str(block) for block in analyze(Scaled(), vectors()).plan().wishes] == ["weight", "gain"]
    model, example = ALL["vit_relu"]()
    wishes = {block.name for block in analyze(model, example).plan().wishes}
    expected = {name for name, p in model.named_parameters() if "weight" in name}
    assert wishes == expected  # norm scales too; no bias, no position, no class token


def test_a_wish_is_granted_and_other_weights_stay() -> None:
    model, example = CHAINS["mlp"]()
    rescaling = analyze(model, example).rescale_({"2.weight": 0.5})
    assert rescaling.factors == pytest.approx({"2.weight": 0.5, "2.bias": 0.5, "4.bias": 0.5})
    assert rescaling.outputs == pytest.approx({"output": 0.5})
    assert max(rescaling.drift.values()) < 1e-6


def test_another_weight_compensates_a_wish() -> None:
    model, example = ALL["vit_relu"]()
    graph = analyze(model, example)
    name = "blocks.0.attention.qkv.weight"
    rescaling = graph.rescale_({f"{name}[0:12]": 0.5})
    granted = rescaling.factors[f"{name}[0:12]"]
    assert granted == pytest.approx(0.5)
    keys, scale = rescaling.factors[f"{name}[12:24]"], rescaling.factors["blocks.0.norm1.weight"]
    assert granted * keys * scale**2 == pytest.approx(1)  # the scores stay
    assert f"{name}[24:36]" in rescaling.factors  # γ is shared with the values, which must make up for it


def test_opposite_wishes_of_tied_weights_are_averaged() -> None:
    model, example = ALL["cross_attention"]()
    name = "attention.in_proj_weight"
    graph = analyze(model, example)
    plan = graph.plan([f"{name}[0:8]", f"{name}[8:16]", "x.weight", "y.weight"])
    # z_x + z_q + z_y + z_k = 0: a wish of one is met with 3/4, and the other three take −1/4 each.
    expected = torch.eye(4, dtype=torch.float64) - 0.25
    rows = torch.stack([plan.matrix[plan.targets.index(block)] for block in plan.wishes])
    torch.testing.assert_close(rows, expected)


def test_wishes_are_checked() -> None:
    model, example = CHAINS["mlp"]()
    graph = analyze(model, example)
    with pytest.raises(ValueError, match=r"'2.weigth' is not a parameter; did you mean '2.weight'\? Allowed: 0\.bias"):
        graph.rescale_({"2.weigth": 0.5})
    with pytest.raises(ValueError, match=r"the factor of '2.weight' is 0; it must be positive"):
        graph.rescale_({"2.weight": 0})


@pytest.mark.parametrize(
    ("argument", "value"),
    [("approximate", {"tanh"}), ("approximate", "gelu"), ("on_conflict", "ask")],
)  # fmt: skip
def test_choices_are_checked(argument: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{argument}: .* is not allowed; it must be"):
        analyze(nn.Linear(6, 2), vectors(), **{argument: value})
    with pytest.raises(TypeError, match="example is a str"):
        analyze(nn.Linear(6, 2), "x")


# Giving up exactness.


@pytest.mark.parametrize("name", ["gpt_tied", "hf_gpt2", "hf_llama"])
def test_approximate_activations_free_their_weights(name: str) -> None:
    torch.manual_seed(0)
    model, example = ALL[name]()
    exact, loose = analyze(model, example), analyze(model, example, approximate={"gelu", "silu"})
    activations = {"gpt_tied": "gelu", "hf_gpt2": "gelu", "hf_llama": "silu"}
    assert activations[name] in exact.explain().lower()
    assert activations[name] not in loose.explain().lower().partition("treated as relu")[0]
    assert "Treated as relu, so the function is kept approximately: 2 × " in loose.explain()
    weights = [block for block in loose.blocks if loose.blocks.index(block) in loose.system.weights]
    wishes = {str(block): 0.99 for block in weights}
    assert max(exact.rescale_(wishes).drift.values()) < 1e-3
    drift = max(loose.rescale_(wishes).drift.values())
    assert 1e-7 < drift < 0.05


def test_on_conflict_rescale_rescales_queries_and_keys() -> None:
    torch.manual_seed(0)
    model = ViT()
    graph = analyze(model, images(), on_conflict="rescale")
    name = "blocks.0.attention.qkv.weight"
    wishes = {f"{name}[0:12]": 0.5, f"{name}[12:24]": 0.5}
    rescaling = graph.rescale_(wishes)
    assert {key: rescaling.factors[key] for key in wishes} == pytest.approx(wishes)
    assert max(rescaling.drift.values()) > 1e-6
    assert 'Not kept, because of on_conflict="rescale"' in graph.explain()
    assert "softmax in blocks.0.attention (Attention)" in graph.explain()
    assert "Not kept" not in analyze(model, images()).explain()


def test_explain_covers_everything_once() -> None:
    model = ResNet18()
    graph = analyze(model, torch.randn(2, 3, 16, 16))
    rows = [line.split()[0] for line in graph.explain().splitlines()[2:] if line]
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, _ in model.named_buffers() if "running" in name]
    assert sorted(row for row in rows if "." in row) == sorted(names)
    lines = {line.split()[0]: line for line in graph.explain().splitlines() if line}
    assert " free " in lines["stem.0.weight"] + " "
    assert "= stages.0.bn1.weight" in lines["stages.0.bn1.bias"]
    assert "tied" in lines["stages.0.bn2.weight"]
    assert "add in stages.0 (BasicBlock)" in lines["stages.0.bn2.weight"]


@pytest.mark.parametrize("name", ["resnet18", "vit_relu"])
def test_a_constant_example_passes_the_check(name: str) -> None:
    model, example = ALL[name]()
    usual = analyze(model, example).plan().matrix
    assert torch.equal(analyze(model, torch.zeros_like(example)).plan().matrix, usual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_point_type(dtype: torch.dtype) -> None:
    model, example = CHAINS["norms"]()
    reference = analyze(model, example).plan()
    assert torch.equal(analyze(model.to(dtype), example.to(dtype)).plan().matrix, reference.matrix)


def test_an_example_that_the_model_cannot_take_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(GraphError, match="example: Sequential cannot be called with it: ValueError: Expected more"):
        analyze(model, torch.zeros(1, 4))
    with pytest.raises(GraphError, match="example: Sequential cannot be called with it: RuntimeError: mat1 and mat2"):
        analyze(model, torch.zeros(2, 5))


@pytest.mark.parametrize("mode", [True, False])
def test_a_graph_that_is_traced_once_has_the_same_plan(mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 8),
        nn.LayerNorm(8), nn.Linear(8, 3),
    ).train(mode)  # fmt: skip
    once = analyze(model, torch.randn(2, 12))
    monkeypatch.setattr("pliant.anatomy.export._is_functional", lambda node: False)
    twice = analyze(model, torch.randn(2, 12))
    operators = [{graph.graph.operator(node) for node in graph.graph.nodes} for graph in (once, twice)]
    assert "dropout" in operators[0]
    assert "dropout" not in operators[1]
    for field in ("wishes", "targets"):
        assert getattr(once.plan(), field) == getattr(twice.plan(), field)
    assert torch.equal(once.plan().matrix, twice.plan().matrix)
