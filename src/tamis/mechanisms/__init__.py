"""Attention mechanisms, one paper per file."""

from tamis.mechanisms.entmax import LearnedAlpha

__all__ = ["LearnedAlpha"]
