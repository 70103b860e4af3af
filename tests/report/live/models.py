"""Small models to type into: a translator that knows a few words by heart, a language model, and one of numbers."""

from __future__ import annotations

from functools import cache

import torch

from analysis.cases import causal_lm
from tamis.data.vocabulary import Vocabulary
from tamis.decoding import DecodingConfig, TextGenerator, Translator
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.report.live.subjects import Continuation, Subject, Translation

WORDS = ["the old man reads a newspaper", "a small dog sleeps in the garden", "der alte Mann liest eine Zeitung"] * 20
SIZES = {"embed_dim": 16, "num_heads": 4, "ffn_dim": 24, "initial_spread": 1.0}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.train(WORDS, 48, kind="bpe")


def translator(mechanism: str = "entmax") -> Translator:
    torch.manual_seed(0)
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    config = Seq2SeqConfig(vocab_size=48, encoder_layers=1, decoder_layers=2, **SIZES, **chosen)
    return Translator(Seq2Seq(config).eval(), vocabulary(), decoding=DecodingConfig(beam=2, max_length=12))


def generator(mechanism: str = "entmax") -> TextGenerator:
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(vocab_size=48, num_layers=2, mechanism=mechanism, **SIZES)).eval()
    return TextGenerator(model, vocabulary(), DecodingConfig(method="greedy", max_length=8))


def subjects() -> list[Subject]:
    return [
        Translation("entmax", translator()),
        Translation("rela", translator("rela")),
        Continuation("text", generator()),
        Continuation("numbers", causal_lm()),
    ]
