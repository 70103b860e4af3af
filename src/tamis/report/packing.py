"""The non-zero weights of one attention layer as a short string that the page unpacks.

    zlib( non-zeros of each row | gaps between the keys of a row | upper three bytes of each weight, byte by byte )

as base64.  Three bytes of an fp32 are exact to 1.6e-5, which is more than a page can show, and the bytes that are alike
stand next to one another, so that they compress.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.functional import SparseWeights

Array = npt.NDArray[Any]
MOST_KEYS = 1 << 16


def pack(weights: SparseWeights) -> str:
    """Of one sentence."""
    crow, col, val = (part.numpy() for part in weights[:3])
    counts = np.diff(crow)
    gaps = np.diff(col.astype(np.int64), prepend=0)
    first = crow[:-1][counts > 0]
    gaps[first] = col[first]
    if max(counts.max(initial=0), gaps.max(initial=0)) >= MOST_KEYS:
        raise ValueError(f"a sentence to be shown may have {MOST_KEYS - 1:,} tokens at most")
    parts = (counts.astype("<u2").tobytes(), gaps.astype("<u2").tobytes(), _upper_bytes(val))
    return base64.b64encode(zlib.compress(b"".join(parts), 9)).decode("ascii")


def _upper_bytes(val: Array) -> bytes:
    """Rounded to 24 bits; a weight that is not zero never becomes so."""
    bits = (val.astype("<f4").view("<u4").astype(np.int64) + 0x80) >> 8
    bits = np.where((bits & 0x7FFFFF == 0) & (val != 0), bits | 1, bits)
    return bits.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].T.tobytes()
