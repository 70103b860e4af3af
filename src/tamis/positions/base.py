"""What a position encoding may do.  Each overrides the one method it needs."""

from __future__ import annotations

from torch import Tensor, nn


class Position(nn.Module):
    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings (B, L, embed_dim) with what the positions (B or 1, L) add to them."""
        return x

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (B, H, L, head_dim), turned by their positions (B or 1, L)."""
        return x

    def slopes(self) -> Tensor | None:
        """ALiBi slopes (H,), 0 for heads without a bias; None where no head has one."""
        return None

    def scaled_heads(self) -> Tensor | None:
        """Which heads (H,) a length-aware scale applies to; None for all."""
        return None


class NoPE(Position):
    """No position information but the causal mask, Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466"""
