"""Whole models: an encoder-decoder for translation and a decoder-only language model."""

from tamis.models.causal_lm import CausalLM, CausalLMConfig
from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig

__all__ = ["CausalLM", "CausalLMConfig", "Seq2Seq", "Seq2SeqConfig"]
