"""How lengths are cut into blocks, worked out on the host."""

from __future__ import annotations


def ceil_div(n: int, size: int) -> int:
    """How many blocks of a size n takes.  Triton's own takes the host six microseconds, and a launch needs many."""
    return -(-n // size)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def power_of_two(n: int) -> int:
    """The width of a block that holds n; products need 16."""
    return max(16, next_power_of_two(n))
