import pytest
import torch

from kernels.cases import SEED
from tamis.kernels import dispatch


@pytest.fixture
def known_dropout(monkeypatch):
    """Dropout whose factors the tests can compute."""

    def seed(dropout_p, generator, device):
        return torch.tensor([SEED], device=device) if dropout_p > 0.0 else None

    monkeypatch.setattr(dispatch, "_seed", seed)
