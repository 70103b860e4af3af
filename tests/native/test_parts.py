"""Dropout of a part of a larger call drops what the larger call would, natively as in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tamis.attention.call import Dropout, Part, check_call
from tamis.attention.dense import Dense
from tamis.attention.native import Native
from tamis.attention.rules import Activation, Entmax


@pytest.mark.parametrize("rule", [Entmax(1.5), Activation("relu")], ids=["entmax", "relu"])
def test_parts_are_those_of_plain_torch(rule):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16), torch.randn(2, 3, 11, 16)
    call = check_call(query, key, value, dropout_p=0.4)
    part = replace(call, dropout=Dropout(0.4, None, Part(2**61 + 12345, head=4, query=100)))
    bound = rule.bind(part)
    native, dense = Native().attend(part, bound), Dense().attend(part, bound)
    torch.testing.assert_close(native, dense, rtol=1e-5, atol=1e-6)
    elsewhere = replace(call, dropout=Dropout(0.4, None, Part(2**61 + 12345, head=5, query=100)))
    assert not torch.allclose(Native().attend(elsewhere, bound), native)


def test_a_whole_drops_what_its_parts_drop():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    whole = replace(check_call(query, key, value, dropout_p=0.3), dropout=Dropout(0.3, None, Part(77)))
    bound = Entmax(1.3).bind(whole)
    halves = [
        replace(
            check_call(query[:, :, s], key, value, dropout_p=0.3), dropout=Dropout(0.3, None, Part(77, query=s.start))
        )
        for s in (slice(0, 4), slice(4, 9))
    ]
    found = torch.cat([Native().attend(half, bound) for half in halves], 2)
    torch.testing.assert_close(found, Native().attend(whole, bound), rtol=0, atol=1e-6)
