"""Every method on small vision models built as timm builds them: it acts, or says why it cannot."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import pliant
from pliant import methods
from tests import zoo
from tests.integrations.vision_models import MODELS

INPUTS = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(8) % 5
REFUSED = {
    ("crelu", "vit"): r"crelu fits behind none of its layers .*: no ReLU follows it",
    ("crelu", "convnext"): r"crelu fits behind none of its layers .*: no ReLU follows it",
    **{("plasticity_injection", network): "it must be an nn.Sequential whose last modules" for network in MODELS},
}
OFTEN = {
    **zoo.REQUIRED,
    "redo": {"every": 1, "tau": 0.9},
    "regrama": {"every": 1, "tau": 0.9},
    "snr": {"longest": 1},
    "selective_reinit": {"every": 1},
    "continual_backprop": {"rate": 0.1, "maturity": 1},
}
NEVER_SILENT = {("snr", "vit"), ("snr", "convnext")}  # GELU is negative or positive on some example, never zero


@pytest.mark.parametrize("network", MODELS)
@pytest.mark.parametrize("name", methods.names())
def test_every_method_acts(name: str, network: str) -> None:
    torch.manual_seed(0)
    model = MODELS[network]()
    if (name, network) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, network]):
            methods.create(name, model, example=INPUTS[:2])
        return
    method = methods.create(name, model, example=INPUTS[:2], seed=0, **OFTEN.get(name, {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method.attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(INPUTS), TARGETS).backward()
        optimizer.step()
    if method.kind == "reinitializer":
        method.apply(**({"batches": [(INPUTS, TARGETS)], "loss_fn": cross_entropy} if name == "dash" else {}))
    if (name, network) in NEVER_SILENT:
        assert method.receipt is None
        return
    assert method.receipt is not None
    if name != "optimizer_reset":  # which leaves the weights
        assert method.receipt.entries
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert model(INPUTS).isfinite().all()


def test_units_of_each_network() -> None:
    found = {name: set(pliant.ReDo(build(), INPUTS[:2]).groups) for name, build in MODELS.items()}
    assert found == {
        "vit": {"blocks.0.mlp.fc1", "blocks.1.mlp.fc1"},
        "convnext": {"stages.0.conv_dw", "stages.0.mlp.fc1", "stages.2.conv_dw", "stages.2.mlp.fc1"},
        "se_resnet": {"conv1"} | {f"layer{i}.{layer}" for i in (1, 2) for layer in ("conv1", "conv2", "se.fc1")},
    }
