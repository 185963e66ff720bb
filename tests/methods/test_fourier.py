"""Deep Fourier features: values one number at a time, widths, and what is left alone."""

import math

import pytest
import torch
from torch import nn
from torch.optim import Adam

from pliant import FourierConversion, FourierFeatures
from tests import zoo


def test_an_mlp_written_out() -> None:
    model = zoo.build("mlp")
    rows = [(model[i].weight.detach().clone(), model[i].bias.detach().clone()) for i in (0, 2, 4)]
    x = zoo.batch("mlp")[0]
    made = FourierConversion(model, x)
    assert made.changed == ["0", "2"]
    assert [tuple(model[i].weight.shape) for i in (0, 2, 4)] == [(8, 12), (8, 16), (5, 16)]
    assert model[0].out_features == 8
    for example, output in zip(x.tolist(), model(x).tolist(), strict=True):
        values = example
        for weight, bias in rows[:2]:
            kept = zip(weight.tolist()[:8], bias.tolist()[:8], strict=True)
            sums = [sum(w * v for w, v in zip(row, values, strict=True)) + b for row, b in kept]
            values = [math.sin(s) for s in sums] + [math.cos(s) for s in sums]
        last = zip(rows[2][0].tolist(), rows[2][1].tolist(), strict=True)
        expected = [sum(w * v for w, v in zip(row, values, strict=True)) + b for row, b in last]
        assert output == pytest.approx(expected)


def test_channels_are_halved_and_the_flattened_width_stays() -> None:
    model = zoo.build("cnn")
    x = zoo.batch("cnn")[0]
    FourierConversion(model, x)
    assert model[0].out_channels == 2
    assert isinstance(model[1], FourierFeatures)
    assert model[1].dim == -3
    hidden = model[0](x)
    torch.testing.assert_close(model[1](hidden), torch.cat([hidden.sin(), hidden.cos()], 1))
    assert model(x).shape == (8, 5)


def test_what_cannot_be_halved_is_skipped() -> None:
    model = zoo.build("cnn_bn")
    made = FourierConversion(model, zoo.batch("cnn_bn")[0])
    assert made.changed == ["9"]
    assert made.skipped["0"] == "a norm layer of the same width follows it"
    odd = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="it has an odd number of units, 3"):
        FourierConversion(odd, torch.zeros(1, 2))


def test_optimizers_made_before_are_refused() -> None:
    model = zoo.build("mlp")
    optimizer = Adam(model.parameters())
    with pytest.raises(ValueError, match="holds a parameter that fourier replaced"):
        FourierConversion(model, zoo.batch("mlp")[0]).attach(optimizer)
