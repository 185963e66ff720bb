"""Which weights SWR pulls and how strongly, and what it refuses."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from pliant import SWR
from pliant.anatomy import plan_rescaling
from tests import zoo
from tests.loops import assert_same, snapshot


def test_strengths_by_pattern_filter_and_classifier() -> None:
    model, example = zoo.build("cnn_bn"), zoo.batch("cnn_bn")[0]

    def strengths(**settings: object) -> dict[str, float]:
        swr = SWR(model, example, **settings)
        return dict(zip(swr._weight_names, swr.lam.tolist(), strict=True))

    assert strengths(lam=0.1, lam_classifier=0.5) == {
        "0.weight": 0.1, "1.weight": 0.1, "4.weight": 0.1, "5.weight": 0.1, "9.weight": 0.5, "11.weight": 0.5,
    }  # fmt: skip
    assert strengths(lam={"4.*": 0.2, "*": 0.1})["4.weight"] == 0.2
    assert strengths(lam={"4.*": 0.2})["0.weight"] == 0.0
    assert strengths(lam=0.1, where=lambda name, p: p.dim() == 4)["9.weight"] == 0.0
    assert SWR(zoo.build("mlp"), zoo.batch("mlp")[0], lam=0.1, lam_classifier=0.5).lam.tolist() == [0.1, 0.1, 0.5]


class Attention(nn.Module):
    """Packed queries, keys and values, embedded tokens, and an output that is the embedding's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.tokens(x)).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v))


def test_patterns_for_a_packed_weight_and_a_classifier_that_is_tied() -> None:
    model, example = Attention(), torch.arange(6).reshape(2, 3)

    def strengths(**settings: object) -> dict[str, float]:
        swr = SWR(model, example, **settings)
        return dict(zip(swr._weight_names, swr.lam.tolist(), strict=True))

    names = ["tokens.weight", "qkv.weight[0:8]", "qkv.weight[8:16]", "qkv.weight[16:24]"]
    assert strengths(lam={"*.weight": 0.5}) == dict.fromkeys(names, 0.5)
    packed = dict.fromkeys(names[1:], 0.5)
    assert strengths(lam={"qkv.weight": 0.5}) == {"tokens.weight": 0.0} | packed
    first = {"qkv.weight[0:8]": 0.25, "qkv.*": 0.5}
    assert strengths(lam=first) == {"tokens.weight": 0.0} | packed | {"qkv.weight[0:8]": 0.25}
    assert strengths(lam=0.5, lam_classifier=0.75) == dict.fromkeys(names, 0.75)  # the tied head is in the tail


def test_only_schedules_need_a_learning_rate() -> None:
    model, example = zoo.build("mlp"), zoo.batch("mlp")[0]
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    SWR(model, example).attach(optimizer).detach()
    for schedule in ("coupled", "reinit"):
        swr = SWR(model, example, schedule=schedule)
        with pytest.raises(ValueError, match=f"this SGD has no learning rate, but schedule='{schedule}' follows it"):
            swr.attach(optimizer)
        assert swr.optimizers == ()
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_bad_settings_are_errors() -> None:
    model, example = zoo.build("mlp"), zoo.batch("mlp")[0]
    with pytest.raises(ValueError, match=r"mode: 'fast' is not allowed; it must be one of 'exact', 'paper'"):
        SWR(model, example, plan={"mode": "fast"})
    with pytest.raises(ValueError, match=r"every: 0 is not allowed"):
        SWR(model, example, every=0)
    with pytest.raises(ValueError, match=r"lam_classifier: 2\.0 is not allowed"):
        SWR(model, example, lam_classifier=2.0)
    with pytest.raises(ValueError, match="example: None"):
        SWR(model)
    with pytest.raises(ValueError, match=r"pattern 'haed\.\*' matches no parameter"):
        SWR(model, example, lam={"haed.*": 0.1})
    with pytest.raises(ValueError, match="order: 'backward' is not allowed"):
        SWR(model, example, plan={"order": "backward"})
    with pytest.raises(ValueError, match="plan: there is no 'mood'; did you mean 'mode'"):
        SWR(model, example, plan={"mood": "paper"})


def test_a_chain_is_of_weights_that_are_parameters() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="'0' computes its weight"):
        SWR(model, plan={"order": ["0", "2"]})


@pytest.mark.parametrize("settings", [{"order": "forward"}, {"mode": "paper"}, {"order": ["0", "2", "4"]}])
@pytest.mark.parametrize("meant_for_a_graph", [{"approximate": {"gelu"}}, {"on_conflict": "rescale"}])
def test_options_of_the_graph_are_refused_for_a_chain(settings: dict, meant_for_a_graph: dict) -> None:
    with pytest.raises(ValueError, match="approximate, on_conflict: they need order='graph' with mode='exact'"):
        SWR(zoo.build("mlp"), zoo.batch("mlp")[0], plan={**settings, **meant_for_a_graph})


@pytest.mark.parametrize("value", ["lam", "initial_norms"])
def test_an_assigned_value_takes_effect_at_once(value: str) -> None:
    model = zoo.build("mlp")
    swr = SWR(model, zoo.batch("mlp")[0], lam=0.5)
    swr.step()
    with torch.no_grad():
        model[0].weight.mul_(4)
    before = snapshot(model)
    setattr(swr, value, torch.zeros_like(swr.lam) if value == "lam" else swr._norms())
    swr.step()
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("lam", [1.5, -0.1, torch.nan])
def test_a_strength_out_of_range_is_refused(lam: float) -> None:
    swr = SWR(zoo.build("mlp"), zoo.batch("mlp")[0], lam=0.5)
    with pytest.raises(ValueError, match=r"lam: .* is not allowed; it must be a number that is in \[0, 1\]"):
        swr.lam = torch.tensor([0.5, lam, 0.5])
    assert swr.lam.tolist() == [0.5, 0.5, 0.5]


def test_a_made_plan_is_used_as_it_is() -> None:
    model, example = zoo.build("mlp"), zoo.batch("mlp")[0]
    plan = plan_rescaling(model, example, mode="paper")
    assert SWR(model, plan=plan).plan is plan
    with pytest.raises(ValueError, match="lam_classifier: the classifier is found on an example"):
        SWR(model, plan=plan, lam_classifier=0.1)


def test_an_swr_that_pulls_nothing_warns() -> None:
    model = zoo.build("mlp")
    inputs = zoo.batch("mlp")[0]
    with pytest.raises(ValueError, match=r"where: it selects none of the weights that swr can pull: 0\.weight, 2"):
        SWR(model, inputs, where=lambda name, _: name.endswith("bias"))
    biases = SGD([p for name, p in model.named_parameters() if "bias" in name], lr=0.1)
    with pytest.warns(UserWarning, match="swr pulls none of the parameters that its optimizers hold"):
        SWR(model, inputs).attach(biases)


def test_a_block_of_a_weight_has_a_strength_by_its_name() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(4, 8), encoder, nn.Linear(8, 3))
    inputs = torch.zeros(1, 2, 4)
    block = next(name for name in SWR(model, inputs)._weight_names if "[" in name)
    swr = SWR(model, inputs, lam={block: 0.5})
    assert swr.lam.tolist() == [0.5 * (name == block) for name in swr._weight_names]


class WithLoss(nn.Module):
    """Returns the loss too if it is given labels, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def test_that_a_loss_is_among_the_outputs_is_said() -> None:
    x, labels = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.warns(
        UserWarning, match=r"example: with it WithLoss returns a single number \(loss\), probably a loss"
    ):
        SWR(WithLoss(), {"x": x, "labels": labels})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SWR(WithLoss(), {"x": x})
    with pytest.warns(UserWarning, match="probably a loss"):
        SWR(WithLoss(), {"x": x[:1], "labels": labels[:1]})


class Squeezed(nn.Module):
    """Single numbers that are no loss: the value of a single sample, a count, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.body(x).squeeze(), self.count + 1, torch.tensor(0.5)


@pytest.mark.parametrize("shape", [(1, 4), (5, 4), (4,)])
def test_other_single_numbers_are_not_taken_for_a_loss(shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SWR(Squeezed(), torch.randn(shape)).lam.shape == (2,)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_the_receipt_counts_a_packed_tensor_once() -> None:
    model = Attending()
    swr = SWR(model, torch.randn(2, 3, 8), lam=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    swr.step()
    written = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    assert swr.receipt is not None
    assert swr.receipt.tensors == len(written) < len(swr.plan.targets)


def test_a_method_and_its_receipt_can_be_read() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    swr = SWR(model, torch.randn(2, 4), lam=1.0)
    assert repr(swr) == "<SWR of Sequential, not attached, 0 steps>"
    optimizer = SGD(model.parameters(), lr=0.0)
    swr.attach(optimizer)
    with torch.no_grad():
        model[0].weight.mul_(2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert repr(swr) == "<SWR of Sequential, attached to SGD, 1 steps>"
    assert str(swr.receipt).splitlines()[:3] == [
        "swr: rescale, 2 tensors, 15 entries",
        "  factors: 0.weight 0.5",
        "  output_factors: 0.5",
    ]
