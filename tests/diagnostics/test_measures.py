"""The records of the measures, by which listings, reports and the documentation go."""

import copy
import math
import re
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import pliant
from pliant import diagnostics
from pliant.diagnostics import measures
from pliant.diagnostics.signs import healthy_limit


def test_records_are_complete() -> None:
    for name in measures.names():
        record = measures.info(name)
        assert record.name == name
        assert record.definition
        assert record.source
        assert record.needs
        if record.sign is not None:
            assert record.sign.explains
            assert healthy_limit(record.name) >= 1


def test_names_are_given_in_a_list() -> None:
    with pytest.raises(ValueError, match=r"measures: 'loss' is a string; it must be a list of names, \['loss'\]"):
        measures.select("loss")
    assert [record.name for record in measures.select(["loss"])] == ["loss"]


def test_the_docs_list_every_measure_as_its_record_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "measures.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    records = map(measures.info, measures.names())
    assert rows == [
        (r.name, r.definition.replace("|", "\\|"), ", ".join(sorted(r.needs)), r.cost, r.source) for r in records
    ]


SAMPLES, CLASSES, RATE = 13, 4, 0.1


LAYERS = (0, 2, 4)


OF_THE_WHOLE = {
    "loss", "error", "lipschitz_bound", "frobenius_bound", "balancedness", "feature_rank", "feature_srank",
    "feature_effective_rank", "sharpness", "hessian_exact_rank", "gauss_newton_rank", "fisher_rank", "churn",
}  # fmt: skip


def networks() -> tuple[nn.Sequential, nn.Sequential, Tensor, Tensor]:
    """A network after some steps, with a dead and a dormant unit; itself as it was; inputs and labels. All float64."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, CLASSES)).double()
        x, y = torch.randn(SAMPLES, 6).double(), torch.randint(0, CLASSES, (SAMPLES,))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model[0].bias[0] = -10
        model[2].weight[1] *= 1e-3
        model[2].bias[1] = 1e-3
    return model, reference, x, y


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def rank_99(values: Tensor) -> int:
    """How many of the largest values hold 99 % of their sum."""
    ordered = sorted(values.tolist(), reverse=True)
    return next(k for k in range(1, len(ordered) + 1) if sum(ordered[:k]) >= 0.99 * sum(ordered))


def entropy_rank(values: Tensor) -> float:
    shares = [v / float(values.sum()) for v in values.tolist() if v > 0]
    return math.exp(-sum(p * math.log(p) for p in shares))


def least_norm(weights: list[Tensor]) -> float:
    """The least norm over rescalings of units, which a layer at a time has a closed form."""
    weights = [w.clone() for w in weights]
    for _ in range(2000):
        for first, second in pairwise(weights):
            factor = (second.square().sum(0) / first.square().sum(1)) ** 0.25
            first *= factor[:, None]
            second /= factor
    return float(flat(weights).norm())


def parameters_of(model: nn.Sequential, layers: Sequence[int]) -> list[nn.Parameter]:
    return [p for layer in layers for p in model[layer].parameters()]


def of_weights(model: nn.Sequential, reference: nn.Sequential, layers: Sequence[int] = LAYERS) -> dict[str, float]:
    w, w0 = ([net[i].weight.detach() for i in layers] for net in (model, reference))
    theta, theta0 = (flat(parameters_of(net, layers)) for net in (model, reference))
    sigma = [torch.linalg.svd(m).S for m in w]
    tops = [float(s[0]) for s in sigma]
    conditions = [float(s[0] / s[-1]) for s in sigma]
    sizes, sizes0 = ([float(m.square().sum().sqrt()) for m in each] for each in (w, w0))
    all_sizes = {i: [float(net[i].weight.detach().norm()) for net in (model, reference)] for i in LAYERS}
    pairs = [(all_sizes[a], all_sizes[b]) for a, b in permutations(LAYERS, 2) if {a, b} & set(layers)]
    stable = [size**2 / top**2 for size, top in zip(sizes, tops, strict=True)]
    errors = [float((a - b).square().sum()) for a, b in zip(w, w0, strict=True)]
    both = zip(parameters_of(model, layers), parameters_of(reference, layers), strict=True)
    moved = [p.flatten().sort().values - q.flatten().sort().values for p, q in both]
    grams = [(m @ m.T, m.T @ m) for m in w]
    return {
        "weight_l1": float(theta.abs().sum()),
        "weight_l2": float(theta @ theta) ** 0.5,
        "weight_growth": float(theta.norm() / theta0.norm()),
        "spectral_norm": mean(tops),
        "spectral_norm_max": max(tops),
        "condition_number_max": max(conditions),
        "stable_rank_max": max(stable),
        "condition_number": mean(conditions),
        "stable_rank": mean(stable),
        "weight_effective_rank": mean(map(entropy_rank, sigma)),
        "weight_srank": mean(map(rank_99, sigma)),
        "isometry_deviation": sum(
            min(float((gram - torch.eye(len(gram))).square().sum()) for gram in sides) for sides in grams
        ),
        "frobenius_error": sum(errors),
        "frobenius_error_normalized": sum(errors) / sum(size**2 for size in sizes0),
        "lipschitz_bound": math.prod(tops),
        "frobenius_bound": math.prod(sizes),
        "layer_balance": max(
            abs(larger / smaller - larger0 / smaller0)
            for (smaller, smaller0), (larger, larger0) in pairs if smaller0 <= larger0
        ),
        "balancedness": float(flat(w).norm()) / least_norm(w),
        "distance_l2": float((theta - theta0).norm()),
        "distance_wasserstein": float(flat(moved).norm()),
    }  # fmt: skip


def of_features(
    model: nn.Sequential, reference: nn.Sequential, x: Tensor, y: Tensor, layers: Sequence[int] = LAYERS[:-1]
) -> dict[str, float]:
    ours, theirs = ([net[: layer + 2](x).detach() for layer in layers] for net in (model, reference))
    activity = [h.abs().mean(0) for h in ours]
    units = sum(map(len, activity))
    sigma = torch.linalg.svd(ours[-1]).S
    shares = [a / a.sum() for a in activity]
    arranged = [[h @ h.T / h.square().sum() for h in each] for each in (ours, theirs)]
    logits = model(x).detach()
    return {
        "loss": -mean(float(row.log_softmax(0)[label]) for row, label in zip(logits, y, strict=True)),
        "error": mean(float(row.argmax() != label) for row, label in zip(logits, y, strict=True)),
        "feature_rank": rank_99(sigma) / 7,
        "feature_srank": rank_99(sigma),
        "feature_effective_rank": entropy_rank(sigma),
        "dormant_fraction": sum(int((a <= 0.025 * a.mean()).sum()) for a in activity) / units,
        "dead_fraction": sum(int((h == 0).all(0).sum()) for h in ours) / units,
        "dormancy": sum(len(p) * sum(v * math.log(v) for v in p.tolist() if v) for p in shares) / units,
        "feature_covariance_distance": mean(float((a - b).norm()) for a, b in zip(*arranged, strict=True)),
        "representation_change": mean(
            float((a - b).square().sum(1).sqrt().mean()) for a, b in zip(ours, theirs, strict=True)
        ),
    }


def sample_gradients(model: nn.Sequential, x: Tensor, y: Tensor, layers: Sequence[int] = LAYERS) -> Tensor:
    """A row each, from a backward pass each."""
    parameters = parameters_of(model, layers)
    pairs = zip(x, y, strict=True)
    return torch.stack(
        [flat(torch.autograd.grad(cross_entropy(model(a[None]), b[None]), parameters)) for a, b in pairs]
    )


ELSEWHERE = {"saturation", "dead_by_moments", "attention_entropy"}
"""What a network of relus, trained with SGD, does not have; measured below or in `test_attention.py`."""


def gradient_dormant(model: nn.Sequential, x: Tensor, y: Tensor, layers: Sequence[int]) -> float:
    """The fraction of rows with a mean |gradient| of at most a hundredth of their layer's."""
    dormant = []
    for layer in layers:
        (g,) = torch.autograd.grad(cross_entropy(model(x), y), [model[layer].weight])
        sizes = [mean(map(abs, row)) for row in g.tolist()]
        dormant += [size <= 0.01 * mean(sizes) for size in sizes]
    return mean(dormant)


def churn_of(model: nn.Sequential, x: Tensor, y: Tensor) -> float:
    """The mean change of an output by a step of SGD."""
    after = copy.deepcopy(model)
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(after.parameters(), gradients, strict=True):
            p -= RATE * g
        return float((after(x) - model(x)).abs().mean())


def of_gradients(model: nn.Sequential, x: Tensor, y: Tensor, layers: Sequence[int] = LAYERS) -> dict[str, float]:
    g = sample_gradients(model, x, y, layers)
    mean_gradient = g.mean(0)
    sigma = torch.linalg.svd(g, full_matrices=False).S
    directions = rank_99(sigma**2)
    values, vectors = torch.linalg.eigh(g.T @ g)
    cut = vectors[:, -directions:] * values[-directions:] @ vectors[:, -directions:].T
    image = cut @ mean_gradient
    return {
        "gradient_l1": float(mean_gradient.abs().sum()),
        "gradient_l2": float(mean_gradient.norm()),
        "update_l1": RATE * float(mean_gradient.abs().sum()),
        "update_l2": RATE * float(mean_gradient.norm()),
        "relative_update": RATE * float(mean_gradient.norm() / flat(parameters_of(model, layers)).norm()),
        "gradient_dormant_fraction": gradient_dormant(model, x, y, layers),
        "churn": churn_of(model, x, y),
        "gradient_condition_number": float(sigma[0] / sigma[-1]),
        "gradient_effective_rank": entropy_rank(sigma),
        "hessian_rank": directions / SAMPLES,
        "gradient_overlap": float(mean_gradient @ image / (mean_gradient.norm() * image.norm())),
    }


def of_matrices(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, float]:
    named = {name: p.detach() for name, p in model.named_parameters()}
    theta = flat(named.values())

    def logits(vector: Tensor) -> Tensor:
        pieces = vector.split([p.numel() for p in named.values()])
        values = {name: piece.reshape(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)}
        return functional_call(model, values, (x,))

    hessian = torch.autograd.functional.hessian(lambda vector: cross_entropy(logits(vector), y), theta)
    jacobian = torch.autograd.functional.jacobian(logits, theta)
    chances = logits(theta).softmax(1)
    gauss_newton = sum(j.T @ (torch.diag(p) - torch.outer(p, p)) @ j for j, p in zip(jacobian, chances, strict=True))
    drawn = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    g = sample_gradients(model, x, drawn)
    return {
        "sharpness": float(torch.linalg.eigvalsh(hessian)[-1]),
        "hessian_exact_rank": rank_99(torch.linalg.eigvalsh(hessian).abs()) / len(theta),
        "gauss_newton_rank": rank_99(torch.linalg.eigvalsh(gauss_newton)) / min(len(theta), SAMPLES * (CLASSES - 1)),
        "fisher_rank": rank_99(torch.linalg.eigvalsh(g.T @ g)) / SAMPLES,
    }  # fmt: skip


def close(name: str, value: float) -> object:
    # Lanczos stops at a residual of a hundredth of the eigenvalue.
    return pytest.approx(value, rel=1e-2 if name == "sharpness" else 1e-6)


def measured(model: nn.Sequential, reference: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, float]:
    """Everything that is measured; of a step, when it is taken at last."""
    steps = {name for name in measures.names() if "step" in measures.info(name).needs}
    others = [name for name in measures.names() if name not in steps | ELSEWHERE]
    found = dict(diagnostics.measure(model, (x, y), cross_entropy, reference, measures=others).values)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    monitor = pliant.Monitor(model, optimizer, every=1, measures=sorted(steps), probe=(x, y), budget=None)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return found | monitor.records[-1].values


def test_every_measure_is_what_its_definition_says() -> None:
    model, reference, x, y = networks()
    expected = {
        **of_weights(model, reference),
        **of_features(model, reference, x, y),
        **of_gradients(model, x, y),
        **of_matrices(model, x, y),
    }
    assert expected.keys() == set(measures.names()) - ELSEWHERE
    for (a, ours), (b, theirs) in combinations(expected.items(), 2):
        assert ours != close(a, theirs), f"{a} and {b} could change places"
        assert theirs != close(b, ours), f"{a} and {b} could change places"
    found = measured(model, reference, x, y)
    for name, value in expected.items():
        assert found[name] == close(name, value), name


def test_every_value_of_a_layer_is_what_the_definition_says_of_it_alone() -> None:
    model, reference, x, y = networks()
    expected = {}
    for layer in LAYERS:
        of_layer = of_weights(model, reference, [layer]) | of_gradients(model, x, y, [layer])
        if layer != LAYERS[-1]:
            of_layer |= of_features(model, reference, x, y, [layer])
        expected |= {f"{name}/{layer}": value for name, value in of_layer.items() if name not in OF_THE_WHOLE}
    found = {key: value for key, value in measured(model, reference, x, y).items() if "/" in key}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == close(name, value), name


def test_saturation_is_of_tanh_and_sigmoid_alone() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 3), nn.ReLU())
    model.append(nn.Linear(3, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([0.0, 9.0, -9.0, 2.0]))
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([0.0, 9.0]))
    found = diagnostics.measure(model, torch.ones(5, 1), measures=["saturation"]).values
    assert found == pytest.approx({"saturation": 3 / 6, "saturation/0": 2 / 4, "saturation/2": 1 / 2})
    assert diagnostics.measure(networks()[0], networks()[2], measures=["saturation"]).values == {"saturation": 0.0}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_units_that_never_had_a_gradient_show_in_the_moments(kind: type[torch.optim.Optimizer]) -> None:
    model, _, x, y = networks()
    optimizer = kind(model.parameters(), lr=0.0)
    monitor = pliant.Monitor(model, optimizer, every=1, measures=["dead_by_moments"], budget=None)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    (g,) = torch.autograd.grad(cross_entropy(model(x), y), [model[0].weight])
    dead = int((g == 0).all(1).sum())
    assert dead >= 1
    values = monitor.records[-1].values
    assert values["dead_by_moments/0"] == pytest.approx(dead / 9)
    (g,) = torch.autograd.grad(cross_entropy(model(x), y), [model[2].weight])
    assert values["dead_by_moments"] == pytest.approx((dead + int((g == 0).all(1).sum())) / 20)


def test_an_optimizer_without_moments_is_said() -> None:
    model, _, x, y = networks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = pliant.Monitor(model, optimizer, every=1, measures=["dead_by_moments"], budget=None)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    assert "none has such values" in monitor.skipped["dead_by_moments"]
