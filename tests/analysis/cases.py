"""Weights and tiny models to analyse."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tamis.analysis import Sentences, Tokens
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig

VOCAB, PAD = 11, 0
SMALL: dict[str, Any] = {"initial_spread": 1.0, "vocab_size": VOCAB, "embed_dim": 16, "num_heads": 4, "ffn_dim": 24}


def seq2seq(mechanism: Any = "entmax", **options: Any) -> Seq2Seq:
    torch.manual_seed(1)
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    return Seq2Seq(Seq2SeqConfig(**{**SMALL, "encoder_layers": 2, "decoder_layers": 1, **chosen, **options})).eval()


def causal_lm(mechanism: Any = "entmax", **options: Any) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM(CausalLMConfig(**{**SMALL, "num_layers": 2, "mechanism": mechanism, **options})).eval()


def batch() -> tuple[Tensor, Tensor]:
    source = torch.tensor([[3, 4, 5, 6, 2], [7, 8, 2, PAD, PAD]])
    target = torch.tensor([[1, 3, 4, 5], [1, 6, PAD, PAD]])
    return source, target


def tokens(rows: list[list[int]], **others: Any) -> Tokens:
    """Padded on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return Tokens(ids=ids, mask=ids != PAD, **others)


def pairs() -> list[tuple[list[int], list[int]]]:
    """Sentence pairs of all lengths, those of a single token included."""
    generator = torch.Generator().manual_seed(0)
    lengths = [(5, 4), (3, 2), (1, 1), (7, 6), (1, 3), (4, 1)]
    return [
        tuple(torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in pair) for pair in lengths
    ]


def batches(size: int) -> list[Sentences]:
    """The pairs, so many at a time."""
    every = pairs()
    return [
        Sentences(source=tokens([pair[0] for pair in some]), target=tokens([pair[1] for pair in some]))
        for some in (every[start : start + size] for start in range(0, len(every), size))
    ]


def sparse_weights(seed: int, shape: tuple[int, ...], zero_share: float, null_rows: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(shape, generator=generator)
    weights[torch.rand(shape, generator=generator) < zero_share] = 0.0
    weights[torch.rand(shape[:-1], generator=generator) < null_rows] = 0.0
    return weights


def random_case(case: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Weights and what is visible, from a draw of `cases`."""
    seed, shape, zero_share, null_rows, visible_share = case
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < visible_share
    return sparse_weights(seed, shape, zero_share, null_rows), visible


def rows_of(weights: Tensor, visible: Tensor) -> list[tuple[int, int, int, dict[int, float]]]:
    """(b, h, q, {key: share}) of every row that sees something, scaled to sum 1 in Python floats."""
    found = []
    for b, h, q in torch.cartesian_prod(*map(torch.arange, weights.shape[:3])).reshape(-1, 3).tolist():
        row = {k: abs(float(weights[b, h, q, k])) for k in range(weights.shape[3]) if visible[b, h, q, k]}
        total = sum(row.values())
        if row:
            found.append((b, h, q, {k: w / total if total else 0.0 for k, w in row.items()}))
    return found


def mean_by_head(heads: int, values: list[tuple[int, float]]) -> list[float]:
    """Of (head, value), 0 for a head without any."""
    grouped = [[value for head, value in values if head == h] for h in range(heads)]
    return [sum(group) / max(1, len(group)) for group in grouped]


cases = st.tuples(
    st.integers(0, 10**6),
    st.tuples(*[st.integers(1, top) for top in (3, 4, 4, 6)]),
    st.sampled_from([0.0, 0.4, 0.8]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1.0, 0.6, 0.2]),
)
