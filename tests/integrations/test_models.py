"""Every method under Trainer on tiny language models: it runs, or raises the error that the docs' table shows."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pliant
from pliant import methods
from pliant.integrations.transformers import PliantCallback
from tests import zoo
from tests.integrations.language_models import IDS, MODELS, gpt2, trainer

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto-frameworks.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text().partition("## Which methods fit language models")[2])
TABLE = {name: {"gpt2": gpt2, "llama": llama} for name, gpt2, llama in ROWS}


def loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def use(name: str, model: nn.Module, folder: Path) -> None:
    """Train a model under the Trainer, with one method that acts at least once."""
    callback = PliantCallback(
        lambda model: methods.create(name, model, example={"input_ids": IDS[:2]}, seed=0, **zoo.REQUIRED.get(name, {}))
    )
    run = trainer(model, folder, callback, max_steps=3)
    run.train()
    (method,) = callback.methods.values()
    if method.kind == "reinitializer":
        data = {"batches": [({"input_ids": IDS[:4]}, IDS[:4])], "loss_fn": loss} if name == "dash" else {}
        (receipt,) = callback.on_new_data(**data)
        assert receipt.entries
    else:
        assert sum(method.steps) == 3
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", methods.names())
def test_every_method_runs_or_raises_what_the_table_says(name: str, model: str, tmp_path: Path) -> None:
    said = TABLE[name][model]
    if said == "runs":
        use(name, MODELS[model](), tmp_path)
    else:
        with pytest.raises(ValueError, match=re.escape(said.strip("`"))):
            use(name, MODELS[model](), tmp_path)


def test_the_table_names_every_method_once() -> None:
    assert sorted(name for name, *_ in ROWS) == sorted(methods.names())


def test_full_reset_draws_as_transformers_do() -> None:
    """GPT-2 scales the projections back into the residual stream down; torch's own draw of a Linear is wider."""
    model = gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    for module in model.modules():
        module._is_hf_initialized = True
    pliant.FullReset(model, seed=0).apply()
    block, scale = model.transformer.h[0], model.config.initializer_range
    assert float(block.mlp.c_fc.weight.std()) == pytest.approx(scale, rel=0.2)
    assert float(block.mlp.c_proj.weight.std()) == pytest.approx(scale / 2, rel=0.2)
    assert not block.mlp.c_fc.bias.any()
    assert (block.ln_1.weight == 1).all()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert float(model.transformer.wte.weight.std()) == pytest.approx(scale, rel=0.2)


def test_redo_draws_as_transformers_do() -> None:
    model = gpt2()
    redo = pliant.ReDo(model, {"input_ids": IDS[:2]}, every=1, tau=100.0, seed=0)  # every unit counts as dormant
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    redo.attach(optimizer)
    loss(model(input_ids=IDS[:4]), IDS[:4]).backward()
    optimizer.step()
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert float(weight.std()) == pytest.approx(model.config.initializer_range, rel=0.2)
    assert not model.transformer.h[0].mlp.c_proj.weight.any()


def test_a_tied_head_is_not_reset_into_the_embedding() -> None:
    with pytest.raises(ValueError, match=r"head: lm_head shares a parameter with 'transformer\.wte'"):
        pliant.HeadReset(gpt2(), {"input_ids": IDS[:2]})
