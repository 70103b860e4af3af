"""Tamis: Transformers whose attention puts exact zeros on what does not matter."""

from tamis import distributions, functional, mechanisms, nn
from tamis.functional import (
    budgetmax,
    entmax,
    entmax15,
    entmax_loss,
    entmax_threshold,
    normmax,
    normmax_loss,
    sparsemax,
    sparsemax_loss,
)
from tamis.version import __version__

__all__ = [
    "__version__",
    "budgetmax",
    "distributions",
    "entmax",
    "entmax15",
    "entmax_loss",
    "entmax_threshold",
    "functional",
    "mechanisms",
    "nn",
    "normmax",
    "normmax_loss",
    "sparsemax",
    "sparsemax_loss",
]
