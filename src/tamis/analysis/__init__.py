"""What attention heads do: recording their weights, and figures about them."""

from typing import Never

from tamis.analysis.analyze import analyze
from tamis.analysis.capture import Captured, Consumer, InputConsumer, capture, capture_sparse
from tamis.analysis.figures import FIGURES, Figure
from tamis.analysis.files import read_arrays, write_arrays
from tamis.analysis.heads import (
    OFFSETS,
    entropy,
    first_token_mass,
    normalised_entropy,
    one_hot_share,
    positional_confidence,
    support_size,
)
from tamis.analysis.histograms import SIZES, density_histogram, quantiles, support_by_length, support_histogram
from tamis.analysis.importance import HeadImportance, head_importance, silenced
from tamis.analysis.intervention import altered
from tamis.analysis.learned import AlphaTrajectories, alpha_histograms, alpha_trajectories, learned_alphas
from tamis.analysis.metrics import (
    AttentionMetrics,
    SiteMetrics,
    density,
    head_diversity,
    null_share,
    sparsity_rate,
)
from tamis.analysis.nulls import NullRate, NullSignal, auc, null_rates, null_signal
from tamis.analysis.results import Analysis, NamedHead, SiteAnalysis, Thresholds
from tamis.analysis.scales import ScaleMetrics, SiteScales
from tamis.analysis.shown import ShownSentence, shown_sentences
from tamis.analysis.sites import attention_sites, kind_of
from tamis.analysis.tokens import Sentences, Tokens, describe_tokens, run_model
from tamis.analysis.words import interrogation, split_word_merging, subword_merging

__all__ = [
    "FIGURES",
    "OFFSETS",
    "SIZES",
    "AlphaTrajectories",
    "Analysis",
    "AttentionMetrics",
    "Captured",
    "Consumer",
    "Figure",
    "HeadImportance",
    "InputConsumer",
    "NamedHead",
    "NullRate",
    "NullSignal",
    "ScaleMetrics",
    "Sentences",
    "ShownSentence",
    "SiteAnalysis",
    "SiteMetrics",
    "SiteScales",
    "Thresholds",
    "Tokens",
    "alpha_histograms",
    "alpha_trajectories",
    "altered",
    "analyze",
    "attention_sites",
    "auc",
    "capture",
    "capture_sparse",
    "density",
    "density_histogram",
    "describe_tokens",
    "entropy",
    "first_token_mass",
    "head_diversity",
    "head_importance",
    "interrogation",
    "kind_of",
    "learned_alphas",
    "normalised_entropy",
    "null_rates",
    "null_share",
    "null_signal",
    "one_hot_share",
    "positional_confidence",
    "quantiles",
    "read_arrays",
    "run_model",
    "shown_sentences",
    "silenced",
    "sparsity_rate",
    "split_word_merging",
    "subword_merging",
    "support_by_length",
    "support_histogram",
    "support_size",
    "write_arrays",
]


def __getattr__(name: str) -> Never:
    if name in ("Explorer", "show"):
        raise ImportError(f"tamis.analysis.{name} is called tamis.report.{name} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
