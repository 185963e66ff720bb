import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.utils._python_dispatch import TorchDispatchMode

from pliant import SWR
from tests import zoo
from tests.loops import assert_same, snapshot, train
from tests.reference import swr as reference


def tiny_eps(model: nn.Module) -> nn.Module:
    """A norm layer divides by √(var + eps): only without the eps does it undo a scale exactly."""
    for module in model.modules():
        if isinstance(module, reference.NORMS):
            module.eps = 1e-300
    return model


@pytest.mark.parametrize("mode", ["exact", "paper"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn_bn", "vgg"])
def test_matches_the_reference_over_a_run(name: str, mode: str) -> None:
    model = zoo.build(name)
    optimizer = SGD(model.parameters(), lr=1e-2, momentum=0.9)
    SWR(model, zoo.batch(name)[0], lam=1e-2, lam_classifier=0.1, plan={"order": "forward", "mode": mode}).attach(
        optimizer
    )
    train(model, optimizer, name, range(20))

    slow = zoo.build(name)
    layers = reference.layers_of(slow)
    initial = [reference.frobenius(layer.weight) for layer in layers]
    tail = len(layers) - (1 if name == "mlp" else {"cnn": 2, "cnn_bn": 2, "vgg": 3}[name])
    lam = [1e-2 if i < tail else 0.1 for i in range(len(layers))]
    optimizer = SGD(slow.parameters(), lr=1e-2, momentum=0.9)
    for step in range(20):
        train(slow, optimizer, name, [step])
        reference.rescale(layers, initial, lam, mode)

    for key, value in slow.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_an_analyzed_chain_gives_the_same_run_to_the_last_bit(name: str) -> None:
    def run(order: str) -> dict[str, torch.Tensor]:
        model = zoo.build(name)
        optimizer = Adam(model.parameters(), lr=1e-2)
        SWR(model, zoo.batch(name)[0], lam=1e-2, lam_classifier=0.1, plan={"order": order}).attach(optimizer)
        train(model, optimizer, name, range(5))
        return snapshot(model)

    assert_same(run("graph"), run("forward"))


def test_drift_of_an_approximated_activation_is_in_the_receipt() -> None:
    torch.manual_seed(0)
    example = torch.randn(50, 6, dtype=torch.float64)

    def build(activation: nn.Module) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 20), activation, nn.Linear(20, 4)).double()

    kept = SWR(build(nn.GELU()), example, lam=1.0)
    assert kept._weight_names == ["2.weight"]  # in front of the gelu nothing may change
    assert max(kept.measure_drift().values()) < 1e-12
    model = build(nn.GELU())
    approximated = SWR(model, example, lam=1.0, plan={"approximate": {"gelu"}})
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    before = snapshot(model)
    drift = approximated.measure_drift()
    assert_same(snapshot(model), before)
    assert max(drift.values()) > 1e-3
    assert approximated.receipt is None
    approximated.step()
    assert approximated.receipt is not None
    assert approximated.receipt.details["drift"].keys() == drift.keys()
    with pytest.raises(ValueError, match=r"plan: it has no graph, because .* belongs to a copy"):
        copy.deepcopy(approximated).explain()
    assert "gelu" in kept.explain()


def test_a_model_that_allows_no_rescaling_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Sigmoid())
    with pytest.raises(ValueError, match="no weight can be rescaled"):
        SWR(model, torch.ones(1, 3))


def test_erratum_the_printed_algorithm_changes_predictions_and_ours_does_not() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(400, 1, 12, 12, dtype=torch.float64)
    original = tiny_eps(zoo.build("cnn_bn"))
    with torch.no_grad():
        for layer in reference.layers_of(original):
            layer.bias.normal_()
    initial = [reference.frobenius(layer.weight) for layer in reference.layers_of(original)]

    @torch.no_grad()
    def grow(model: nn.Module) -> nn.Module:
        for factor, layer in zip((3.0, 2.0, 5.0, 4.0, 2.5, 1.5), reference.layers_of(model), strict=True):
            layer.weight *= factor
        return model

    before = grow(copy.deepcopy(original))(inputs)

    def after(form: reference.Form) -> torch.Tensor:
        model = copy.deepcopy(original)
        if form == "printed":
            reference.rescale(reference.layers_of(grow(model)), initial, [0.5] * 6, form)
        else:
            swr = SWR(model, inputs[:2], lam=0.5, plan={"order": "forward", "mode": form})
            grow(model)
            swr.step()
        return model(inputs)

    def is_proportional(left: torch.Tensor, right: torch.Tensor) -> bool:
        ratio = left / right
        return bool(((ratio - ratio.flatten()[0]).abs() < 1e-9 * ratio.abs()).all())

    assert not is_proportional(after("printed"), before)
    assert (after("printed").argmax(1) != before.argmax(1)).any()
    for form in ("paper", "exact"):
        assert is_proportional(after(form), before), form
        assert (after(form).argmax(1) == before.argmax(1)).all()


def test_paper_mode_moves_predictions_where_a_bias_sits_before_a_layer_norm() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        ).double()
        return tiny_eps(model)

    inputs = torch.randn(200, 8, dtype=torch.float64)
    for mode, kept in (("exact", True), ("paper", False)):
        model = build()
        swr = SWR(model, inputs, lam=0.5, plan={"order": "forward", "mode": mode})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.7
        before = model(inputs).detach()
        swr.step()
        ratio = model(inputs).detach() / before
        spread = float((ratio / ratio.flatten()[0] - 1).abs().max())
        assert (spread < 1e-10) == kept, (mode, spread)


def test_batch_norm_statistics_move_with_their_input() -> None:
    model = tiny_eps(zoo.build("cnn_bn"))
    train(model, SGD(model.parameters(), lr=0.1), "cnn_bn", range(5))
    inputs = zoo.batch("cnn_bn", size=300)[0]
    swr = SWR(model, inputs, lam=1.0, plan={"order": "forward"})
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight *= 3
    model.eval()
    # Tripled weights with the old statistics are another function; rescale from where both agree.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
    before = model(inputs)
    swr.step()
    ratio = model(inputs) / before
    torch.testing.assert_close(ratio, ratio.flatten()[:1].expand_as(ratio).contiguous(), rtol=1e-9, atol=0)
    assert swr.receipt is not None
    assert swr.receipt.details["output_factors"][0] == pytest.approx(ratio.flatten()[0].item(), rel=1e-9)


def test_hard_rescaling_restores_the_initial_norms() -> None:
    model = zoo.build("mlp")
    swr = SWR(model, zoo.batch("mlp")[0], lam=1.0)
    initial = [float(model[i].weight.detach().norm()) for i in (0, 2, 4)]
    train(model, SGD(model.parameters(), lr=0.5), "mlp", range(5))
    swr.step()
    assert [float(model[i].weight.norm()) for i in (0, 2, 4)] == pytest.approx(initial, rel=1e-14)


def test_every_acts_on_every_nth_step() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    swr = SWR(model, zoo.batch("mlp")[0], lam=1.0, every=3).attach(optimizer)
    initial = swr.initial_norms.clone()
    at_initial = []
    for step in range(7):
        train(model, optimizer, "mlp", [step])
        at_initial.append(bool(torch.allclose(swr._norms(), initial, rtol=1e-12)))
    assert at_initial == [False, False, True, False, False, True, False]


def test_every_goes_on_counting_after_a_resume() -> None:
    model = zoo.build("mlp")
    optimizer = SGD(model.parameters(), lr=0.5)
    swr = SWR(model, zoo.batch("mlp")[0], lam=1.0, every=3).attach(optimizer)
    train(model, optimizer, "mlp", range(2))
    resumed = SWR(model, zoo.batch("mlp")[0], lam=1.0, every=3)
    resumed.load_state_dict(swr.state_dict())
    swr.detach()
    resumed.attach(optimizer)
    train(model, optimizer, "mlp", [2])
    torch.testing.assert_close(resumed._norms(), swr.initial_norms, rtol=1e-12, atol=0)


def test_every_counts_the_steps_of_each_optimizer_apart() -> None:
    model = zoo.build("mlp")
    swr = SWR(model, zoo.batch("mlp")[0], lam=1.0, every=2)
    body = SGD([*model[0].parameters(), *model[2].parameters()], lr=0.5)
    head = SGD(model[4].parameters(), lr=0.5)
    swr.attach(body, head)
    initial = swr.initial_norms.clone()
    for step in range(2):
        train(model, body, "mlp", [step])
        train(model, head, "mlp", [step])
    torch.testing.assert_close(swr._norms(), initial, rtol=1e-12, atol=0)


def test_zero_weights_are_left_alone_and_named() -> None:
    model = zoo.build("mlp")
    with torch.no_grad():
        model[2].weight.zero_()
    with pytest.warns(UserWarning, match=r"start at zero: 2\.weight"):
        swr = SWR(model, zoo.batch("mlp")[0], lam=1.0)
    with torch.no_grad():
        model[2].weight.fill_(2.0)
        model[4].weight.zero_()
    swr.step()
    assert (model[2].weight == 2.0).all()
    assert (model[4].weight == 0.0).all()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_weight_that_started_at_zero_is_pulled_once_it_has_a_norm_to_go_back_to() -> None:
    model = zoo.build("mlp")
    nn.init.zeros_(model[4].weight)
    with pytest.warns(UserWarning, match="start at zero"):
        swr = SWR(model, zoo.batch("mlp")[0], lam=1.0)
    with torch.no_grad():
        model[4].weight.fill_(0.5)
    norm = float(model[4].weight.norm())
    swr.reset_initial_norms()
    with torch.no_grad():
        model[4].weight.mul_(3)
    swr.step()
    assert float(model[4].weight.detach().norm()) == pytest.approx(norm)


@pytest.mark.filterwarnings("ignore:swr leaves these weights alone")
@pytest.mark.parametrize("lam", [0.1, 1.0])
def test_a_zero_weight_is_left_alone_after_a_resume_too(lam: float) -> None:
    """Whatever comes first: the weights of the run that is resumed, or the method."""

    def start() -> nn.Module:
        model = zoo.build("mlp")
        nn.init.zeros_(model[4].weight)
        return model

    whole = start()
    optimizer = SGD(whole.parameters(), lr=0.1)
    swr = SWR(whole, zoo.batch("mlp")[0], lam=lam).attach(optimizer)
    train(whole, optimizer, "mlp", range(3))
    weights, state = snapshot(whole), copy.deepcopy(swr.state_dict())
    train(whole, optimizer, "mlp", range(3, 6))
    resumed = start()
    resumed.load_state_dict(weights)
    optimizer = SGD(resumed.parameters(), lr=0.1)
    SWR(resumed, zoo.batch("mlp")[0], lam=lam).attach(optimizer).load_state_dict(state)
    train(resumed, optimizer, "mlp", range(3, 6))
    assert_same(snapshot(resumed), snapshot(whole))


@pytest.mark.parametrize("on_host", [True, False])
def test_parameters_that_no_optimizer_moved_are_not_written(on_host: bool) -> None:
    """The graph of a second loss is still needed when the first optimizer has made its step."""
    actor, critic = zoo.build("mlp"), zoo.build("mlp")
    both = nn.ModuleList([actor, critic])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = both

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(part(x) for part in self.parts)

    x, y = zoo.batch("mlp")
    model = Both()
    first, second = SGD(actor.parameters(), lr=0.1), SGD(critic.parameters(), lr=0.1)
    swr = SWR(model, x, lam=0.1).attach(first, second)
    swr._on_host = on_host
    policy, value = model(x)
    cross_entropy(policy, y).backward()
    versions = [parameter._version for parameter in critic.parameters()]
    first.step()
    assert [parameter._version for parameter in critic.parameters()] == versions
    cross_entropy(value, y).backward()
    second.step()
    assert swr.receipt is not None
    assert swr.receipt.tensors == 6


def test_half_precision_norms_are_accumulated_in_float32() -> None:
    model = nn.Sequential(nn.Linear(300, 300, bias=False)).half()
    with torch.no_grad():
        model[0].weight.fill_(2.0)  # the sum of squares is 360 000, beyond float16
    swr = SWR(model, torch.ones(1, 300).half(), lam=1.0, plan={"order": ["0"]})
    assert swr.initial_norms.dtype == torch.float32
    assert float(swr.initial_norms) == pytest.approx(600.0)
    with torch.no_grad():
        model[0].weight.mul_(2)
    swr.step()
    assert (model[0].weight == 2.0).all()


def test_survives_a_move_of_the_model_to_other_memory() -> None:
    model = zoo.build("cnn_bn")
    swr = SWR(model, zoo.batch("cnn_bn")[0], lam=1.0)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()  # what .to(device) does
    with torch.no_grad():
        model[0].weight.mul_(2)
    swr.step()
    assert float(model[0].weight.norm()) == pytest.approx(float(swr.initial_norms[0]))


def test_step_reads_no_value_back_from_the_device() -> None:

    class NoSynchronization(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
            return func(*args, **(kwargs or {}))

    model = zoo.build("cnn_bn")
    optimizer = SGD(model.parameters(), lr=0.1)
    swr = SWR(model, zoo.batch("cnn_bn")[0]).attach(optimizer)
    swr._on_host = False  # the test may run without another device
    train(model, optimizer, "cnn_bn", range(2))
    with NoSynchronization():
        swr._after_step(optimizer, (), {})
    with pytest.raises(AssertionError), NoSynchronization():
        float(swr.initial_norms[0])


def test_a_run_on_a_device_is_the_run_on_the_host() -> None:
    def run(on_host: bool) -> dict[str, torch.Tensor]:
        model = zoo.build("cnn_bn")
        optimizer = SGD(model.parameters(), lr=0.1)
        SWR(model, zoo.batch("cnn_bn")[0], lam=0.1, schedule="coupled").attach(optimizer)._on_host = on_host
        train(model, optimizer, "cnn_bn", range(3))
        optimizer.param_groups[0]["lr"] = 0.05
        train(model, optimizer, "cnn_bn", range(3, 6))
        return model.state_dict()

    torch.testing.assert_close(run(on_host=False), run(on_host=True), rtol=1e-10, atol=1e-12)


def test_explicit_order_leaves_the_rest_alone() -> None:
    model = zoo.build("mlp")
    swr = SWR(model, plan={"order": ["0", "2"]}, lam=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 2
    before = snapshot(model)
    swr.step()
    assert torch.equal(model[4].weight, before["4.weight"])
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_two_methods_act_in_order_of_attachment() -> None:
    def run(first: float, second: float) -> nn.Module:
        model = zoo.build("mlp")
        optimizer = SGD(model.parameters(), lr=0.1)
        hard = SWR(model, plan={"order": ["0", "2", "4"]}, lam=first)
        soft = SWR(model, plan={"order": ["0", "2", "4"]}, lam=second)
        hard.initial_norms = 2 * hard.initial_norms  # the two pull to different norms, so that their order shows
        hard.attach(optimizer)
        soft.attach(optimizer)
        train(model, optimizer, "mlp", range(1))
        return model

    hard_last = run(0.5, 1.0)
    initial = [float(zoo.build("mlp")[i].weight.norm()) for i in (0, 2, 4)]
    assert [float(hard_last[i].weight.norm()) for i in (0, 2, 4)] == pytest.approx(initial)
    soft_last = run(1.0, 0.5)
    assert [float(soft_last[i].weight.norm()) for i in (0, 2, 4)] == pytest.approx([1.5 * n for n in initial])


def test_chains_that_cannot_be_expressed_are_errors() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.relu(self.layer(x)))

    with pytest.raises(ValueError, match=r"'shift' does not belong to a linear"):
        SWR(Shared(), torch.ones(1, 4), plan={"order": "forward"})
    with pytest.raises(ValueError, match=r"'layer\.bias' is used twice"):
        SWR(Shared(), torch.ones(1, 4), plan={"order": ["layer", "layer"]})
    frozen = zoo.build("mlp")
    frozen[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'2\.bias' is frozen"):
        SWR(frozen, zoo.batch("mlp")[0], plan={"order": "forward"})
    with pytest.raises(ValueError, match="'0' is a Bilinear"):
        SWR(nn.Sequential(nn.Bilinear(2, 2, 2)), plan={"order": ["0"]})


def test_weight_used_by_two_layers_counts_at_each_use() -> None:
    model = zoo.build("tied")
    example = zoo.batch("tied", size=50)[0]
    swr = SWR(model, example, lam=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5
    before = model(example)
    swr.step()
    ratio = model(example) / before
    torch.testing.assert_close(ratio, ratio.flatten()[:1].expand_as(ratio).contiguous(), rtol=1e-11, atol=0)


def test_the_receipt_tells_what_each_weight_was_multiplied_by() -> None:
    class Dueling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.advantage = nn.Linear(4, 1), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.value(x) + self.advantage(x)

    model = Dueling().double()
    swr = SWR(model, torch.ones(2, 4, dtype=torch.float64), lam=0.5)
    with torch.no_grad():
        model.value.weight.mul_(4)
    before = snapshot(model)
    swr.step()
    assert swr.receipt is not None
    factors = swr.receipt.details["factors"]
    assert set(factors) == {"value.weight", "advantage.weight"}
    for name, factor in factors.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), factor * before[name])
        assert factor < 0.9  # both, though only one of them has grown
