"""Calls of attention to a paged cache, and exact results to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cases import poisoned
from tamis.attention.rules import Activation, Entmax, Rule
from tamis.functional import attention_weights, paged_attention

FACTORS: dict[str, tuple[Any, ...]] = {
    "rule": (1.5, "learned", "relu"),
    "structure": ("causal", "window", "alibi"),
    "page": (16, 24, 64),
    "groups": (1, 2),
    "queries": (1, 3),
    "norms": (False, True),
}
HEADS = 2
LENGTHS = (150, 33, 0)


class Paged:
    """A pool in which pages of three sequences lie in any order, with NaN wherever nobody should look."""

    def __init__(self, case: dict[str, Any], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        page, count = case["page"], -(-max(LENGTHS) // case["page"])
        pages = len(LENGTHS) * count + 2
        key_heads = HEADS // case["groups"]

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        self.query = draw(len(LENGTHS), HEADS, case["queries"], 24)
        self.key, self.value = 2.0 * draw(pages, page, key_heads, 24), draw(pages, page, key_heads, 16)
        order = torch.randperm(pages, generator=generator)[: len(LENGTHS) * count].view(len(LENGTHS), count)
        self.table = order.to(device, torch.int32)
        self.lengths = torch.tensor(LENGTHS, device=device)
        used = torch.zeros(pages, page, dtype=torch.bool)
        for row, length in zip(order, LENGTHS, strict=True):
            place = torch.arange(length)
            used[row[place // page], place % page] = True
            self.table[LENGTHS.index(length), -(-length // page) :] = 10**6
        for pool in (self.key, self.value):
            pool[~used.to(device)] = torch.nan
        alphas = torch.tensor([1.2, 1.8], device=device)
        self.rule: Rule = {"relu": Activation(), "learned": Entmax(alphas), 1.5: Entmax(1.5)}[case["rule"]]
        self.options: dict[str, Any] = {"is_causal": True}
        if case["structure"] == "window":
            self.options["window"] = 20
        if case["structure"] == "alibi":
            self.options["alibi_slopes"] = torch.tensor([0.7, 0.05], device=device)
        self.norms = self.key.float().nan_to_num().norm(dim=-1).amax(1) if case["norms"] and page % 16 == 0 else None

    def run(self, **options: Any) -> Tensor:
        arguments = (self.query, self.key, self.value, self.table, self.lengths)
        with poisoned():
            return paged_attention(*arguments, rule=self.rule, **self.options, **{"page_norms": self.norms, **options})

    def exact(self) -> Tensor:
        """Each sequence by itself, in fp64, its queries at the end."""
        outputs = []
        for query, row, length in zip(self.query.double(), self.table, LENGTHS, strict=True):
            place = torch.arange(length, device=row.device)
            where = (row.long()[place // self.key.shape[1]], place % self.key.shape[1])
            key, value = (pool.double()[where].transpose(0, 1)[None] for pool in (self.key, self.value))
            weights = attention_weights(query[None], key, enable_gqa=True, rule=self.rule, **self.options)
            outputs.append(weights @ value.repeat_interleave(HEADS // key.shape[1], 1))
        return torch.cat(outputs)
