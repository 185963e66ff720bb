"""One frozen record per method; it drives the contract tests, the command line's listing and the docs."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pliant._names import check_names, keyword_options, suggest
from pliant.methods._core.filters import match_names
from pliant.methods._core.method import Kind, Method
from pliant.methods.adalin import AdaptiveLinearity
from pliant.methods.c_chain import CChain
from pliant.methods.continual_backprop import ContinualBackprop
from pliant.methods.crelu import CReLUConversion
from pliant.methods.dash import DASH
from pliant.methods.feature_rank import FeatureRankRegularization
from pliant.methods.fire import FIRE
from pliant.methods.fourier import FourierConversion
from pliant.methods.full_reset import FullReset
from pliant.methods.hare_tortoise import HareTortoise
from pliant.methods.head_reset import HeadReset
from pliant.methods.infer import InFeR
from pliant.methods.l2 import L2
from pliant.methods.l2_init import L2Init
from pliant.methods.layer_norm import LayerNormInsertion
from pliant.methods.layerwise import LayerwiseReset
from pliant.methods.nap import NormalizeAndProject
from pliant.methods.optimizer_reset import OptimizerReset
from pliant.methods.parseval import ParsevalRegularization
from pliant.methods.plasticity_injection import PlasticityInjection
from pliant.methods.redo import ReDo
from pliant.methods.regrama import ReGraMa
from pliant.methods.selective_reinit import SelectiveReinit
from pliant.methods.shrink import Shrink
from pliant.methods.shrink_perturb import ShrinkPerturb
from pliant.methods.snr import SelfNormalizedResets
from pliant.methods.spectral import SpectralRegularization
from pliant.methods.spectral_norm import SpectralNormPenalty
from pliant.methods.spectral_normalization import SpectralNormalization
from pliant.methods.streaming_ewc import StreamingEWC
from pliant.methods.swr import SWR
from pliant.methods.trac import TRAC
from pliant.methods.upgd import UPGD
from pliant.methods.wasserstein import WassersteinRegularization
from pliant.methods.weight_clipping import WeightClipping
from pliant.methods.weight_rescaling import WeightRescaling


@dataclass(frozen=True)
class Tunable:
    """A setting of a method that is worth tuning.

    Attributes:
        name: The keyword.
        meaning: What it does, in a few words.
        default: The default; None if the setting must be given, or follows another one.
        low: The smallest sensible value.
        high: The largest sensible value; None if there is no bound.
        sweep: The values that the papers sweep.
    """

    name: str
    meaning: str
    default: float | None
    low: float
    high: float | None
    sweep: tuple[float, ...] = ()


@dataclass(frozen=True)
class MethodInfo:
    """The record of a method.

    Attributes:
        name: The name in the registry, on the command line and in recipes.
        cls: The class.
        paper: The source.
        summary: What it does, in a sentence.
        tunables: The settings to tune.
        timing: When it acts, if not as usual for its kind.
    """

    name: str
    cls: type[Method]
    paper: str
    summary: str
    tunables: tuple[Tunable, ...] = ()
    timing: str = ""

    @property
    def kind(self) -> Kind:
        """The kind of the method."""
        return self.cls.kind

    @property
    def needs_telling(self) -> bool:
        """Whether the method acts only when it is told that data is new."""
        return self.kind == "reinitializer"

    @property
    def acts(self) -> str:
        """When the method acts, in words."""
        return self.timing or _TIMING[self.kind]


_TIMING: dict[Kind, str] = {
    "after_step": "after a step",
    "penalty": "before a step",
    "reinitializer": "on new data",
    "recycler": "after a step",
    "architecture": "at construction",
}
_TENS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)

_RECORDS = (
    MethodInfo(
        "swr",
        SWR,
        "Soft weight rescaling (2024), §3",
        "pull each weight's norm towards its initial norm after every step; the output is only scaled",
        (
            Tunable("lam", "how far towards the initial norm, each step", 1e-3, 0.0, 1.0, (1.0, *_TENS[:-1])),
            Tunable("lam_classifier", "the same for the classifier", None, 0.0, 1.0, (1.0, *_TENS[:-1])),
        ),
    ),
    MethodInfo(
        "l2",
        L2,
        "Krogh & Hertz 1991",
        "λ/2 ‖θ‖² in the loss",
        (Tunable("lam", "strength of the pull towards zero", 1e-3, 0.0, None, _TENS),),
    ),
    MethodInfo(
        "l2_init",
        L2Init,
        "Kumar et al. 2023",
        "λ/2 ‖θ − θ₀‖² in the loss",
        (Tunable("lam", "strength of the pull towards the initial values", 1e-2, 0.0, None, _TENS),),
    ),
    MethodInfo(
        "shrink_perturb",
        ShrinkPerturb,
        "Ash & Adams 2020",
        "move all weights part of the way back to their initial values when data is new",
        (Tunable("lam", "how much of the old weights to give up", 0.8, 0.0, 1.0, (0.2, 0.4, 0.6, 0.8)),),
    ),
    MethodInfo(
        "shrink",
        Shrink,
        "Soft weight rescaling (2024), §3.2",
        "scale all weights down when data is new; the output is only scaled",
        (Tunable("lam", "how much of each weight to give up", 0.5, 0.0, 0.999, (0.1, 0.3, 0.5, 0.7, 0.9)),),
    ),
    MethodInfo(
        "head_reset",
        HeadReset,
        "Nikishin et al. 2022",
        "re-draw the fully connected tail when data is new",
    ),
    MethodInfo(
        "plasticity_injection",
        PlasticityInjection,
        "Nikishin et al. 2023",
        "freeze the head and let a fresh one learn on top of it when data is new; the output stays",
        (Tunable("layers", "weight layers of the head", 2, 2, None),),
    ),
    MethodInfo(
        "full_reset",
        FullReset,
        "FIRE (2026), §4",
        "re-draw the whole network when data is new: training from scratch",
    ),
    MethodInfo(
        "optimizer_reset",
        OptimizerReset,
        "Asadi et al. 2023; Ellis et al. 2024",
        "reset the optimizer's moments, its step count or both when data is new; the weights stay",
    ),
    MethodInfo(
        "redo",
        ReDo,
        "Sokar et al. 2023",
        "renew dormant units every so often",
        (
            Tunable("tau", "the score up to which a unit counts as dormant", 0.025, 0.0, None, (0.0, 0.025, 0.1)),
            Tunable("every", "steps between two renewals", 1000, 1, None, (100, 1000)),
        ),
        timing="every n steps",
    ),
    MethodInfo(
        "regrama",
        ReGraMa,
        "Liu et al. 2025",
        "renew units with small gradients every so often",
        (
            Tunable("tau", "the score up to which a unit counts as not learning", 0.01, 0.0, None, (0.0, 0.01, 0.1)),
            Tunable("every", "steps between two renewals", 1000, 1, None, (100, 1000)),
        ),
        timing="every n steps",
    ),
    MethodInfo(
        "continual_backprop",
        ContinualBackprop,
        "Dohare et al. 2024",
        "renew a small fraction of the units, the least useful, at every step",
        (
            Tunable("rate", "the fraction renewed at each step", 1e-3, 0.0, 1.0, (1e-4, 1e-5, 1e-6)),
            Tunable("maturity", "the age in steps before a unit may be renewed", 100, 1, None, (100, 1000)),
        ),
    ),
    MethodInfo(
        "snr",
        SelfNormalizedResets,
        "Farias & Jozefiak 2025",
        "renew units that are silent for longer than they used to be",
        (
            Tunable("quantile", "the quantile of a unit's silences that is too long", 0.9, 0.0, 1.0, (0.8, 0.9, 0.99)),
            Tunable("longest", "the largest threshold, in steps", 200, 1, None, (50, 200, 800)),
            Tunable("window", "steps between two updates of the thresholds", 1000, 1, None, (100, 1000)),
        ),
    ),
    MethodInfo(
        "selective_reinit",
        SelectiveReinit,
        "Hernandez-Garcia et al. 2025",
        "re-draw single weights of least utility every n steps",
        (
            Tunable("fraction", "the fraction of weights re-drawn", 0.01, 0.0, 1.0, (0.001, 0.01, 0.1)),
            Tunable("every", "steps between two actions", 100, 1, None, (10, 100, 1000)),
        ),
        timing="every n steps",
    ),
    MethodInfo(
        "crelu",
        CReLUConversion,
        "Shang et al. 2016; Abbas et al. 2023",
        "replace ReLU by [relu(x), relu(−x)] and widen the layers that read it, once",
    ),
    MethodInfo(
        "layer_norm",
        LayerNormInsertion,
        "Ba et al. 2016",
        "insert a LayerNorm between each layer and its activation, once",
    ),
    MethodInfo(
        "adalin",
        AdaptiveLinearity,
        "Razavi Rohani et al. 2025",
        "give each unit a learned linear part where its activation is flat, once",
        (Tunable("alpha", "first slope of the linear part", 0.0, 0.0, None, (0.0, 0.1, 0.5)),),
    ),
    MethodInfo(
        "fourier",
        FourierConversion,
        "Lewandowski et al. 2024",
        "replace activations by [sin(x), cos(x)] and halve the layers before them, once",
    ),
    MethodInfo(
        "spectral_normalization",
        SpectralNormalization,
        "Miyato et al. 2018",
        "divide each weight by its largest singular value, from construction on",
        (Tunable("iterations", "power iterations at each forward pass", 1, 1, None),),
    ),
    MethodInfo(
        "dash",
        DASH,
        "Shin et al. 2024",
        "shrink each weight vector by its cosine with the negative gradient when data is new",
        (
            Tunable("lam", "the smallest factor; 1 leaves all as it is", 0.3, 0.01, 1.0, (0.05, 0.1, 0.3)),
            Tunable("alpha", "the newest chunk's part in the average gradient", 0.3, 0.01, 1.0, (0.1, 0.3)),
        ),
    ),
    MethodInfo(
        "fire",
        FIRE,
        "FIRE (2026), §3",
        "replace weights by the nearest isometries when data is new",
        (
            Tunable("lam", "how far towards the isometry", 1.0, 0.0, 1.0),
            Tunable("iterations", "Newton–Schulz iterations", 10, 1, None, (5, 10)),
        ),
    ),
    MethodInfo(
        "layerwise",
        LayerwiseReset,
        "Alabdulmohsin et al. 2021",
        "at stage t, scale the first t blocks back to their initial norms and re-draw the rest",
    ),
    MethodInfo(
        "weight_rescaling",
        WeightRescaling,
        "Niehaus et al. 2024",
        "set each weight's standard deviation back to its initial one every n steps",
        (Tunable("every", "steps between two rescalings", 1, 1, None),),
        timing="every n steps",
    ),
    MethodInfo(
        "nap",
        NormalizeAndProject,
        "Lyle et al. 2024",
        "set each weight's norm back to its initial norm after every step",
        (Tunable("every", "steps between two projections", 1, 1, None, (1, 10, 100)),),
    ),
    MethodInfo(
        "spectral",
        SpectralRegularization,
        "Spectral regularization (2024), §4 and A.7",
        "keep the largest singular value of every weight near one, and every shift near zero",
        (
            Tunable("lam", "strength of the pull", 1e-3, 0.0, None, _TENS[1:4]),
            Tunable("k", "exponent on the singular value", 2, 1.0, None, (1, 2, 4, 8)),
        ),
    ),
    MethodInfo(
        "spectral_norm",
        SpectralNormPenalty,
        "Yoshida & Miyato 2017",
        "λ/2 Σ σ₁(W)² in the loss: pull the largest singular values towards zero",
        (Tunable("lam", "strength of the pull", 1e-2, 0.0, None, _TENS[1:4]),),
    ),
    MethodInfo(
        "wasserstein",
        WassersteinRegularization,
        "Curvature (2023), §5",
        "keep the distribution of each tensor's values near the initial one",
        (Tunable("lam", "strength of the pull", 5e-3, 0.0, None, (1e-2, 5e-3, 1e-3, 5e-4)),),
    ),
    MethodInfo(
        "feature_rank",
        FeatureRankRegularization,
        "Kumar et al. 2021; Curvature (2023), §3",
        "pull the extreme singular values of the last hidden features together",
        (Tunable("lam", "strength of the pull; must be given", None, 0.0, None, _TENS[2:]),),
        timing="in the backward pass",
    ),
    MethodInfo(
        "infer",
        InFeR,
        "Lyle et al. 2022",
        "let random heads on the features keep their initial predictions, scaled up",
        (
            Tunable("lam", "strength of the pull", 0.1, 0.0, None, (1e-4, 1e-3, 1e-2, 1e-1)),
            Tunable("beta", "scale of the initial predictions", 100.0, 0.0, None, (1.0, 10.0, 100.0)),
        ),
    ),
    MethodInfo(
        "c_chain",
        CChain,
        "Tang et al. 2025",
        "pull the outputs on other inputs back to what they were before the last step",
        (Tunable("lam", "strength of the pull", 1.0, 0.0, None, (1e-1, 1.0, 10.0, 100.0)),),
    ),
    MethodInfo(
        "streaming_ewc",
        StreamingEWC,
        "Elsayed & Mahmood 2024; Spectral regularization (2024), §5",
        "hold each parameter near its moving average, the more so the larger its squared gradients",
        (
            Tunable("lam", "strength of the pull", 1.0, 0.0, None),
            Tunable("beta", "memory of the averages", 0.999, 0.0, 0.99999),
        ),
    ),
    MethodInfo(
        "parseval",
        ParsevalRegularization,
        "Chung et al. 2024; FIRE (2026), A.3",
        "λ‖WWᵀ − sI‖² in the loss: keep rows orthogonal and of one length",
        (
            Tunable("lam", "strength of the pull", 1e-4, 0.0, None, _TENS[2:]),
            Tunable("s", "squared length of the rows", 1.0, 0.0, None, (1.0, 2.0)),
        ),
    ),
    MethodInfo(
        "weight_clipping",
        WeightClipping,
        "Elsayed et al. 2024",
        "clamp every weight to a multiple of its initial bound after every step",
        (Tunable("kappa", "how many times the initial bound", 2.0, 0.0, None, (1.0, 2.0, 3.0, 4.0, 5.0)),),
    ),
    MethodInfo(
        "upgd",
        UPGD,
        "Elsayed & Mahmood 2024",
        "gate each weight's move by its utility and perturb where that is low",
        (
            Tunable("sigma", "noise, in units of a gradient", 1e-3, 0.0, None, (1e-2, 1e-3, 1e-4)),
            Tunable("beta", "memory of the utilities", 0.999, 0.0, 0.99999, (0.9, 0.99, 0.999, 0.9999)),
            Tunable("weight_decay", "decay that is not gated", 0.0, 0.0, None, (0.1, 0.01, 0.001, 0.0)),
        ),
        timing="around a step",
    ),
    MethodInfo(
        "trac",
        TRAC,
        "Muppidi et al. 2024",
        "scale the distance from the initial weights by what moving away from them has paid so far",
        (Tunable("scale", "the first scale", 1e-8, 0.0, None, (1e-8, 1e-6, 1e-4, 1e-2)),),
        timing="around a step",
    ),
    MethodInfo(
        "hare_tortoise",
        HareTortoise,
        "Lee et al. 2024",
        "keep a slow average of the network and return to it every n steps",
        (
            Tunable("beta", "memory of the average", 0.999, 0.0, 0.99999),
            Tunable("every", "steps between two returns", 1000, 1, None),
        ),
    ),
)

_BY_NAME = {record.name: record for record in _RECORDS}

CONTEXT = ("example", "seed")
"""Arguments of `create` that are dropped for methods that do not take them."""


def names() -> tuple[str, ...]:
    """Return the names of all methods."""
    return tuple(_BY_NAME)


def by_timing() -> dict[str, list[MethodInfo]]:
    """Return the records grouped by when the methods act. Methods that act on new data come last."""
    groups: dict[str, list[MethodInfo]] = {}
    for record in sorted(_RECORDS, key=lambda record: (record.needs_telling, record.kind == "architecture")):
        groups.setdefault(record.acts, []).append(record)
    return groups


def info(name: str) -> MethodInfo:
    """Return the record of a method.

    Raises:
        ValueError: If there is no method of that name; the message suggests the nearest one.
    """
    if name not in _BY_NAME:
        raise ValueError(f"name: there is no method {name!r}; {suggest(name, names())}")
    return _BY_NAME[name]


def options(name: str) -> dict[str, Any]:
    """Return a method's own settings with their defaults."""
    return keyword_options(info(name).cls)


def check_required(name: str, given: Iterable[str]) -> None:
    """Raise a ValueError if a setting without a default is not among those given."""
    for setting, default in options(name).items():
        if default is inspect.Parameter.empty and setting not in given:
            raise ValueError(
                f"method {name!r}: give {setting}; no value is safe for all networks, so it has no default"
            )


def create(name: str, model: nn.Module, **settings: Any) -> Method:
    """Make a method by name.

    Args:
        name: One of `names()`.
        model: The model.
        settings: The method's keyword arguments. `example` and `seed` may be given to any method. `where` may be one or
            several shell patterns of parameter names.

    Returns:
        The method, not attached yet.

    Raises:
        ValueError: If the method or a setting is unknown.

    Example:
        >>> import torch
        >>> create("l2", torch.nn.Linear(2, 2), lam=0.1, seed=0).name
        'l2'
    """
    cls = info(name).cls
    accepted = list(inspect.signature(cls).parameters)[1:]
    wanted = {key: value for key, value in settings.items() if key in accepted or key not in CONTEXT}
    check_names(f"method {name!r}", wanted, accepted)
    check_required(name, settings)
    if isinstance(where := wanted.get("where"), str | list | tuple):
        wanted["where"] = match_names(model, where)
    return cls(model, **wanted)
