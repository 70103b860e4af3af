"""Attention mechanisms, one paper per file."""

from tamis.mechanisms.asentmax import AdaptiveScale, ASEntmaxAttention, ASSMaxAttention, ScalableSoftmaxAttention
from tamis.mechanisms.base import Inputs, Mechanism
from tamis.mechanisms.entmax import EntmaxAttention, LearnedAlpha
from tamis.mechanisms.registry import MECHANISMS, build_mechanism
from tamis.mechanisms.rela import ReLANorm, ReLAttention
from tamis.mechanisms.schedules import Ramp
from tamis.mechanisms.softmax import SoftmaxAttention
from tamis.mechanisms.softpick import SoftpickAttention

__all__ = [
    "MECHANISMS",
    "ASEntmaxAttention",
    "ASSMaxAttention",
    "AdaptiveScale",
    "EntmaxAttention",
    "Inputs",
    "LearnedAlpha",
    "Mechanism",
    "Ramp",
    "ReLANorm",
    "ReLAttention",
    "ScalableSoftmaxAttention",
    "SoftmaxAttention",
    "SoftpickAttention",
    "build_mechanism",
]
