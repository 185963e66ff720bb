from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from pliant.diagnostics.batches import Batch
from pliant.diagnostics.per_sample import inner_products as factors
from pliant.diagnostics.per_sample.gradient_gram import gradient_gram
from tests.diagnostics.networks import NETWORKS, SAMPLES, Twice, network
from tests.reference.gradients import per_sample_gradients


def assert_equal(ours: Tensor, gradients: Tensor) -> None:
    """Equal to the rounding of float64, relative to the norms of the two gradients of each product."""
    theirs = gradients @ gradients.T
    scale = theirs.diagonal().sqrt()
    assert float(((ours - theirs).abs() / (scale[:, None] * scale)).max()) < 1e-13


def test_samples_are_checked_in_the_precision_of_the_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x))).float()

    for seed in range(10):
        torch.manual_seed(seed)
        batch = Batch.of((torch.randn(64, 64).bfloat16(), torch.randint(0, 10, (64,))))
        assert not gradient_gram(Net().bfloat16(), batch, cross_entropy).one_by_one


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_layer_matches_single_samples(name: str) -> None:
    model, batch, loss_fn = network(name)
    result = gradient_gram(model, batch, loss_fn)
    gradients = per_sample_gradients(model, batch, loss_fn)
    assert_equal(result.total, gradients)
    mean = torch.cat([g.flatten() for g in result.gradient.values()])
    torch.testing.assert_close(mean, gradients.mean(0), rtol=1e-12, atol=1e-14)
    start = 0
    for parameter, gram in zip(model.parameters(), result.parameters.values(), strict=True):
        part = gradients[:, start : start + parameter.numel()]
        torch.testing.assert_close(gram, part @ part.T, rtol=1e-10, atol=1e-14)
        start += parameter.numel()
    assert all(name.startswith("memory.") for name in result.one_by_one), "only the LSTM has no rule"


class Frames(nn.Module):
    """A convolution over the frames of all samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 8, 2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.relu(self.body(x.flatten(0, 1)))
        return self.head(frames.mean((2, 3)).view(*x.shape[:2], -1).mean(1))


class Biased(nn.Module):
    """Attention to a key and a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def counted() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(24, 4))


@pytest.mark.parametrize(
    ("build", "inputs", "without_rule"),
    [
        (Frames, torch.randn(SAMPLES, 2, 2, 2, 2), {}),  # few places: by pairs of them
        (Frames, torch.randn(SAMPLES, 5, 2, 4, 4), {}),  # many: by blocks of the weight
        (
            Biased,
            torch.randn(SAMPLES, 5, 6),
            dict.fromkeys(["attention.bias_k", "attention.bias_v"], "multi_head_attention_forward"),
        ),
        (counted, torch.randint(0, 5, (SAMPLES, 4)), {"0.weight": "embedding"}),
    ],
    ids=["few frames", "many frames", "attention's own key", "counted rows"],
)
def test_less_common_uses_match_single_samples(
    build: Callable[[], nn.Module], inputs: Tensor, without_rule: dict[str, str]
) -> None:
    model = build().double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    batch = Batch.of((inputs, torch.randint(0, 4, (SAMPLES,))))
    result = gradient_gram(model, batch, cross_entropy)
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
    assert result.one_by_one == {k: f"it is used in `{call}`, which has no rule" for k, call in without_rule.items()}


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", ["twice", "residual", "language"])
def test_few_samples(name: str, samples: int) -> None:
    model, batch, loss_fn = network(name, samples)
    assert_equal(gradient_gram(model, batch, loss_fn).total, per_sample_gradients(model, batch, loss_fn))


def test_as_many_positions_as_samples_are_told_apart() -> None:
    model, batch, loss_fn = network("positions", samples=3)
    assert batch.args[0].shape == (3, 3, 6)
    assert_equal(gradient_gram(model, batch, loss_fn).total, per_sample_gradients(model, batch, loss_fn))


@pytest.mark.parametrize("name", ["cnn", "language", "conv3d"])
def test_blocks_and_pairs_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little memory makes many blocks; which way is cheaper must not matter to the result."""
    model, batch, loss_fn = network(name)
    gradients = per_sample_gradients(model, batch, loss_fn)
    monkeypatch.setattr(factors, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(factors, "PRODUCT_BYTES", 1000)
    monkeypatch.setattr(factors, "SAMPLES_AT_ONCE", 2)
    assert_equal(gradient_gram(model, batch, loss_fn).total, gradients)


@pytest.mark.parametrize("positions", [1, 3, 40])
def test_both_ways_of_a_linear_layer_are_the_product_of_its_gradients(positions: int) -> None:
    generator = torch.Generator().manual_seed(positions)
    deltas = torch.randn(5, positions, 9, generator=generator, dtype=torch.float64)
    inputs = torch.randn(5, positions, 11, generator=generator, dtype=torch.float64)
    use, gradients = factors.Outer(deltas, inputs), torch.einsum("mto,mti->moi", deltas, inputs).flatten(1)
    assert_equal(factors._gram_by_blocks([use], 5, 9, 11, torch.device("cpu")), gradients)
    assert_equal(factors._gram_by_pairs(use.left, use.right), gradients)
    assert_equal(factors.gram([use], 5, torch.empty(9, 11)), gradients)


def test_gpt2_of_transformers_needs_no_fallback() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(0, 13, (SAMPLES, 6))
    batch = Batch.of({"input_ids": tokens, "labels": tokens})

    def loss_fn(output: object, target: Tensor) -> Tensor:
        return cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())  # type: ignore[attr-defined]

    result = gradient_gram(model, batch, loss_fn)
    assert_equal(result.total, per_sample_gradients(model, batch, loss_fn))
    assert result.one_by_one == {}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_reduction_of_the_loss_does_not_matter(reduction: str) -> None:
    model, batch, _ = network("mlp")
    gradients = per_sample_gradients(model, batch, cross_entropy)
    result = gradient_gram(model, batch, nn.CrossEntropyLoss(reduction=reduction))
    assert_equal(result.total, gradients)


def test_frozen_parameters_are_not_part_of_it() -> None:
    model, batch, loss_fn = network("mlp")
    model[0].requires_grad_(False)
    result = gradient_gram(model, batch, loss_fn)
    assert_equal(result.total, per_sample_gradients(model, batch, loss_fn))
    assert set(result.parameters) == {"2.weight", "4.weight", "4.bias"}
    with pytest.raises(ValueError, match="must have a parameter that requires gradients"):
        gradient_gram(model.requires_grad_(False), batch, loss_fn)


def test_model_and_gradients_are_left_alone() -> None:
    model, batch, loss_fn = network("residual")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradient_gram(model, batch, loss_fn)
    assert all(v.equal(before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is not None and p.grad.eq(1).all() and not p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_right_or_named(reentrant: bool) -> None:
    class Checkpointed(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(lambda h: torch.tanh(self.body(h)), x, use_reentrant=reentrant))

    model = Checkpointed().double()
    batch = Batch.of((torch.randn(5, 6, dtype=torch.float64, requires_grad=True), torch.randint(0, 4, (5,))))
    result = gradient_gram(model, batch, cross_entropy)
    if reentrant:  # the layer is not part of the graph, and `torch.autograd.grad` knows nothing of it
        assert result.cut_off == ("body.bias", "body.weight")
    else:
        assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
        assert result.one_by_one == {}
        assert result.cut_off == ()


def test_a_detached_weight_adds_nothing() -> None:
    class Detached(Twice):
        def forward(self, x: Tensor) -> Tensor:
            once = torch.tanh(self.body(x))
            return self.head(torch.tanh(once @ self.body.weight.detach().t()))

    model = Detached().double()
    batch = Batch.of((torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))))
    result = gradient_gram(model, batch, cross_entropy)
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
    assert result.one_by_one == {}


def test_a_weight_of_the_wrong_layout_is_found_out_and_still_right() -> None:
    class TimeMajor(nn.Module):
        """Merges positions and samples with the positions first, which no shape can tell."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            merged = torch.relu(self.body(x.transpose(0, 1).reshape(-1, 6)))
            return self.head(merged.view(x.shape[1], x.shape[0], 5).mean(0))

    model = TimeMajor().double()
    batch = Batch.of((torch.randn(5, 3, 6, dtype=torch.float64), torch.randint(0, 4, (5,))))
    result = gradient_gram(model, batch, cross_entropy)
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
    assert set(result.one_by_one) == {"body.weight", "body.bias"}


def test_a_path_that_depends_on_the_number_of_samples_is_found_out_and_still_right() -> None:
    class Moody(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0 if len(x) > 2 else x)

    model = Moody().double()
    batch = Batch.of((torch.randn(5, 6, dtype=torch.float64), torch.randint(0, 4, (5,))))
    result = gradient_gram(model, batch, cross_entropy)
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
    assert set(result.one_by_one.values()) == {"the forward pass depends on the number of samples"}


def test_samples_that_influence_each_other_are_an_error() -> None:
    model, batch, loss_fn = network("residual")
    with pytest.raises(ValueError, match="BatchNorm layer takes its statistics from the batch"):
        gradient_gram(model.train(), batch, loss_fn)

    class Centred(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    batch = Batch.of((torch.randn(5, 6), torch.randint(0, 4, (5,))))
    with pytest.raises(ValueError, match="must not depend on the other samples"):
        gradient_gram(Centred(), batch, cross_entropy)


def test_too_much_to_take_one_by_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "HELD_BYTES", 100)
    model, batch, loss_fn = network("recurrent")
    with pytest.raises(ValueError, match=r"memory.weight_ih_l0 \(it is used in `lstm`, which has no rule\)"):
        gradient_gram(model, batch, loss_fn)


class Through(nn.Module):
    """A layer whose weight is used through what `view` makes of it."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.head, self.view = nn.Parameter(torch.randn(8, 6)), nn.Linear(8, 4), view

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.view(self.weight)))


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w.T, lambda w: w.permute(1, 0)])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_transposed_weight_needs_no_gradient_of_its_size(
    view: Callable[[Tensor], Tensor], positions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "HELD_BYTES", 0)
    model = Through(view).double()
    batch = Batch.of((torch.randn(SAMPLES, *positions, 6).double(), torch.randn(SAMPLES, *positions, 4).double()))
    assert_equal(gradient_gram(model, batch, mse_loss).total, per_sample_gradients(model, batch, mse_loss))


def test_the_rows_of_a_weight_need_no_gradient_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parts(nn.Module):
        """Projections that share a weight and a bias, as those of attention do."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias, self.head = (
                nn.Parameter(torch.randn(10, 6)), nn.Parameter(torch.randn(10)), nn.Linear(4, 4)
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            first, second, _ = (linear(x, w, b) for w, b in zip(self.weight.split(4), self.bias.split(4), strict=True))
            return self.head(torch.tanh(first) * second + linear(x, self.weight[3:7]))

    monkeypatch.setattr(factors, "HELD_BYTES", 0)
    model = Parts().double()
    batch = Batch.of((torch.randn(SAMPLES, 6).double(), torch.randint(0, 4, (SAMPLES,))))
    result = gradient_gram(model, batch, cross_entropy)
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
    assert result.one_by_one == {}


def test_too_much_to_hold_of_a_computed_weight_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Through(lambda w: w.tanh().t()).double()
    batch = Batch.of((torch.randn(SAMPLES, 6).double(), torch.randint(0, 4, (SAMPLES,))))
    assert_equal(gradient_gram(model, batch, cross_entropy).total, per_sample_gradients(model, batch, cross_entropy))
    monkeypatch.setattr(factors, "HELD_BYTES", 100)
    with pytest.raises(ValueError, match=r"weight \(a tensor computed from it is used\)"):
        gradient_gram(model, batch, cross_entropy)


@pytest.mark.parametrize("kinds", [[1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0, 1]])
def test_samples_that_go_different_ways_are_right(kinds: list[int]) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            way, out = x[:, 0] > 0, x.new_zeros(len(x), 4)
            out[way], out[~way] = self.one(x[way]), self.other(x[~way])
            return out

    model, x = Experts().double(), torch.randn(8, 6).double()
    x[:, 0] = 2 * torch.tensor(kinds) - 1
    batch = Batch.of((x, torch.randint(0, 4, (8,))))
    result = gradient_gram(model, batch, cross_entropy)
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))
    assert "for tensors without a dimension of all samples" in result.one_by_one["other.weight"]


def test_complex_parameters_are_refused() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.cfloat) @ self.weight).abs()

    with pytest.raises(ValueError, match="must be real, got complex numbers in weight"):
        gradient_gram(Complex(), Batch.of((torch.randn(5, 6), torch.randint(0, 4, (5,)))), cross_entropy)


def test_the_rule_for_what_is_indexed_by_sample_is_named() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(6, 1, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, attn_mask=mask)[0].mean(1))

    labels = torch.randint(0, 4, (8,))
    batch = Batch.of({"x": torch.randn(8, 8, 6), "mask": torch.zeros(8, 8), "labels": labels})
    with pytest.raises(ValueError, match=r"does not run on 2 of the 8 samples. .* such as a mask, must not be as long"):
        gradient_gram(Masked(), batch, cross_entropy)

    class Sharing(Twice):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.shared

    batch = Batch.of((torch.randn(8, 6), labels))
    with pytest.raises(ValueError, match="a shared output or target must not be as long as the batch"):
        gradient_gram(Sharing(), batch, lambda out, y: cross_entropy(out[0], y) + out[1].square().mean())


def test_gradients_of_few_rows_are_those_of_all() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3)).double()
    batch = Batch.of((torch.tensor([[0, 0], [1, 2], [0, 3]]), torch.tensor([0, 1, 2])))
    result = gradient_gram(model, batch, cross_entropy)
    model[0].sparse = False
    assert_equal(result.total, per_sample_gradients(model, batch, cross_entropy))


def test_equal_losses_of_a_weighted_mean_are_not_taken_for_equal_gradients() -> None:
    """With a head of zeros all samples have the loss log 4, and so has every weighted mean of them."""
    model, batch, _ = network("mlp")
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    loss_fn = nn.CrossEntropyLoss(torch.tensor([1.0, 50, 1, 1], dtype=torch.float64))
    mean = torch.cat([g.flatten() for g in gradient_gram(model, batch, loss_fn).gradient.values()])
    torch.testing.assert_close(mean, per_sample_gradients(model, batch, loss_fn).mean(0), rtol=1e-12, atol=1e-14)


def test_half_precision_is_computed_wide() -> None:
    model, batch, loss_fn = network("positions")
    exact = gradient_gram(model, batch, loss_fn).total
    half = gradient_gram(model.bfloat16(), batch.on(model), loss_fn)
    assert half.total.dtype == torch.float64
    assert float((half.total - exact).norm() / exact.norm()) < 0.02


def test_regression_with_a_mapping_of_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"sum": self.left(a) + self.right(b)}

    model = Two().double()
    inputs = {"a": torch.randn(6, 3, dtype=torch.float64), "b": torch.randn(6, 4, dtype=torch.float64)}
    batch = Batch.of((inputs, torch.randn(6, 2, dtype=torch.float64)))
    result = gradient_gram(model, batch, lambda out, target: mse_loss(out["sum"], target))
    reference = per_sample_gradients(model, batch, lambda out, target: mse_loss(out["sum"], target))
    assert_equal(result.total, reference)
