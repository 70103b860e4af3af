"""The C++ kernels of attention against the dense form in fp64, and what they promise besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from native.random_calls import check
from tamis.native import library

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"C++ kernels: {library.status()}")


@pytest.mark.parametrize("first", range(0, 400, 20))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)
