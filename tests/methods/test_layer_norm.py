"""LayerNorm inserted into existing models."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from pliant import LayerNormInsertion
from pliant.models import create
from tests import zoo
from tests.reference import architecture as reference


def test_matches_the_reference() -> None:
    model = zoo.build("mlp")
    x = zoo.batch("mlp")[0]
    hidden = model[0](x)
    made = LayerNormInsertion(model, x)
    assert made.changed == ["0", "2"]
    expected = torch.stack([reference.normalize(row) for row in hidden]).relu()
    torch.testing.assert_close(model[1](hidden), expected, rtol=1e-10, atol=1e-12)
    assert {"0.weight", "2.weight", "4.weight", "1.0.weight", "1.0.bias"} <= set(dict(model.named_parameters()))
    assert made.receipt.tensors == 4
    assert made.receipt.entries == 64


def test_convolutions_are_normalized_over_channels_and_positions() -> None:
    model = zoo.build("cnn")
    x = zoo.batch("cnn")[0]
    hidden = model[0](x)
    LayerNormInsertion(model, x)
    expected = torch.stack([reference.normalize(image) for image in hidden]).relu()
    torch.testing.assert_close(model[1](hidden), expected, rtol=1e-10, atol=1e-12)
    assert isinstance(model[4][0], nn.GroupNorm)
    assert isinstance(model[8][0], nn.LayerNorm)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(4, 4) for _ in range(4))
        self.act, self.norm, self.tanh = nn.ReLU(), nn.LayerNorm(4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(x))
        x = self.norm(self.act(self.two(x)))
        return self.four(self.tanh(self.three(x)))


def test_layers_with_a_norm_layer_are_skipped() -> None:
    model = zoo.build("cnn_bn")
    made = LayerNormInsertion(model, zoo.batch("cnn_bn")[0])
    assert made.changed == ["9"]
    assert made.skipped["0"] == "it has a norm layer already"
    with pytest.raises(
        ValueError, match=r"layer_norm fits behind none of its layers \(.*its activation is not a module of its own"
    ):
        LayerNormInsertion(Functional(), torch.zeros(2, 4), where=lambda n, _: n == "one.weight")
    vit = create("vit_tiny", (3, 8, 8), 5, width=6, depth=1, heads=2)
    assert LayerNormInsertion(vit, torch.zeros(2, 3, 8, 8)).changed == ["1.mlp.0"]


def test_optimizer_without_the_new_norm_layers_is_rejected() -> None:
    model = zoo.build("mlp")
    early = Adam(model.parameters())
    made = LayerNormInsertion(model, zoo.batch("mlp")[0])
    with pytest.raises(
        ValueError, match=r"this Adam holds '0.weight' but not '1.0.weight', which layer_norm made; make"
    ):
        made.attach(early)
    made.attach(Adam([*model[0].parameters(), *model[1].parameters()]), Adam(model[4].parameters()))


@pytest.mark.parametrize("training", [False, True])
def test_dropout_is_not_an_activation(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.ReLU(), nn.Linear(5, 6), nn.Dropout(), nn.Linear(6, 2))
    method = LayerNormInsertion(model.train(training), torch.zeros(1, 4))
    assert [name for name, _ in model.named_parameters() if "0" in name.split(".")[1:]] == ["2.0.weight", "2.0.bias"]
    assert method.skipped["3"] == "no activation follows it"
