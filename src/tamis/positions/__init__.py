"""Position encodings, one per file: added to the embeddings, rotated into queries and keys, or a bias of the scores."""

from tamis.positions.alibi import ALiBi
from tamis.positions.base import NoPE, Position, position_rows
from tamis.positions.learned import LearnedPositions
from tamis.positions.nape import NAPE
from tamis.positions.registry import POSITIONS, build_position
from tamis.positions.rope import RoPE
from tamis.positions.sinusoidal import Sinusoidal

__all__ = [
    "NAPE",
    "POSITIONS",
    "ALiBi",
    "LearnedPositions",
    "NoPE",
    "Position",
    "RoPE",
    "Sinusoidal",
    "build_position",
    "position_rows",
]
