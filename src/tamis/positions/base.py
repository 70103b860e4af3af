"""What a position encoding may do.  Each overrides the one method it needs."""

from __future__ import annotations

from torch import Tensor, nn

from tamis.functional.sharding import Heads


class Position(nn.Module):
    """Positions are (L,), or (B or 1, L); `position_rows` brings them to the second form."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings (B, L, embed_dim) with what the positions add to them."""
        return x

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (B, H, L, head_dim), turned by their positions."""
        return x

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are turned at all."""
        return type(self).rotate is not Position.rotate

    @property
    def inside(self) -> bool:
        """Whether it acts inside attention, on queries, keys or scores; else on embeddings, which is a model's work."""
        return self.rotates or self.slopes() is not None

    def slopes(self) -> Tensor | None:
        """ALiBi slopes (H,), 0 for heads without a bias; None where no head has one."""
        return None

    def scaled_heads(self) -> Tensor | None:
        """Which heads (H,) a length-aware scale applies to; None for all."""
        return None

    def split_heads(self, heads: Heads) -> None:
        """Become the encoding of some of the heads, for tensor parallelism; one with slopes must define it."""
        if self.slopes() is not None:
            raise NotImplementedError(f"{type(self).__name__} must define split_heads() to be divided by heads")

    def check_layer(self, num_heads: int, head_dim: int) -> None:
        """Raise unless this encoding was built for a layer of these sizes: layers ask when they are built."""
        slopes = self.slopes()
        if slopes is not None and slopes.shape[-1] != num_heads:
            built = f"{type(self).__name__} was built for num_heads={slopes.shape[-1]}"
            raise ValueError(f"{built}, but the layer has {num_heads}")


class NoPE(Position):
    """No position information but the causal mask, Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466"""

    def __init__(self) -> None:
        super().__init__()


def position_rows(positions: Tensor, batch: int, length: int) -> Tensor:
    """Bring positions (L,) or (B or 1, L) to the form (B or 1, L).

    Args:
        positions: of tokens, in one of these forms.
        batch, length: B and L, which are checked.

    Returns:
        positions (B or 1, L).
    """
    rows = positions[None] if positions.ndim == 1 else positions
    if rows.ndim != 2 or not (rows.shape[0] == 1 or rows.shape[0] == batch) or rows.shape[1] != length:
        shape = tuple(positions.shape)
        raise ValueError(f"positions must be ({length},), (1, {length}) or ({batch}, {length}), got {shape}")
    return rows
