"""The methods: each keeps a network able to learn in its own way, all behind one contract."""

from pliant.methods._core.after_step import AfterStep
from pliant.methods._core.architecture import Architecture
from pliant.methods._core.method import Method, Receipt
from pliant.methods._core.penalty import Penalty
from pliant.methods._core.recycler import Recycler
from pliant.methods._core.reinitializer import Reinitializer
from pliant.methods.adalin import AdaLin, AdaptiveLinearity
from pliant.methods.c_chain import CChain
from pliant.methods.continual_backprop import ContinualBackprop
from pliant.methods.crelu import CReLU, CReLUConversion
from pliant.methods.dash import DASH
from pliant.methods.feature_rank import FeatureRankRegularization
from pliant.methods.fire import FIRE
from pliant.methods.fourier import FourierConversion, FourierFeatures
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
from pliant.methods.registry import MethodInfo, Tunable, by_timing, check_required, create, info, names, options
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

__all__ = [
    "DASH",
    "FIRE",
    "L2",
    "SWR",
    "TRAC",
    "UPGD",
    "AdaLin",
    "AdaptiveLinearity",
    "AfterStep",
    "Architecture",
    "CChain",
    "CReLU",
    "CReLUConversion",
    "ContinualBackprop",
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
    "MethodInfo",
    "NormalizeAndProject",
    "OptimizerReset",
    "ParsevalRegularization",
    "Penalty",
    "PlasticityInjection",
    "ReDo",
    "ReGraMa",
    "Receipt",
    "Recycler",
    "Reinitializer",
    "SelectiveReinit",
    "SelfNormalizedResets",
    "Shrink",
    "ShrinkPerturb",
    "SpectralNormPenalty",
    "SpectralNormalization",
    "SpectralRegularization",
    "StreamingEWC",
    "Tunable",
    "WassersteinRegularization",
    "WeightClipping",
    "WeightRescaling",
    "by_timing",
    "check_required",
    "create",
    "info",
    "names",
    "options",
]
