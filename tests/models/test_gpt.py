"""The GPT: equal to transformers' GPT-2, causal, drawn as GPT-2, and trained with every method."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from pliant import methods, models, streams
from pliant._seeding import seed_everything
from pliant.data.text import cut_windows
from pliant.training import Learner, Settings, train
from tests import zoo

TEXT = cut_windows("text", ["the quick brown fox jumps over the lazy dog. " * 12], 16)


def tiny(**options: object) -> nn.Module:
    return models.create("gpt", (16,), len(TEXT.classes), **{"depth": 2, "width": 16, "heads": 2, **options})


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_gpt2_computes(tied: bool) -> None:
    model = models.create("gpt", (12,), 30, depth=2, width=16, heads=2, tied=tied).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    config = GPT2Config(
        vocab_size=30, n_positions=12, n_embd=16, n_layer=2, n_head=2, activation_function="gelu",
        tie_word_embeddings=tied, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    oracle = GPT2LMHeadModel(config).double().eval()
    state = model.state_dict()
    theirs = {"transformer.wte.weight": state["tokens.weight"], "transformer.wpe.weight": state["positions.weight"]}
    theirs |= {f"transformer.ln_f.{p}": state[f"norm.{p}"] for p in ("weight", "bias")}
    theirs["lm_head.weight"] = state["head.weight"]
    for i in range(2):
        block, own = f"transformer.h.{i}", f"blocks.{i}"
        for p in ("weight", "bias"):
            theirs |= {f"{block}.ln_{n}.{p}": state[f"{own}.norm{n}.{p}"] for n in (1, 2)}
            packed = [state[f"{own}.attention.{part}.{p}"] for part in ("query", "key", "value")]
            theirs[f"{block}.attn.c_attn.{p}"] = torch.cat(packed).T if p == "weight" else torch.cat(packed)
            for name, part in {"attn.c_proj": "attention.output", "mlp.c_fc": "mlp.0", "mlp.c_proj": "mlp.2"}.items():
                theirs[f"{block}.{name}.{p}"] = state[f"{own}.{part}.{p}"].T
    oracle.load_state_dict(theirs)
    tokens = torch.randint(30, (3, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), oracle(tokens).logits, rtol=0, atol=1e-12)


def test_a_token_sees_only_those_before_it() -> None:
    model = tiny()
    tokens = torch.randint(len(TEXT.classes), (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % len(TEXT.classes)
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    assert torch.equal(one[:, :9], other[:, :9])
    assert not torch.equal(one[:, 9:], other[:, 9:])


@pytest.mark.filterwarnings("error")
def test_weights_are_drawn_as_gpt2_draws_them_also_by_a_reset() -> None:
    model = models.create("gpt", (64,), 500, depth=8, width=256)
    for step in ("built", "reset"):
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.2.weight")):
                expected = 0.02 / math.sqrt(16)
            elif name.endswith("weight") and "norm" not in name:
                expected = 0.02
            else:
                expected = None
                assert set(parameter.unique().tolist()) <= {0.0, 1.0}, (step, name)
            if expected:
                assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.03), (step, name)
        methods.FullReset(model, optimizer_state="keep").apply()
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize("name", ["swr", "fire", "shrink_perturb", "full_reset", "redo", "l2_init", "plain"])
def test_a_model_of_transformers_is_trained_from_ones_own_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "def build(shape, classes, layers=1):\n"
        "    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=classes, n_positions=shape[0],\n"
        "                        bos_token_id=0, eos_token_id=0)\n"
        "    return GPT2LMHeadModel(config)\n"
    )
    model = models.create(f"{tmp_path / 'own.py'}:build", (16,), len(TEXT.classes), layers=2)
    stream = streams.create("permuted_vocabulary", TEXT, tasks=2, epochs=1)
    example = stream[0].train.x[:2]
    assert model(example).shape == (2, 16, len(TEXT.classes))
    made = [] if name == "plain" else [methods.create(name, model, example=example, seed=0)]
    learner = Learner(model, Settings(batch_size=8), made)
    learner.measure(["attention_entropy", "dormant_fraction", "sharpness"], stream[0])
    records = list(train(learner, stream, 0))
    assert all(math.isfinite(record["test_loss"]) for record in records)
    assert {"attention_entropy", "dormant_fraction", "sharpness"} <= set(records[0]["measures"])


# Plasticity injection needs a Sequential that ends in the head.
@pytest.mark.parametrize("name", [name for name in methods.names() if name != "plasticity_injection"])
def test_every_method_trains_it_on_a_vocabulary_that_changes(name: str) -> None:
    seed_everything(0)
    stream = streams.create("permuted_vocabulary", TEXT, tasks=2, epochs=1)
    model = tiny(activation="relu", tied=False)
    example = stream[0].train.x[:2]
    learner = Learner(
        model,
        Settings(batch_size=8),
        [methods.create(name, model, example=example, seed=0, **zoo.REQUIRED.get(name, {}))],
    )
    records = list(train(learner, stream, 0))
    assert all(math.isfinite(record["loss"]) for record in records)
    assert all("test_accuracy" in record and "test_loss" in record for record in records)
