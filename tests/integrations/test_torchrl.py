"""Critics that TorchRL stacks: every method treats each member as a network of its own, or says what to do."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import pliant
from pliant import methods
from tests import zoo

COUNT = 2
STRONG: dict[str, dict[str, Any]] = {  # settings with which a method acts within a few steps
    **{name: {"lam": 0.1} for name in ("l2", "l2_init", "wasserstein", "spectral", "spectral_norm", "parseval")},
    "streaming_ewc": {"lam": 0.1},
    "weight_clipping": {"kappa": 0.5},
    "hare_tortoise": {"every": 2},
    "shrink_perturb": {"lam": 0.5, "toward": "initial"},
}
TOGETHER = {"upgd", "trac"}  # they compare or sum over all parameters that they act on
NO_FORWARD = "model: TensorDictParams has no forward"
REFUSED = {
    **dict.fromkeys(["swr", "shrink", "head_reset", "redo", "continual_backprop", "crelu", "layer_norm"], NO_FORWARD),
    **dict.fromkeys(["layerwise", "feature_rank", "infer", "regrama", "snr", "adalin", "fourier"], NO_FORWARD),
    "plasticity_injection": "head: 'the model' is a TensorDictParams",
    "spectral_normalization": "model: it has no weight to normalize",
    "selective_reinit": r"has no reset_parameters\(\); give it one, or pass init=",
    "full_reset": r"has no reset_parameters\(\); give it one, or pass init=",
}


def build(norm: bool = True) -> SACLoss:
    torch.manual_seed(0)
    body = nn.Sequential(MLP(in_features=3, out_features=2, num_cells=[8]), NormalParamExtractor())
    actor = TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"])
    policy = ProbabilisticActor(actor, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)
    layers = {"norm_class": nn.LayerNorm, "norm_kwargs": [{"normalized_shape": 8}] * 2} if norm else {}
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[8, 8], **layers), in_keys=["observation", "action"]
    )
    return SACLoss(policy, critic, num_qvalue_nets=COUNT, target_entropy=-1.0).double()


def batch() -> TensorDict:
    data = {name: torch.randn(16, size, dtype=torch.float64) for name, size in (("observation", 3), ("action", 1))}
    after = {
        "observation": torch.randn(16, 3, dtype=torch.float64),
        "reward": torch.randn(16, 1, dtype=torch.float64),
        "done": torch.zeros(16, 1, dtype=torch.bool),
        "terminated": torch.zeros(16, 1, dtype=torch.bool),
    }
    return TensorDict({**data, "next": TensorDict(after, [16])}, [16])


def member(loss: SACLoss, index: int) -> nn.Module:
    """Return a critic of the ensemble as a network of its own."""
    network = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)
    ).double()
    stacked = [p for _, p in sorted(loss.qvalue_network_params.named_parameters())]
    own = dict(sorted(network.named_parameters()))
    assert len(own) == len(stacked)
    with torch.no_grad():
        for parameter, stack in zip(own.values(), stacked, strict=True):
            parameter.copy_(stack[index])
    return network


def steps(method: pliant.Method, parameters: list[Tensor], gradients: list[list[Tensor]]) -> None:
    """Take steps with given gradients; a reinitializer acts after the second one."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if method.kind != "reinitializer":
        method.attach(optimizer)

    def loss(output: Tensor, target: Tensor) -> Tensor:  # its gradient is a given one, whatever the model is
        return sum((p * g).sum() for p, g in zip(parameters, gradients[1], strict=True))

    new_data = {"batches": [(torch.zeros(4, 4).double(), torch.zeros(4))], "loss_fn": loss}
    for number, each in enumerate(gradients):
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        if number == 1 and method.kind == "reinitializer":
            method.apply(optimizer, **(new_data if method.name == "dash" else {}))


@pytest.mark.parametrize("name", sorted({*methods.names()} - {*REFUSED, *TOGETHER}))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_member_of_the_stack_is_treated_as_a_network_of_its_own(name: str) -> None:
    loss = build()
    stack = loss.qvalue_network_params
    networks = [member(loss, index) for index in range(COUNT)]
    if name == "dash":  # which calls the model
        stack = WithForward(stack)
    named = dict(sorted(stack.named_parameters()))
    gradients = [[torch.randn_like(p) for p in named.values()] for _ in range(4)]
    steps(methods.create(name, stack, **STRONG.get(name, {})), list(named.values()), gradients)
    for index, network in enumerate(networks):
        own = [p for _, p in sorted(network.named_parameters())]
        its = [[gradient[index] for gradient in each] for each in gradients]
        steps(methods.create(name, network, **STRONG.get(name, {})), own, its)
        for (key, stacked), single in zip(named.items(), own, strict=True):
            torch.testing.assert_close(stacked[index], single, rtol=1e-10, atol=1e-12, msg=f"{key}[{index}]")


class WithForward(nn.Module):
    """A module around the parameters of critics, whose output depends on nothing."""

    def __init__(self, parameters: nn.Module) -> None:
        super().__init__()
        self.critics = parameters

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_act_on_stacks_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        methods.create(
            name, build().qvalue_network_params, example=torch.zeros(2, 4), seed=0, **zoo.REQUIRED.get(name, {})
        )


def test_a_loss_module_is_not_a_network() -> None:
    with pytest.raises(ValueError, match=r"SACLoss is not a network .*: actor_network_params, qvalue_network_params$"):
        pliant.L2Init(build())


def test_sac_trains_with_methods_on_actor_and_critics() -> None:
    loss = build()
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    targets = SoftUpdate(loss, tau=0.1)
    spectral = pliant.SpectralRegularization(loss.qvalue_network_params, lam=10.0).attach(optimizer)
    fire = pliant.FIRE(loss.qvalue_network_params)
    for _ in range(60):
        losses = loss(batch())
        optimizer.zero_grad()
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        optimizer.step()
        targets.step()
    weights = [p for _, p in loss.qvalue_network_params.named_parameters() if p.ndim == 3]
    for norm in torch.cat([torch.linalg.matrix_norm(weight.detach(), 2) for weight in weights]):
        assert float(norm) == pytest.approx(1, abs=0.2)
    assert spectral.sigma("module.0.weight").shape == (COUNT,)
    receipt = fire.apply(optimizer, targets=[(loss.qvalue_network_params, loss.target_qvalue_network_params)])
    assert receipt.details["targets_copied"]
    assert len(receipt.details["deviation_from_isometry"]) == COUNT * len(weights)
    pairs = zip(loss.qvalue_network_params.parameters(), loss.target_qvalue_network_params.buffers(), strict=True)
    assert all(torch.equal(ours, target) for ours, target in pairs)
