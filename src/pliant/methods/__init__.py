"""The methods: each keeps a network able to learn in its own way, all behind one contract."""

from pliant.methods.architecture import Architecture
from pliant.methods.base import Method, Receipt
from pliant.methods.continual_backprop import ContinualBackprop
from pliant.methods.crelu import CReLU, CReLUConversion
from pliant.methods.dash import DASH
from pliant.methods.feature_rank import FeatureRank
from pliant.methods.fire import FIRE
from pliant.methods.hare_tortoise import HareTortoise
from pliant.methods.l2 import L2
from pliant.methods.l2_init import L2Init
from pliant.methods.layer_norm import LayerNormInsertion
from pliant.methods.layerwise import Layerwise
from pliant.methods.parseval import Parseval
from pliant.methods.penalty import Penalty
from pliant.methods.recycler import Recycler
from pliant.methods.redo import ReDo
from pliant.methods.registry import MethodInfo, Tunable, create, info, names, options
from pliant.methods.reinitializer import Reinitializer
from pliant.methods.rescaler import Rescaler
from pliant.methods.resets import FullReset, HeadReset
from pliant.methods.shrink import Shrink
from pliant.methods.shrink_perturb import ShrinkPerturb
from pliant.methods.spectral import Spectral, SpectralNorm
from pliant.methods.streaming_ewc import StreamingEWC
from pliant.methods.swr import SWR
from pliant.methods.upgd import UPGD
from pliant.methods.wasserstein import Wasserstein
from pliant.methods.weight_clipping import WeightClipping
from pliant.methods.weight_rescaling import WeightRescaling

__all__ = [
    "DASH",
    "FIRE",
    "L2",
    "SWR",
    "UPGD",
    "Architecture",
    "CReLU",
    "CReLUConversion",
    "ContinualBackprop",
    "FeatureRank",
    "FullReset",
    "HareTortoise",
    "HeadReset",
    "L2Init",
    "LayerNormInsertion",
    "Layerwise",
    "Method",
    "MethodInfo",
    "Parseval",
    "Penalty",
    "ReDo",
    "Receipt",
    "Recycler",
    "Reinitializer",
    "Rescaler",
    "Shrink",
    "ShrinkPerturb",
    "Spectral",
    "SpectralNorm",
    "StreamingEWC",
    "Tunable",
    "Wasserstein",
    "WeightClipping",
    "WeightRescaling",
    "create",
    "info",
    "names",
    "options",
]
