"""Recyclers on LLaMA of the transformers library: a unit of its gated layers is a pair of rows, of gate and up."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.optim import SGD, Adam, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from pliant import ContinualBackprop, ReDo
from tests.loops import snapshot

IDS = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"vocab_size": 20, "intermediate_size": 30, "max_position_embeddings": 8, "mlp_bias": True}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, bos_token_id=0, eos_token_id=0, pad_token_id=None)).double()


def logits(model: nn.Module) -> Tensor:
    out: Tensor = model(input_ids=IDS).logits
    return out


def training_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    optimizer.step()


def test_redo_renews_both_rows_of_dead_units_and_leaves_all_else_alone() -> None:
    model, dead = build(), {"model.layers.0.mlp": [3, 17], "model.layers.1.mlp": [0]}
    optimizer = Adam(model.parameters(), lr=1e-3)
    redo = ReDo(model, {"input_ids": IDS}, every=2, init=lambda layer: nn.init.uniform_(layer.weight, 3.0, 4.0)).attach(
        optimizer
    )
    assert list(redo.groups) == [f"{name}.gate_proj" for name in dead]
    training_step(model, optimizer)  # all units are alive, and the optimizer remembers it
    with torch.no_grad():
        for name, units in dead.items():
            model.get_submodule(name).gate_proj.bias[units] = -200.0
    twin = copy.deepcopy(model)
    its_optimizer = Adam(twin.parameters(), lr=1e-3)
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    training_step(twin, its_optimizer)
    expected = logits(twin)
    training_step(model, optimizer)

    assert redo.receipt is not None
    assert redo.receipt.details["units"] == {f"{name}.gate_proj": units for name, units in dead.items()}
    torch.testing.assert_close(logits(model), expected, rtol=1e-12, atol=1e-12)
    renewed = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    for name, units in dead.items():
        mlp = model.get_submodule(name)
        for layer, leaf in ((mlp.gate_proj, "gate_proj"), (mlp.up_proj, "up_proj")):
            drawn = layer.weight[units]
            assert ((drawn >= 3) & (drawn <= 4)).all()
            assert drawn.unique().numel() == drawn.numel()
            assert not layer.bias[units].any()
            renewed[f"{name}.{leaf}.weight"][units] = True
            renewed[f"{name}.{leaf}.bias"][units] = True
        assert not torch.equal(mlp.gate_proj.weight[units], mlp.up_proj.weight[units])
        assert not mlp.down_proj.weight[:, units].any()
        renewed[f"{name}.down_proj.weight"][:, units] = True
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours[~renewed[name]], theirs[~renewed[name]]), name
        for key in ("exp_avg", "exp_avg_sq"):
            mine, its = optimizer.state[ours][key], its_optimizer.state[theirs][key]
            assert torch.equal(mine[~renewed[name]], its[~renewed[name]]), name
            assert its[renewed[name]].all(), name
            assert not mine[renewed[name]].any(), name
    assert redo.receipt.entries == sum(int(mask.sum()) for mask in renewed.values())

    training_step(model, optimizer)
    for name, units in dead.items():
        assert model.get_submodule(name).down_proj.weight[:, units].all()


def test_continual_backprop_moves_the_mean_of_the_product_into_the_next_bias() -> None:
    """Where activations are constant, renewing units leaves the function as it was."""
    model = build()
    with torch.no_grad():
        for block in model.model.layers:
            for layer in (block.mlp.gate_proj, block.mlp.up_proj):
                layer.weight.zero_()
                layer.bias.uniform_(0.5, 1.5)
    optimizer = SGD(model.parameters(), lr=0.0)
    cbp = ContinualBackprop(model, {"input_ids": IDS}, rate=0.1, maturity=1, gain=1.0, seed=0).attach(optimizer)
    before, expected = snapshot(model), logits(model)
    for _ in range(2):
        training_step(model, optimizer)
    assert cbp.receipt is not None
    for index, block in enumerate(model.model.layers):
        name = f"model.layers.{index}.mlp"
        h = silu(before[f"{name}.gate_proj.bias"]) * before[f"{name}.up_proj.bias"]
        utilities = h.abs() * before[f"{name}.down_proj.weight"].abs().mean(0)
        units = cbp.receipt.details["units"][f"{name}.gate_proj"]
        assert units == sorted(utilities.argsort()[:3].tolist())
        for layer in (block.mlp.gate_proj, block.mlp.up_proj):
            drawn = layer.weight[units].detach().abs()
            assert 0 < float(drawn.min()) < float(drawn.max()) <= (3 / 12) ** 0.5
            assert not layer.bias[units].any()
            others = [unit for unit in range(30) if unit not in units]
            assert not layer.weight[others].any()
    torch.testing.assert_close(logits(model), expected, rtol=1e-12, atol=1e-12)
