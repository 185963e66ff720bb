"""Attention entropy, per layer and head, in every way that attention is written."""

import math

import pytest
import torch
from torch import Tensor, nn

from pliant import models
from pliant.diagnostics import measure
from pliant.diagnostics.attention import attention_entropy, attention_scores

TOKENS = torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(0))


def slow_entropy(query: Tensor, key: Tensor, causal: bool) -> list[float]:
    """The definition, weight by weight; query and key are [samples, heads, positions, width]."""
    samples, heads, positions, width = query.shape
    found = []
    for head in range(heads):
        relative = []
        for sample in range(samples):
            for t in range(positions):
                keys = key[sample, head, : t + 1 if causal else positions]
                if len(keys) > 1:
                    sizes = [math.exp(float(query[sample, head, t] @ k) / math.sqrt(width)) for k in keys]
                    weights = [size / sum(sizes) for size in sizes]
                    relative.append(-sum(w * math.log(w) for w in weights) / math.log(len(weights)))
        found.append(sum(relative) / len(relative))
    return found


class Written(nn.Module):
    """Attention written out with a softmax and a mask of the smallest number, as libraries have it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.inner.query, self.inner.key, self.inner.value)
        q, k, v = (part(x).unflatten(-1, (self.inner.heads, -1)).transpose(1, 2) for part in parts)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, torch.finfo(x.dtype).min)
        return self.inner.output((nn.functional.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))


def trained_gpt() -> nn.Module:
    model = models.create("gpt", (6,), 11, depth=2, width=8, heads=2, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(20)  # fresh attention is almost uniform
    return model.requires_grad_(False)


def test_every_layer_and_head_of_a_gpt_equals_the_definition() -> None:
    model = trained_gpt()
    inputs: dict[str, Tensor] = {}
    for number, block in enumerate(model.blocks):
        block.attention.register_forward_pre_hook(
            lambda m, args, n=number: inputs.update({f"blocks.{n}.attention": args[0]})
        )
    found = measure(model, TOKENS, measures=["attention_entropy"]).values
    expected = {}
    for name, x in inputs.items():
        attention = model.get_submodule(name)
        query, key = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (attention.query, attention.key))
        heads = slow_entropy(query, key, causal=True)
        expected |= {f"attention_entropy/{name}[{n}]": value for n, value in enumerate(heads)}
        expected[f"attention_entropy/{name}"] = sum(heads) / 2
    expected["attention_entropy"] = sum(expected[f"attention_entropy/{name}"] for name in inputs) / 2
    assert found == pytest.approx(expected, rel=1e-10)
    assert min(found.values()) < 0.9


def test_a_softmax_that_is_written_out_gives_the_same() -> None:
    model = trained_gpt()
    fused = measure(model, TOKENS, measures=["attention_entropy"]).values
    for block in model.blocks:
        block.attention = Written(block.attention)
    written = measure(model, TOKENS, measures=["attention_entropy"]).values
    assert written == pytest.approx(fused, rel=1e-10)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_of_torch(need_weights: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=need_weights)[0]

    torch.manual_seed(0)
    model, x = Net().double().requires_grad_(False), 5 * torch.randn(3, 6, 8, dtype=torch.float64)
    q, k, _ = nn.functional.linear(x, model.attention.in_proj_weight, model.attention.in_proj_bias).chunk(3, -1)
    heads = slow_entropy(*(part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, k)), causal=False)
    found = measure(model, x, measures=["attention_entropy"]).values
    assert [found[f"attention_entropy/attention[{n}]"] for n in range(2)] == pytest.approx(heads, rel=1e-8)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    layers = measure(encoder, x.float(), measures=["attention_entropy"]).values
    assert {"attention_entropy/layers.0.self_attn[1]", "attention_entropy/layers.1.self_attn"} <= layers.keys()


def test_uniform_and_concentrated_attention() -> None:
    assert attention_entropy(torch.zeros(2, 1, 4, 4)).tolist() == [1.0]
    assert attention_entropy(1e4 * torch.eye(4)[None, None]).tolist() == [0.0]
    assert math.isnan(attention_entropy(torch.zeros(1, 1, 3, 1)).item()), "a query that sees one key has no entropy"
    query = torch.randn(1, 4, 3, 2)
    scores = attention_scores(query, query[:, :2], attn_mask=torch.tensor([0.0, 0.0, -math.inf]), scale=2.0)
    torch.testing.assert_close(scores[0, 3, :, :2], 2.0 * query[0, 3] @ query[0, 1, :2].T)
    assert scores[..., 2].isneginf().all()


def test_a_network_without_attention_is_skipped() -> None:
    found = measure(nn.Linear(3, 2), torch.ones(2, 3), measures=["attention_entropy"])
    assert found.skipped == {"attention_entropy": "it needs attention, and the forward pass showed none"}
