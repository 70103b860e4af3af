"""Counting visible keys without comparing each with each, against doing so."""

from dataclasses import replace

import pytest
import torch

from tamis.attention.masks import Visibility


@pytest.mark.parametrize(
    ("queries", "keys", "packed"),
    [
        (5, 5, None),
        (2, 5, None),
        (5, 3, None),  # queries before the first key
        (9, 9, ([0, 4, 4, 7], [0, 4, 4, 7])),  # an empty sequence, and tokens after the last
        (6, 9, ([0, 2, 2, 6], [0, 4, 4, 9])),
        (6, 6, ([0, 4, 6], [0, 1, 6])),
        (4, 4, ([0, 4, 4, 4], [0, 4, 4, 4])),
    ],
)
def test_causal_counts(queries, keys, packed):
    offsets = None if packed is None else tuple(map(torch.tensor, packed))
    device = torch.device("cpu")
    plain = Visibility(num_queries=queries, num_keys=keys, device=device, is_causal=True, cu_seqlens=offsets)
    compared = replace(plain, attn_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert torch.equal(plain.counts(), compared.counts())
