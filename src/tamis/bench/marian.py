"""MarianMTModel of Hugging Face transformers with the weights of a Seq2Seq's kind, and its way to translate.

Marian's sinusoidal positions hold all sines before all cosines, ours take turns; that is a permutation of channels,
which the copy applies throughout.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig

PEER = "transformers"


def version() -> str:
    return str(importlib.import_module(PEER).__version__)


def build(config: Seq2SeqConfig, bos_id: int, eos_id: int) -> Any:
    """A random model of these sizes; None where transformers is not installed."""
    try:
        transformers: Any = importlib.import_module(PEER)
    except ModuleNotFoundError:
        return None
    torch.manual_seed(0)
    sizes = transformers.MarianConfig(
        vocab_size=config.vocab_size,
        d_model=config.embed_dim,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        encoder_attention_heads=config.num_heads,
        decoder_attention_heads=config.num_heads,
        encoder_ffn_dim=config.ffn_dim,
        decoder_ffn_dim=config.ffn_dim,
        activation_function="relu",
        scale_embedding=True,
        init_std=config.embed_dim**-0.5,
        pad_token_id=config.pad_id,
        decoder_start_token_id=bos_id,
        eos_token_id=eos_id,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(sizes).eval()


@torch.no_grad()
def copy(marian: Any, model: Seq2Seq) -> None:
    """Give a post-norm softmax model Marian's weights, its channels in our order."""
    width = model.config.embed_dim
    channels = torch.arange(width).view(2, -1).T.flatten()  # sine and cosine in turn
    model.embedding.weight.copy_(marian.model.shared.weight[:, channels])

    def reads(ours: nn.Linear, theirs: nn.Linear) -> None:
        ours.weight.copy_(theirs.weight[:, channels])
        ours.bias.copy_(theirs.bias)

    def writes(ours: Any, theirs: Any) -> None:  # a norm too
        ours.weight.copy_(theirs.weight[channels])
        ours.bias.copy_(theirs.bias[channels])

    def attends(ours: Any, theirs: Any) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            reads(getattr(ours, name), getattr(theirs, name))
        writes(ours.out_proj, theirs.out_proj)

    stacks = ((model.encoder, marian.model.encoder.layers), (model.decoder, marian.model.decoder.layers))
    for ours, theirs in ((a, b) for stack in stacks for a, b in zip(*stack, strict=True)):
        layer: Any = ours
        attends(layer.self_attention, theirs.self_attn)
        writes(layer.self_residual.norm, theirs.self_attn_layer_norm)
        if layer.cross_attention is not None:
            attends(layer.cross_attention, theirs.encoder_attn)
            writes(layer.cross_residual.norm, theirs.encoder_attn_layer_norm)
        reads(layer.feed_forward.up, theirs.fc1)
        writes(layer.feed_forward.down, theirs.fc2)
        writes(layer.feed_residual.norm, theirs.final_layer_norm)


def translate(marian: Any, source: Tensor, beam: int, length: int) -> list[list[int]]:
    """Translations of exactly so many tokens: the end is forbidden before."""
    with torch.inference_mode():
        found = marian.generate(
            source,
            attention_mask=source != marian.config.pad_token_id,
            num_beams=beam,
            max_length=length + 1,  # the begin counts
            min_length=length + 1,
            length_penalty=0.0,
            do_sample=False,
        )
    return [tokens[1:] for tokens in found.tolist()]
