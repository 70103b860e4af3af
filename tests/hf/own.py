"""Tiny models of our own with vocabularies, as folders of ours."""

import torch

from tamis.data.text import grammar_examples
from tamis.data.vocabulary import Vocabulary
from tamis.decoding import TextGenerator, Translator
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig

SIZES = {"embed_dim": 32, "num_heads": 4, "ffn_dim": 48}


def lines(side, count=200):
    return [" ".join(getattr(example, side)) for example in grammar_examples(f"grammar:train:{count}")]


def built(kind, config):
    """The same at every call, with weights large enough for attention to have something to choose."""
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.3)
    return model.eval()


def translator(**changes):
    source, target = Vocabulary.train(lines("source"), 100), Vocabulary.train(lines("target"), 110)
    config = Seq2SeqConfig(
        vocab_size=110, source_vocab_size=100, encoder_layers=2, decoder_layers=2, position="alibi", **SIZES, **changes
    )
    return Translator(built(Seq2Seq, config), source, target)


def generator(**changes):
    """With NAPE positions and ASEntmax, whose tables no file holds."""
    vocabulary = Vocabulary.train(lines("source"), 100)
    return TextGenerator(built(CausalLM, CausalLMConfig(vocab_size=100, num_layers=2, **SIZES, **changes)), vocabulary)
