"""The non-zero weights of one attention layer as bytes that the page unpacks.

    width | non-zeros of each row | gaps between the keys of a row | upper three bytes of each weight, byte by byte

`width` is 2 or 4, the bytes of a count and of a gap, and takes 4 bytes itself.  Three bytes of an fp32 are exact to
1.6e-5, which is more than a page can show, and bytes that are alike stand next to one another, so that they compress.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tamis.functional import SparseWeights

Array = npt.NDArray[Any]


def pack(weights: SparseWeights) -> str:
    """Compressed and as text, to stand in a page."""
    return base64.b64encode(zlib.compress(packed(weights), 9)).decode("ascii")


def packed(weights: SparseWeights) -> bytes:
    """Pack the weights of one sentence."""
    crow, col, val = (part.numpy() for part in weights[:3])
    counts = np.diff(crow)
    gaps = np.diff(col.astype(np.int64), prepend=0)
    first = crow[:-1][counts > 0]
    gaps[first] = col[first]
    width = 2 if max(counts.max(initial=0), gaps.max(initial=0)) < 1 << 16 else 4
    parts = (counts.astype(f"<u{width}"), gaps.astype(f"<u{width}"))
    return b"".join((np.uint32(width).astype("<u4").tobytes(), *(part.tobytes() for part in parts), _upper_bytes(val)))


def _upper_bytes(val: Array) -> bytes:
    """Rounded to 24 bits; a weight that is not zero never becomes so."""
    bits = (val.astype("<f4").view("<u4").astype(np.int64) + 0x80) >> 8
    bits = np.where((bits & 0x7FFFFF == 0) & (val != 0), bits | 1, bits)
    return bits.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].T.tobytes()
