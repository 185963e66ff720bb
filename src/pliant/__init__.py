"""Pliant keeps PyTorch networks able to learn: attach methods, diagnose networks, compare methods.

The names are imported when they are first used. `import pliant` alone does not import torch.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pliant._version import __version__

if TYPE_CHECKING:
    from pliant import methods
    from pliant.compare import ComparisonResult, compare
    from pliant.diagnosis import Diagnosis, diagnose
    from pliant.diagnostics import Monitor
    from pliant.experiments.report import report
    from pliant.methods import (
        DASH,
        FIRE,
        L2,
        SWR,
        TRAC,
        UPGD,
        AdaLin,
        AdaptiveLinearity,
        CChain,
        ContinualBackprop,
        CReLU,
        CReLUConversion,
        FeatureRankRegularization,
        FourierConversion,
        FourierFeatures,
        FullReset,
        HareTortoise,
        HeadReset,
        InFeR,
        L2Init,
        LayerNormInsertion,
        LayerwiseReset,
        Method,
        NormalizeAndProject,
        OptimizerReset,
        ParsevalRegularization,
        PlasticityInjection,
        Receipt,
        ReDo,
        ReGraMa,
        SelectiveReinit,
        SelfNormalizedResets,
        Shrink,
        ShrinkPerturb,
        SpectralNormalization,
        SpectralNormPenalty,
        SpectralRegularization,
        StreamingEWC,
        WassersteinRegularization,
        WeightClipping,
        WeightRescaling,
    )
    from pliant.treat import Treatment, treat
    from pliant.trial import trial
    from pliant.trial_result import Trial

__all__ = [
    "DASH",
    "FIRE",
    "L2",
    "SWR",
    "TRAC",
    "UPGD",
    "AdaLin",
    "AdaptiveLinearity",
    "CChain",
    "CReLU",
    "CReLUConversion",
    "ComparisonResult",
    "ContinualBackprop",
    "Diagnosis",
    "FeatureRankRegularization",
    "FourierConversion",
    "FourierFeatures",
    "FullReset",
    "HareTortoise",
    "HeadReset",
    "InFeR",
    "L2Init",
    "LayerNormInsertion",
    "LayerwiseReset",
    "Method",
    "Monitor",
    "NormalizeAndProject",
    "OptimizerReset",
    "ParsevalRegularization",
    "PlasticityInjection",
    "ReDo",
    "ReGraMa",
    "Receipt",
    "SelectiveReinit",
    "SelfNormalizedResets",
    "Shrink",
    "ShrinkPerturb",
    "SpectralNormPenalty",
    "SpectralNormalization",
    "SpectralRegularization",
    "StreamingEWC",
    "Treatment",
    "Trial",
    "WassersteinRegularization",
    "WeightClipping",
    "WeightRescaling",
    "__version__",
    "compare",
    "diagnose",
    "methods",
    "report",
    "treat",
    "trial",
]

_HOMES = {
    "ComparisonResult": "compare",
    "compare": "compare",
    "Diagnosis": "diagnosis",
    "Monitor": "diagnostics",
    "diagnose": "diagnosis",
    "report": "experiments.report",
    "Treatment": "treat",
    "treat": "treat",
    "Trial": "trial_result",
    "trial": "trial",
}
"""The modules of the public names that are not methods."""


def __getattr__(name: str) -> Any:
    if name in __all__ and name != "methods":
        return getattr(importlib.import_module(f"pliant.{_HOMES.get(name, 'methods')}"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"pliant.{name}"):
        return importlib.import_module(f"pliant.{name}")
    raise AttributeError(f"module 'pliant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """The package; its functions `compare`, `treat` and `trial` replace the modules of the same names."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system makes each loaded submodule an attribute of its package.
        if name in ("compare", "treat", "trial") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
