"""The public functions: arguments are checked here, once, and inner code trusts them."""

from tamis.attention.rules import Activation, Entmax, Rule, Softmax, Softpick
from tamis.attention.statistics import SparseWeights, Statistics
from tamis.functional.attention import (
    attention,
    attention_backends,
    attention_scores,
    attention_statistics,
    attention_weights,
    attention_with_statistics,
    entmax_attention,
    relu_attention,
    softmax_attention,
    sparse_attention_weights,
    visible_counts,
)
from tamis.functional.backends import BackendChoice
from tamis.functional.decoding import paged_attention
from tamis.functional.losses import entmax_loss, normmax_loss, sparsemax_loss
from tamis.functional.transforms import budgetmax, entmax, entmax15, entmax_threshold, normmax, sparsemax

__all__ = [
    "Activation",
    "BackendChoice",
    "Entmax",
    "Rule",
    "Softmax",
    "Softpick",
    "SparseWeights",
    "Statistics",
    "attention",
    "attention_backends",
    "attention_scores",
    "attention_statistics",
    "attention_weights",
    "attention_with_statistics",
    "budgetmax",
    "entmax",
    "entmax15",
    "entmax_attention",
    "entmax_loss",
    "entmax_threshold",
    "normmax",
    "normmax_loss",
    "paged_attention",
    "relu_attention",
    "softmax_attention",
    "sparse_attention_weights",
    "sparsemax",
    "sparsemax_loss",
    "visible_counts",
]
