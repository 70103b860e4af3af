"""Modules: the functions of tamis as `torch.nn` citizens."""

from tamis.mechanisms.entmax import LearnedAlpha
from tamis.nn.losses import EntmaxLoss, NormmaxLoss, SparsemaxLoss
from tamis.nn.transforms import Budgetmax, Entmax, Entmax15, Normmax, Sparsemax

__all__ = [
    "Budgetmax",
    "Entmax",
    "Entmax15",
    "EntmaxLoss",
    "LearnedAlpha",
    "Normmax",
    "NormmaxLoss",
    "Sparsemax",
    "SparsemaxLoss",
]
