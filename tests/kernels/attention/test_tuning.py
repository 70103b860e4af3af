"""The sizes of tiles."""

import torch

from tamis.kernels.attention import tuning
from tamis.kernels.attention.arguments import Arguments


def test_other_gpus_take_tiles_that_fit_them(monkeypatch):
    x = torch.empty(1, 1, 2048, 128, dtype=torch.bfloat16)
    a = Arguments._make([x, x, x, *[None] * 10, "squares", 0.5, 0.0, 0.1, -1, 0, 0.0, False])
    assert tuning.query_tiles(a).stages == 3
    monkeypatch.setattr(tuning, "_is_hopper", lambda device: False)
    for tiles in (tuning.query_tiles(a), tuning.key_tiles(a), tuning.listed_tiles(a)):  # 99 KiB of shared memory
        assert (tiles.rows, tiles.stages, tiles.held) == (64, 2, 0)
    assert tuning.scan_tiles(a).held == 0
