"""Models of every kind at one small size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.mechanisms import MECHANISMS
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.positions import POSITIONS

VOCAB, PAD = 13, 0

SMALL: dict[str, Any] = {"vocab_size": VOCAB, "embed_dim": 16, "num_heads": 4, "ffn_dim": 24, "max_length": 32}

CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-4}

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)

every_position = pytest.mark.parametrize("position", POSITIONS)

every_arrangement = pytest.mark.parametrize("arrangement", ["pre", "post", "both"])


def seq2seq(mechanism: Any = "entmax", seed: int = 0, **options: Any) -> Seq2Seq:
    torch.manual_seed(seed)
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    return Seq2Seq(Seq2SeqConfig(**{**SMALL, **layers, **chosen, **options})).eval()


def causal_lm(mechanism: Any = "asentmax", seed: int = 0, **options: Any) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(CausalLMConfig(**{**SMALL, "num_layers": 2, "mechanism": mechanism, **options})).eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Never the padding."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(tokens(2, 5) % 9, tokens(2, 4, 1)) if isinstance(model, Seq2Seq) else model(tokens(2, 5))
