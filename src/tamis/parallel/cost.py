"""What the ways of sharing a sequence send, in bytes by each process for one attention layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Sizes of one attention layer and of the sequence that `size` processes share."""

    length: int
    size: int
    heads: int
    key_heads: int
    head_dim: int
    bytes: int = 2
    """Bytes of a number."""

    def sent(self, way: str, trains: bool) -> int:
        """By "heads" or "keys", forward, or forward and backward."""
        own = self.length // self.size * self.head_dim * self.bytes  # of one head
        others = self.size - 1
        if way == "heads":
            # Queries, keys, values and outputs to everybody his part; their gradients back.
            return (2 if trains else 1) * 2 * (self.heads + self.key_heads) * own // self.size * others
        # Keys and values to everybody; gathered again for the gradients, which go back.
        return (3 if trains else 1) * 2 * self.key_heads * own * others

    def held(self, way: str) -> int:
        """Bytes of queries, keys, values and outputs that lie in one process while it computes."""
        own = self.length // self.size * self.head_dim * self.bytes
        keys = self.key_heads * (1 if way == "heads" else self.size)
        return 2 * (self.heads + keys) * own

    def cheaper(self, trains: bool) -> str:
        """The way that sends less; "heads" needs heads that divide."""
        fits = self.key_heads % self.size == 0
        return "heads" if fits and self.sent("heads", trains) <= self.sent("keys", trains) else "keys"
