"""Rows that see nothing, and garbage that nobody sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.cases import CASES, INF, Case, call, every_function, hidden_rows, leaf, visible_pairs
from tamis.attention import blocked
from tamis.functional import entmax_attention


@every_function
@pytest.mark.parametrize("case", hidden_rows())
@pytest.mark.parametrize(
    ("dtype", "path"),
    [
        (torch.float64, "blocks"),
        (torch.float32, "resolved"),
        (torch.bfloat16, "blocks"),
        (torch.float16, "blocks"),
        (torch.float16, "dense"),
    ],
)
def test_masked_rows_are_zero(
    name: str, case: str, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = hidden_rows()[case]
    inputs = CASES["cross"].inputs(dtype)
    empty = ~visible_pairs((2, 4, 6, 9), **options).any(-1)
    assert bool(empty.any())
    probe = torch.ones(2, 4, 6, 5, dtype=dtype)
    if path == "resolved":
        monkeypatch.setattr(blocked, "_KEEP", 0)
    out, pullback = torch.func.vjp(lambda *x: call(name, x, **options), *inputs) if path == "dense" else (None, None)
    if pullback is None:
        leaves = [leaf(x) for x in inputs]
        out = call(name, leaves, **options)
        gradients = torch.autograd.grad(out, leaves, probe)
    else:
        gradients = pullback(probe)
    assert bool((out[empty] == 0.0).all())
    assert bool(out.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][empty] == 0.0).all())
    if bool(empty.all()):
        assert all(bool((gradient == 0.0).all()) for gradient in gradients)


@pytest.mark.parametrize("case", hidden_rows())
def test_masked_rows_give_alpha_mask_and_slopes_no_gradient(case: str) -> None:
    options = hidden_rows()[case]
    empty = ~visible_pairs((2, 4, 6, 9), **options).any(-1)
    alpha = leaf(torch.full((2, 4, 6, 1), 1.5, dtype=torch.float64))
    slopes = leaf(torch.full((4,), 0.25, dtype=torch.float64))
    leaves = [alpha, slopes]
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options["attn_mask"] = leaf(options["attn_mask"].double())
        leaves.append(options["attn_mask"])
    options["alibi_slopes"] = slopes
    out = entmax_attention(*CASES["cross"].inputs(), **options, alpha=alpha)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert bool((gradients[0][empty] == 0.0).all())
    assert bool((gradients[0][~empty] != 0.0).any()) or bool(empty.all())
    if len(gradients) == 3:
        assert bool((gradients[2][options["attn_mask"] == -INF] == 0.0).all())


@every_function
@pytest.mark.parametrize("garbage", [math.nan, INF, -INF, 1e30])
@pytest.mark.parametrize("how", ["mask", "key_lengths", "causal", "packed"])
@pytest.mark.parametrize("path", ["blocks", "dense"])
def test_garbage_in_hidden_keys_stays_hidden(name: str, garbage: float, how: str, path: str) -> None:
    batch = 1 if how == "packed" else 2
    query, key, value = Case(batch=batch, queries=6, keys=9).inputs(torch.float32)
    options: dict[str, Any] = {
        "mask": {"attn_mask": torch.arange(9) < 6},
        "key_lengths": {"key_lengths": torch.tensor([6, 4])},
        "causal": {"is_causal": True, "query_positions": torch.arange(6)},
        "packed": {"cu_seqlens_q": torch.tensor([0, 6]), "cu_seqlens_k": torch.tensor([0, 6])},
    }[how]
    spoiled = key.clone()
    spoiled[:, :, 6:] = garbage

    def function(query: Tensor) -> Tensor:
        return call(name, (query, spoiled, value), **options)

    out = torch.func.vjp(function, query)[0] if path == "dense" else function(query)
    unspoiled = call(name, (query, key, value), **options, **({"backend": "dense"} if path == "dense" else {}))
    torch.testing.assert_close(out, unspoiled, rtol=0.0, atol=1e-6)
