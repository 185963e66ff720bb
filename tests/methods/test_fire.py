"""FIRE against Algorithm 1 of the paper, on every kind of weight, and what it skips."""

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, RMSprop

from pliant import FIRE, ParsevalRegularization
from pliant.models import create
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.reference import fire as reference

# apply() without an optimizer warns that no moments are reset; these tests do so on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given no optimizer and attached to none")


SOLVERS = ("auto", "loop", "gram", "eigh", "svd")


POLYNOMIALS = ("cubic", "quintic")


def weighted(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]


def deviation(matrix: Tensor) -> float:
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    return float((gram - torch.eye(len(gram), dtype=gram.dtype)).square().sum())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("polynomial", POLYNOMIALS)
@pytest.mark.parametrize("name", ["mlp", "cnn_bn", "vgg"])
def test_matches_algorithm_1(name: str, polynomial: Any, solver: Any) -> None:
    model, control = zoo.build(name), zoo.build(name)
    FIRE(model, polynomial=polynomial, solver=solver).apply()
    reference.fire(weighted(control), 10, polynomial)
    for (key, left), right in zip(model.state_dict().items(), control.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10, msg=key)


def test_matches_algorithm_1_on_resnet18() -> None:
    model = create("resnet18", (3, 8, 8), 10, width=8).double()
    control = copy.deepcopy(model)
    receipt = FIRE(model).apply()
    reference.fire(weighted(control))
    for (key, left), right in zip(model.state_dict().items(), control.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10, msg=key)
    assert receipt.tensors == 21  # 20 convolutions and the head; norm layers stay


@pytest.mark.parametrize("iterations", [1, 5])
def test_auto_acts_on_queries_and_keys_of_a_transformer(iterations: int) -> None:
    model = create("vit_tiny", (3, 16, 16), 10, width=12, depth=2, heads=2).double()
    control = copy.deepcopy(model)
    receipt = FIRE(model, iterations=iterations).apply()
    reference.fire(
        [m for n, m in control.named_modules() if n.endswith(("attention.query", "attention.key"))], iterations
    )
    for (key, left), right in zip(model.state_dict().items(), control.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10, msg=key)
    assert receipt.tensors == 4


def test_all_acts_on_every_layer_of_a_transformer() -> None:
    model = create("vit_tiny", (3, 16, 16), 10, width=12, depth=1, heads=2).double()
    control = copy.deepcopy(model)
    FIRE(model, layers="all").apply()
    reference.fire(weighted(control))
    for (key, left), right in zip(model.state_dict().items(), control.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10, msg=key)


def thirds(weight: Tensor) -> list[Tensor]:
    return list(weight.detach().clone().chunk(3))


def expected_thirds(parts: list[Tensor], acted: int) -> Tensor:
    return torch.cat([*(reference.newton_schulz(p, 10) for p in parts[:acted]), *parts[acted:]])


@pytest.mark.parametrize(("layers", "acted"), [("auto", 2), ("qk", 2), ("all", 3)])
def test_packed_multihead_attention(layers: Any, acted: int) -> None:
    model = nn.MultiheadAttention(8, 2).double()
    parts, out = thirds(model.in_proj_weight), model.out_proj.weight.detach().clone()
    FIRE(model, layers=layers).apply()
    torch.testing.assert_close(model.in_proj_weight, expected_thirds(parts, acted), rtol=1e-9, atol=1e-11)
    assert torch.equal(model.out_proj.weight, out) == (layers != "all")


def test_multihead_attention_with_separate_projections() -> None:
    model = nn.MultiheadAttention(8, 2, kdim=6, vdim=4).double()
    key, value = model.k_proj_weight.detach().clone(), model.v_proj_weight.detach().clone()
    FIRE(model).apply()
    expected = (8 / 6) ** 0.5 * reference.newton_schulz(key, 10)
    torch.testing.assert_close(model.k_proj_weight, expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(model.v_proj_weight, value)


class Fused(nn.Module):
    def __init__(self, name: str, outputs: int) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(8, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_packed_linear_is_found_by_name() -> None:
    model = Fused("qkv", 24).double()
    parts = thirds(model.qkv.weight)
    receipt = FIRE(model).apply()
    torch.testing.assert_close(model.qkv.weight, expected_thirds(parts, 2), rtol=1e-9, atol=1e-11)
    assert list(receipt.details["deviation_from_isometry"]) == ["qkv.weight[q]", "qkv.weight[k]"]


def test_packed_linear_is_given_with_its_sizes() -> None:
    model = Fused("mixer", 16).double()
    q, k, v = (part.clone() for part in model.mixer.weight.detach().split([8, 4, 4]))
    FIRE(model, packed={"mixer": (8, 4, 4)}).apply()
    expected = [reference.newton_schulz(q, 10), 0.5**0.5 * reference.newton_schulz(k, 10), v]
    torch.testing.assert_close(model.mixer.weight, torch.cat(expected), rtol=1e-9, atol=1e-11)


def test_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=12, n_head=2, n_positions=8, vocab_size=20)).double()
    block = model.transformer.h[0]
    attention, mlp, embedding = (
        w.detach().clone() for w in (block.attn.c_attn.weight, block.mlp.c_fc.weight, model.transformer.wte.weight)
    )
    FIRE(model, layers="all").apply()
    torch.testing.assert_close(
        block.attn.c_attn.weight, expected_thirds(thirds(attention.T), 3).T, rtol=1e-9, atol=1e-11
    )
    torch.testing.assert_close(block.mlp.c_fc.weight, 2 * reference.newton_schulz(mlp.T, 10).T, rtol=1e-9, atol=1e-11)
    # The output layer is tied to the embedding, and stays so.
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = (20 / 12) ** 0.5 * reference.newton_schulz(embedding, 10)
    torch.testing.assert_close(model.lm_head.weight, expected, rtol=1e-9, atol=1e-11)


def test_transposed_convolution() -> None:
    model = nn.ConvTranspose2d(4, 6, 3).double()
    weight = model.weight.detach().clone()
    FIRE(model).apply()
    scale = (6 / 4) ** 0.5 / 9
    for i in range(3):
        for j in range(3):
            expected = scale * reference.newton_schulz(weight[:, :, i, j].T, 10).T
            torch.testing.assert_close(model.weight[:, :, i, j], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    model = zoo.build("cnn", dtype=dtype)
    control = copy.deepcopy(model).float()
    FIRE(model).apply()
    FIRE(control).apply()
    for left, right in zip(model.parameters(), control.parameters(), strict=True):
        assert torch.equal(left, right.to(dtype))


def test_receipt_holds_deviation_and_squared_error() -> None:
    for solver in SOLVERS:
        model = zoo.build("mlp")
        before = model[2].weight.detach().clone()
        receipt = FIRE(model, solver=solver).apply()
        after = model[2].weight.detach()
        assert receipt.details["deviation_from_isometry"]["2.weight"] == pytest.approx(deviation(after), rel=1e-8)
        error = receipt.details["squared_frobenius_error"]["2.weight"]
        assert error == pytest.approx(float((after - before).square().sum()), rel=1e-8)


def slice_deviation(weight: Tensor) -> float:
    """Return Σ‖WᵀW − I‖² over kernel positions, without FIRE's scale."""
    slices = weight.reshape(*weight.shape[:2], -1)
    out, inputs, places = slices.shape
    scale = (out / inputs) ** 0.5 / places
    return sum(deviation(slices[:, :, i] / scale) for i in range(places))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_receipt_of_a_partial_move(name: str) -> None:
    model = zoo.build(name)
    receipt = FIRE(model, lam=0.3, polynomial="exact").apply()
    for matrix in FIRE(model).matrices:
        left = slice_deviation(model.get_parameter(matrix.parameter).detach())
        assert receipt.details["deviation_from_isometry"][str(matrix)] == pytest.approx(left, rel=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_autocast_changes_nothing(solver: Any) -> None:
    plain, cast = zoo.build("mlp").float(), zoo.build("mlp").float()
    FIRE(plain, solver=solver).apply()
    with torch.autocast("cpu", torch.bfloat16):
        FIRE(cast, solver=solver).apply()
    assert_same(snapshot(cast), snapshot(plain))


def test_partial_move() -> None:
    model, whole = zoo.build("mlp"), zoo.build("mlp")
    before = copy.deepcopy(model)
    FIRE(model, lam=0.25).apply()
    FIRE(whole).apply()
    for start, here, end in zip(before.parameters(), model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(here, 0.75 * start + 0.25 * end)


def test_where_leaves_layers_out() -> None:
    model = zoo.build("mlp")
    head = model[4].weight.detach().clone()
    receipt = FIRE(model, where=lambda name, _: name != "4.weight").apply()
    assert torch.equal(model[4].weight, head)
    assert receipt.tensors == 2


def test_moments_are_kept_reset_or_rotated() -> None:
    def moments(choice: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
        model = zoo.build("mlp")
        optimizer = Adam(model.parameters())
        train(model, optimizer, "mlp", range(3))
        before = copy.deepcopy(optimizer.state[model[0].weight])
        receipt = FIRE(model, optimizer_state=choice).apply(optimizer)
        assert optimizer.state[model[0].bias]["step"] == 3
        return before, optimizer.state.get(model[0].weight, {}), receipt.details

    before, after, details = moments("keep")
    assert torch.equal(before["exp_avg"], after["exp_avg"])
    assert "optimizer_tensors_reset" not in details
    before, after, details = moments("reset")
    assert after == {}
    assert details["optimizer_tensors_reset"] == 9
    before, after, details = moments("rotate")
    assert details["optimizer_tensors_rotated"] == 6
    assert after["step"] == 3


@pytest.mark.parametrize("shape", [(9, 4), (4, 9)])
@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_rotated_moments_follow_the_weight(lam: float, shape: tuple[int, int]) -> None:
    torch.manual_seed(6)
    model = nn.Linear(shape[1], shape[0], bias=False).double()
    optimizer = Adam(model.parameters())
    model(torch.randn(5, shape[1], dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    old, first, second = (t.detach().clone() for t in (model.weight, state["exp_avg"], state["exp_avg_sq"]))
    FIRE(model, lam=lam, optimizer_state="rotate").apply(optimizer)
    new = model.weight.detach()
    if shape[0] > shape[1]:
        t = torch.linalg.lstsq(old, new).solution
        expected, squares = first @ t, second @ t.square()
    else:
        t = torch.linalg.lstsq(old.T, new.T).solution.T
        expected, squares = t @ first, t.square() @ second
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(state["exp_avg_sq"], squares, rtol=1e-8, atol=1e-10)


def test_reset_keeps_the_moments_of_unchanged_projections() -> None:
    """Only q and k of a packed weight change: v keeps its moments, and the weight its step count."""
    model = nn.MultiheadAttention(8, 2).double()
    optimizer = Adam(model.parameters())
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    model(x, x, x)[0].square().sum().backward()
    optimizer.step()
    state = optimizer.state[model.in_proj_weight]
    value = state["exp_avg"][16:].clone()
    FIRE(model).apply(optimizer)
    assert not state["exp_avg"][:16].any()
    assert not state["exp_avg_sq"][:16].any()
    assert torch.equal(state["exp_avg"][16:], value)
    assert value.any()
    assert state["step"] == 1


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), lambda p: RMSprop(p, momentum=0.5)])
def test_rotates_the_moments_of_other_optimizers(make: Any) -> None:
    model = zoo.build("mlp")
    optimizer = make(model.parameters())
    train(model, optimizer, "mlp", range(2))
    receipt = FIRE(model, optimizer_state="rotate").apply(optimizer)
    assert receipt.details["optimizer_tensors_rotated"] >= 3
    train(model, optimizer, "mlp", range(2, 4))
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_unknown_moments_cannot_be_rotated() -> None:
    model = zoo.build("mlp")
    optimizer = Adamax(model.parameters())
    train(model, optimizer, "mlp", range(1))
    with pytest.raises(
        ValueError, match="Adamax keeps 'exp_inf', which cannot be rewritten in part; known are exp_avg"
    ):
        FIRE(model, optimizer_state="rotate").apply(optimizer)


def test_composes_with_parseval() -> None:
    """After FIRE, the Parseval penalty of a square weight is zero."""
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters(), lr=1e-2)
    fire = FIRE(model, polynomial="exact", where=lambda name, _: name == "2.weight")
    parseval = ParsevalRegularization(model, lam=1e-2, where=lambda name, _: name == "2.weight").attach(optimizer)
    train(model, optimizer, "mlp", range(3))
    before = float(parseval.value())
    fire.apply(optimizer)
    assert float(parseval.value()) < 1e-20 < before
    train(model, optimizer, "mlp", range(3, 6))
    assert parseval.receipt is not None
    assert parseval.receipt.details["steps"] == 6


def test_invalid_settings_are_errors() -> None:
    model = zoo.build("mlp")
    with pytest.raises(ValueError, match="iterations: 0 is not allowed"):
        FIRE(model, iterations=0)
    with pytest.raises(ValueError, match="polynomial: 'septic' is not allowed; it must be one of 'cubic'"):
        FIRE(model, polynomial="septic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="solver: 'qr' is not allowed"):
        FIRE(model, solver="qr")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layers: 'qk', but the model has no query and key projections"):
        FIRE(model, layers="qk")
    with pytest.raises(ValueError, match="optimizer_state: 'rotate' needs the map"):
        FIRE(model, optimizer_state="rotate", solver="loop")
    with pytest.raises(
        ValueError, match="optimizer_state: 'forget' is not allowed; it must be one of 'keep', 'reset', 'rotate'"
    ):
        FIRE(model, optimizer_state="forget")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="packed: 'attention' is not a module of the model"):
        FIRE(model, packed=["attention"])
    with pytest.raises(ValueError, match="packed: '1' is a ReLU, not a linear layer"):
        FIRE(model, packed=["1"])
    with pytest.raises(ValueError, match=r"packed: '0' has 16 outputs, but its q, k and v have \(5, 5, 5\)"):
        FIRE(model, packed=["0"])
    with pytest.raises(ValueError, match="it has no linear or convolution layer"):
        FIRE(nn.LayerNorm(3))


def test_nan_weight_is_an_error_and_changes_nothing() -> None:
    model = zoo.build("mlp")
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    first = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"the weight '2\.weight' holds NaN or infinity"):
        FIRE(model).apply()
    assert torch.equal(model[0].weight, first)


@pytest.mark.parametrize("name", ["q", "key"])
def test_single_layer_named_query_is_not_attention(name: str) -> None:
    model = nn.Sequential(
        OrderedDict([("first", nn.Linear(8, 8)), ("second", nn.Linear(8, 8)), (name, nn.Linear(8, 4))])
    )
    assert [str(matrix) for matrix in FIRE(model).matrices] == ["first.weight", "second.weight", f"{name}.weight"]
    with pytest.raises(ValueError, match="layers: 'qk', but the model has no query and key projections"):
        FIRE(model, layers="qk")


def test_construction_leaves_spectral_norm_buffers_alone() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    before = snapshot(model)
    assert [str(matrix) for matrix in FIRE(model).matrices] == ["1.weight"]
    assert_same(snapshot(model), before)


def test_iterating_solver_with_exact_is_an_error() -> None:
    with pytest.raises(ValueError, match="solver: 'loop' iterates, which never reaches the exact factor"):
        FIRE(zoo.build("mlp"), solver="loop", polynomial="exact")


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_moments_of_a_zero_weight_stay(lam: float) -> None:
    model = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state[model.weight])
    with pytest.warns(UserWarning, match="changed none"):
        FIRE(model, lam=lam, optimizer_state="rotate").apply(optimizer)
    for key, value in optimizer.state[model.weight].items():
        torch.testing.assert_close(value, before[key])


class Mixture(nn.Module):
    """Experts stacked in one parameter, among other kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 4))
        self.projection = nn.Parameter(torch.randn(4, 4))
        self.kernel = nn.Parameter(torch.randn(4, 4, 3))
        self.bias = nn.Parameter(torch.randn(3, 1, 4))
        self.log_std, self.weight_sigma = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(4, 4))
        self.token, self.position_embedding = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(5, 4))
        self.table, self.tied = nn.Embedding(6, 4), nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.tied.weight
        self.norm = nn.LayerNorm((3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x, self.kernel)


def test_layers_with_computed_weights_are_skipped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    model.append(nn.utils.spectral_norm(nn.Linear(2, 2)))
    with pytest.warns(UserWarning, match=r"fire leaves these layers alone, because their weights are computed.*: 1, 3"):
        fire = FIRE(model)
    assert fire.skipped == ["1", "3"]
    assert set(fire.parameters) == {"0.weight", "2.weight"}
    with pytest.raises(ValueError, match=r"no linear or convolution layer .*; the weights of 1 are computed from oth"):
        FIRE(nn.Sequential(nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell])
def test_recurrent_weights_are_skipped(make: Any) -> None:
    model = nn.ModuleDict({"recurrent": make(4, 4), "head": nn.Linear(4, 2)})
    expected = [name for name, p in model["recurrent"].named_parameters(prefix="recurrent") if p.ndim == 2]
    with pytest.warns(UserWarning, match=f"fire leaves these weights alone.*: {', '.join(expected)};") as told:
        fire = FIRE(model)
    assert [warning.filename for warning in told] == [__file__]
    assert fire.skipped == expected
    assert set(fire.parameters) == {"head.weight"}


def test_weights_of_custom_modules_are_skipped() -> None:
    model = nn.Sequential(Mixture(), nn.Bilinear(4, 4, 4))
    expected = ["0.gate_up_proj", "0.projection", "0.kernel", "1.weight"]
    with pytest.warns(UserWarning, match="fire leaves these weights alone"):
        fire = FIRE(model)
    assert fire.skipped == expected
    assert set(fire.parameters) == {"0.router.weight", "0.tied.weight"}
    model[0].projection.requires_grad_(False)
    with pytest.warns(UserWarning, match="fire leaves these weights alone.*: 0.kernel;"):
        assert FIRE(model, where=lambda name, _: "proj" not in name and name != "1.weight").skipped == ["0.kernel"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FIRE(model, where=lambda name, _: name.endswith("router.weight")).skipped == []


def test_parametrized_recurrent_weights_are_skipped() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.RNNCell(4, 4), "weight_hh"), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="fire leaves these weights alone"):
        fire = FIRE(model)
    assert fire.skipped == ["0.weight_ih", "0.parametrizations.weight_hh.original1"]


def test_nothing_is_skipped_if_only_queries_and_keys_are_meant() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.LSTM(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FIRE(model).skipped == FIRE(model, layers="qk").skipped == []
    with pytest.warns(UserWarning, match="fire leaves these weights alone"):
        assert FIRE(model, layers="all").skipped == ["1.weight_ih_l0", "1.weight_hh_l0"]


@pytest.mark.parametrize("name", ["cnn_bn", "tied", "vit_tiny"])
def test_nothing_is_skipped_in_networks_of_known_layers(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FIRE(zoo.build(name), layers="all").skipped == []
