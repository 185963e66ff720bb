"""Recyclers on GPT-2 of the transformers library, whose linear layers reshape what they read."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from pliant import ContinualBackprop, ReDo
from tests.loops import snapshot

IDS = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_positions": 8, "vocab_size": 20, "n_inner": 30}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)).double()


def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(input_ids=IDS).logits
    return out


def training_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    optimizer.step()


def test_redo_renews_dead_units_and_leaves_all_else_alone() -> None:
    model, dead = build(), {"transformer.h.0.mlp.c_fc": [3, 17], "transformer.h.1.mlp.c_fc": [0]}
    optimizer = Adam(model.parameters(), lr=1e-3)
    redo = ReDo(model, {"input_ids": IDS}, every=2, init=lambda layer: nn.init.uniform_(layer.weight, 3.0, 4.0)).attach(
        optimizer
    )
    assert list(redo.groups) == list(dead)
    training_step(model, optimizer)  # all units are alive, and the optimizer remembers it
    assert redo.receipt is None
    with torch.no_grad():
        for name, units in dead.items():
            model.get_submodule(name).bias[units] = -20.0
    twin = copy.deepcopy(model)
    its_optimizer = Adam(twin.parameters(), lr=1e-3)
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    training_step(twin, its_optimizer)
    expected = logits(twin)
    training_step(model, optimizer)

    assert redo.receipt is not None
    assert redo.receipt.details["units"] == dead
    torch.testing.assert_close(logits(model), expected, rtol=1e-12, atol=1e-12)
    renewed = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    for name, units in dead.items():
        incoming, outgoing = model.get_submodule(name), model.get_submodule(name.replace("c_fc", "c_proj"))
        drawn = incoming.weight[:, units]
        assert ((drawn >= 3) & (drawn <= 4)).all()
        assert drawn.unique().numel() == drawn.numel()
        assert not incoming.bias[units].any()
        assert not outgoing.weight[units].any()
        renewed[f"{name}.weight"][:, units] = True
        renewed[f"{name}.bias"][units] = True
        renewed[f"{name.replace('c_fc', 'c_proj')}.weight"][units] = True
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours[~renewed[name]], theirs[~renewed[name]]), name
        for key in ("exp_avg", "exp_avg_sq"):
            mine, its = optimizer.state[ours][key], its_optimizer.state[theirs][key]
            assert torch.equal(mine[~renewed[name]], its[~renewed[name]]), name
            assert its[renewed[name]].all(), name
            assert not mine[renewed[name]].any(), name

    training_step(model, optimizer)
    for name, units in dead.items():
        assert model.get_submodule(name.replace("c_fc", "c_proj")).weight[units].all()


def test_continual_backprop_moves_the_mean_into_the_next_bias() -> None:
    """Where activations are constant, renewing units leaves the function as it was."""
    model = build()
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.weight.zero_()
            block.mlp.c_fc.bias.uniform_(0.5, 1.5)
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, {"input_ids": IDS}, rate=0.1, maturity=1, seed=0).attach(optimizer)
    before, expected = snapshot(model), logits(model)
    for _ in range(2):
        training_step(model, optimizer)
    assert cbp.receipt is not None
    for index, block in enumerate(model.transformer.h):
        name = f"transformer.h.{index}.mlp"
        # Of equal inputs, the least useful are those whose weights and constant activation have the least product.
        h = block.mlp.act(before[f"{name}.c_fc.bias"])
        utilities = h * before[f"{name}.c_proj.weight"].abs().mean(1)
        assert cbp.receipt.details["units"][f"{name}.c_fc"] == sorted(utilities.argsort()[:3].tolist())
    torch.testing.assert_close(logits(model), expected, rtol=1e-12, atol=1e-12)
