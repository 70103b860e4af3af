"""Modules: the functions of tamis as `torch.nn` citizens, and the layers that models are made of."""

from tamis.mechanisms.entmax import LearnedAlpha
from tamis.nn.attention import Attention
from tamis.nn.cache import AttentionCache, LayerCache, ModelCache
from tamis.nn.layers import FeedForward, TransformerLayer
from tamis.nn.losses import EntmaxLoss, NormmaxLoss, SparsemaxLoss
from tamis.nn.multihead import MultiheadAttention
from tamis.nn.spread import measure_spread, set_spread
from tamis.nn.transforms import Budgetmax, Entmax, Entmax15, Normmax, Sparsemax

__all__ = [
    "Attention",
    "AttentionCache",
    "Budgetmax",
    "Entmax",
    "Entmax15",
    "EntmaxLoss",
    "FeedForward",
    "LayerCache",
    "LearnedAlpha",
    "ModelCache",
    "MultiheadAttention",
    "Normmax",
    "NormmaxLoss",
    "Sparsemax",
    "SparsemaxLoss",
    "TransformerLayer",
    "measure_spread",
    "set_spread",
]
