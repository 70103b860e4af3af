"""From a trained model to text: beam search, greedy search, sampling, and what does the rest around them."""

from tamis.decoding.alignment import CrossAttention
from tamis.decoding.generator import Continuation, TextGenerator
from tamis.decoding.sampling import sample
from tamis.decoding.search import Hypothesis, beam_search, greedy
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.translator import Translation, Translator

__all__ = [
    "Continuation",
    "CrossAttention",
    "DecodingConfig",
    "Hypothesis",
    "TextGenerator",
    "Translation",
    "Translator",
    "beam_search",
    "greedy",
    "sample",
]
