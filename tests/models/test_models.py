"""The networks have the papers' shapes, and their initial weights depend on the seed alone."""

import copy
import random
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from pliant import methods, models


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def linear(*widths: int) -> int:
    return sum((a + 1) * b for a, b in pairwise(widths))


def conv(kernel: int, *channels: int) -> int:
    return sum((a * kernel**2 + 1) * b for a, b in pairwise(channels))


VGG = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("mlp", (1, 28, 28), 10, linear(784, 100, 100, 10)),
        ("mlp_4x256", (1, 28, 28), 10, linear(784, 256, 256, 256, 256, 10)),
        ("mlp_4x256_ln", (1, 28, 28), 10, linear(784, 256, 256, 256, 256, 10) + 4 * 512),
        ("mlp_3x256", (1, 28, 28), 10, linear(784, 256, 256, 256, 10)),
        ("mlp_residual", (1, 28, 28), 10, linear(784, 100, 100, 100, 100, 100, 10)),
        ("cnn", (3, 32, 32), 10, conv(5, 3, 16, 16) + linear(16 * 8 * 8, 100, 10)),
        ("cnn_bn", (3, 32, 32), 100, conv(5, 3, 16, 16) + linear(16 * 8 * 8, 100, 100) + 2 * 32),
        ("cnn_strided", (3, 32, 32), 10, conv(3, 3, 16, 32, 64, 128) + linear(128 * 4, 512, 10)),
        ("vgg16", (3, 64, 64), 200, conv(3, *VGG) + 2 * sum(VGG[1:]) + linear(2048, 4096, 4096, 200)),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("vit_tiny", (3, 32, 32), 100, 5_380_132),
        ("gpt", (64,), 65, (65 + 64) * 128 + 4 * (4 * linear(128, 128) + linear(128, 512, 128) + 512) + 256),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, expected: int) -> None:
    model = models.create(name, shape, classes)
    assert count(model) == expected
    if name == "gpt":
        assert model(torch.randint(classes, (2, *shape))).shape == (2, *shape, classes)
        return
    assert model(torch.randn(2, *shape)).shape == (2, classes)


def test_vgg_width_is_configurable() -> None:
    narrow = [3, *(channels // 8 for channels in VGG[1:])]
    expected = conv(3, *narrow) + 2 * sum(narrow[1:]) + linear(narrow[-1], 16, 16, 10)
    assert count(models.create("vgg16", (3, 32, 32), 10, width=16, channels=8)) == expected


def test_vit_tiny_parameter_count_is_the_sum_of_its_parts() -> None:
    width, patches = 192, 64
    block = 4 * linear(width, width) + linear(width, 4 * width, width) + 4 * width
    tokens = 3 * 4 * 4 * width + width + width + (patches + 1) * width
    assert tokens + 12 * block + 2 * width + linear(width, 100) == 5_380_132


def test_residual_mlp_has_shortcuts_around_layers_of_equal_width() -> None:
    model = models.mlp((5,), 3, widths=(4, 4, 6, 6), residual=True)
    first, second, third, fourth, last = (module for module in model.modules() if isinstance(module, nn.Linear))
    x = torch.randn(7, 5)
    h = first(x).relu()
    h = h + second(h).relu()
    h = third(h).relu()
    h = h + fourth(h).relu()
    torch.testing.assert_close(model(x), last(h), rtol=0, atol=0)


def test_every_network_has_a_parameter_count_above() -> None:
    marks = test_parameter_counts.pytestmark
    assert {case[0] for case in marks[0].args[1]} == set(models.names())


@pytest.mark.parametrize("name", ["mlp", "cnn_bn", "vit_tiny"])
def test_weights_depend_on_the_seed_and_not_on_the_global_generator(name: str) -> None:
    state = torch.get_rng_state()
    one, same, other = (models.create(name, (1, 8, 8), 10, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_user_builders_are_seeded_in_every_generator(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import random\nimport numpy\nimport torch\ndef build(shape, classes):\n"
        "    net = torch.nn.Linear(2, classes)\n"
        "    net.bias.data += float(numpy.random.normal()) + random.random()\n    return net\n"
    )
    state = random.getstate(), numpy.random.get_state()[1].tolist()
    one, other, third = (models.create(f"{tmp_path / 'own.py'}:build", (2,), 3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.bias, other.bias)
    assert not torch.equal(one.bias, third.bias)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == state


@pytest.mark.parametrize(("shape", "patches"), [((1, 28, 28), 49), ((3, 32, 32), 64), ((3, 100, 100), 100)])
def test_vit_default_patches_divide_the_image(shape: tuple[int, ...], patches: int) -> None:
    tokens = models.create("vit_tiny", shape, 10, depth=1)[0]
    assert tokens(torch.zeros(1, *shape)).shape[1] in (patches, patches + 1)


def test_layer_norm_precedes_the_activation() -> None:
    kinds = [type(layer) for layer in models.mlp((4,), 2, widths=(3,), layer_norm=True)]
    assert kinds == [nn.Flatten, nn.Linear, nn.LayerNorm, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "gelu", "identity"])
def test_activations(activation: str) -> None:
    model = models.create("mlp_3x256", (5,), 2, activation=activation)
    kind = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "identity": nn.Identity}
    assert sum(isinstance(layer, kind[activation]) for layer in model) == 3


def test_vit_has_separate_query_and_key_layers() -> None:
    model = models.create("vit_tiny", (3, 32, 32), 10, depth=2)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert "1.attention.query" in names
    assert "2.attention.key" in names


def test_vit_output_depends_on_every_patch() -> None:
    model = models.create("vit_tiny", (1, 8, 8), 3, depth=1, patch=4)
    x = torch.randn(1, 1, 8, 8, requires_grad=True)
    model(x).sum().backward()
    assert (x.grad.abs().view(2, 4, 2, 4).amax((1, 3)) > 0).all()


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        models.create("resnet", (3, 32, 32), 10)
    with pytest.raises(ValueError, match=r"shape is \(5,\); a CNN takes images"):
        models.create("cnn", (5,), 10)
    with pytest.raises(ValueError, match="2 poolings need images of at least 4 pixels"):
        models.create("cnn", (1, 3, 3), 10)
    with pytest.raises(ValueError, match="at least 32 x 32"):
        models.create("vgg16", (3, 16, 16), 10)
    with pytest.raises(ValueError, match="activation is 'swish'"):
        models.create("mlp", (5,), 2, activation="swish")
    with pytest.raises(ValueError, match="patch is 5; it must divide"):
        models.create("vit_tiny", (3, 32, 32), 10, patch=5)
    with pytest.raises(ValueError, match="heads: 0 is not allowed; it must be an integer ≥ 1"):
        models.create("vit_tiny", (3, 32, 32), 10, heads=0)
    with pytest.raises(ValueError, match="patch: -1 is not allowed; it must be an integer ≥ 1"):
        models.create("vit_tiny", (3, 32, 32), 10, patch=-1)
    with pytest.raises(ValueError, match="classes: 0 is not allowed; it must be an integer ≥ 1"):
        models.create("mlp", (4,), 0)
    with pytest.raises(ValueError, match="model 'mlp': there is no 'widht'; did you mean 'widths'"):
        models.create("mlp", (4,), 2, widht=3)
    with pytest.raises(ValueError, match="heads is 5; it must divide width"):
        models.create("vit_tiny", (3, 32, 32), 10, heads=5)


def test_user_builders(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def build(shape, classes, width=3):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.Linear(width, classes))\n"
        "def wrong(shape, classes):\n"
        "    return 'a network'\n"
        "def bare(width=3):\n"
        "    return nn.Linear(4, width)\n"
        "def needy(one, two, three):\n"
        "    return nn.Linear(4, 4)\n"
    )
    model = models.create(f"{tmp_path / 'own.py'}:build", (4,), 2, seed=1, width=5)
    again = models.create(f"{tmp_path / 'own.py'}:build", (4,), 2, seed=1, width=5)
    assert count(model) == linear(4, 5, 2)
    assert torch.equal(model[1].weight, again[1].weight)
    with pytest.raises(ValueError, match="returned str; it must return"):
        models.create(f"{tmp_path / 'own.py'}:wrong", (4,), 2)
    assert count(models.create(f"{tmp_path / 'own.py'}:bare", (4,), 2, width=5)) == linear(4, 5)
    with pytest.raises(
        ValueError, match=r"takes \(one, two, three\); it is called with \(shape, classes\), or without"
    ):
        models.create(f"{tmp_path / 'own.py'}:needy", (4,), 2)
    with pytest.raises(
        ValueError, match=r"takes \(shape, classes, width=3\); it is called with \(shape, classes, depth=…\)"
    ):
        models.create(f"{tmp_path / 'own.py'}:build", (4,), 2, depth=2)


@pytest.mark.parametrize(
    ("initial", "variance"), [("torch", 1 / 3 / 400), ("he", 2 / 400), ("xavier", 2 / (400 + 300))]
)
def test_initial_weights_have_the_variance_of_their_initialization(initial: str, variance: float) -> None:
    model = models.create("mlp", (400,), 10, widths=[300], initial=initial)
    first = model[1]
    torch.testing.assert_close(first.weight.var().item(), variance, rtol=0.02, atol=0)
    assert bool((first.bias == 0).all()) == (initial != "torch")


def test_a_reset_uses_the_initialization_of_the_network() -> None:
    model = models.create("mlp", (400,), 10, widths=[300], initial="he")
    began = copy.deepcopy(model.state_dict())
    methods.create("full_reset", model, seed=0).apply()
    assert not torch.equal(model[1].weight, began["1.weight"])
    torch.testing.assert_close(model[1].weight.var().item(), 2 / 400, rtol=0.02, atol=0)
    assert (model[1].bias == 0).all()


def test_unknown_initializations_are_rejected() -> None:
    with pytest.raises(ValueError, match="initial is 'her'; did you mean 'he'"):
        models.create("mlp", (4,), 2, initial="her")


def test_builder_arguments_with_defaults_are_options(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn\n"
        "def plain(widths=(6, 5), classes=3):\n"
        "    return nn.Sequential(nn.Linear(4, widths[0]), nn.Linear(*widths), nn.Linear(widths[1], classes))\n"
        "def named(input_shape=(9,), num_classes=9):\n"
        "    return nn.Linear(*input_shape, num_classes)\n"
        "def half(shape, hidden=3):\n"
        "    return nn.Linear(*shape, hidden)\n"
    )
    own = f"{tmp_path / 'own.py'}:"
    assert count(models.create(f"{own}plain", (4,), 2)) == linear(4, 6, 5, 3)
    assert count(models.create(f"{own}plain", (4,), 2, classes=2)) == linear(4, 6, 5, 2)
    assert count(models.create(f"{own}named", (4,), 2)) == linear(4, 2)
    with pytest.raises(
        ValueError, match=r"takes \(shape, hidden=3\); .*\. Arguments with defaults get neither, unless"
    ):
        models.create(f"{own}half", (4,), 2)


def test_a_builder_that_returns_the_same_network_twice_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from torch import nn\nNETWORK = nn.Linear(4, 2)\ndef build(shape, classes):\n    return NETWORK\n"
    (tmp_path / "one_network.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    models.create("one_network:build", (4,), 2)
    with pytest.raises(ValueError, match="returned the same network twice; it must build a new one"):
        models.create("one_network:build", (4,), 2)
