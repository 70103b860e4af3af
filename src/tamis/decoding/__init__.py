"""From a trained model to text: beam search, greedy search, sampling, and a translator that does the rest."""

from tamis.decoding.alignment import CrossAttention
from tamis.decoding.sampling import sample
from tamis.decoding.search import Hypothesis, beam_search, greedy
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.translator import Translation, Translator

__all__ = [
    "CrossAttention",
    "DecodingConfig",
    "Hypothesis",
    "Translation",
    "Translator",
    "beam_search",
    "greedy",
    "sample",
]
