"""Attention mechanisms, one paper per file."""

from tamis.mechanisms.asentmax import AdaptiveScale, ASEntmaxAttention, ASSMaxAttention, ScalableSoftmax
from tamis.mechanisms.base import Mechanism
from tamis.mechanisms.entmax import EntmaxAttention, LearnedAlpha
from tamis.mechanisms.registry import MECHANISMS, build_mechanism
from tamis.mechanisms.rela import ReLANorm, ReLAttention
from tamis.mechanisms.softmax import SoftmaxAttention
from tamis.mechanisms.softpick import SoftpickAttention

__all__ = [
    "MECHANISMS",
    "ASEntmaxAttention",
    "ASSMaxAttention",
    "AdaptiveScale",
    "EntmaxAttention",
    "LearnedAlpha",
    "Mechanism",
    "ReLANorm",
    "ReLAttention",
    "ScalableSoftmax",
    "SoftmaxAttention",
    "SoftpickAttention",
    "build_mechanism",
]
