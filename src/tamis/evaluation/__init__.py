"""How good a model is: translations, word alignments, likelihood; text and tasks at lengths never trained."""

from typing import Never

from tamis.evaluation.alignment import (
    AlignmentReport,
    AlignmentScore,
    LayerAlignment,
    aer,
    attention_alignment,
    score_links,
)
from tamis.evaluation.dispersion import DispersionConfig, LengthDispersion, measure_dispersion
from tamis.evaluation.gold import GoldPair, parse_links, read_gold, read_links, read_pharaoh
from tamis.evaluation.language import LanguageConfig, score_passkeys, score_perplexity
from tamis.evaluation.lengths import LengthsConfig, LengthScore, lengths_table, score_lengths
from tamis.evaluation.likelihood import Likelihood, LikelihoodMeter, translation_likelihood
from tamis.evaluation.translation import (
    Comparison,
    Difference,
    MetricScore,
    TranslationScore,
    compare,
    score_translations,
)

__all__ = [
    "AlignmentReport",
    "AlignmentScore",
    "Comparison",
    "Difference",
    "DispersionConfig",
    "GoldPair",
    "LanguageConfig",
    "LayerAlignment",
    "LengthDispersion",
    "LengthScore",
    "LengthsConfig",
    "Likelihood",
    "LikelihoodMeter",
    "MetricScore",
    "TranslationScore",
    "aer",
    "attention_alignment",
    "compare",
    "lengths_table",
    "measure_dispersion",
    "parse_links",
    "read_gold",
    "read_links",
    "read_pharaoh",
    "score_lengths",
    "score_links",
    "score_passkeys",
    "score_perplexity",
    "score_translations",
    "translation_likelihood",
]


def __getattr__(name: str) -> Never:
    if name in ("draw_dispersion", "draw_lengths"):
        raise ImportError(f"tamis.evaluation.{name} is called tamis.report.lengths.{name} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
