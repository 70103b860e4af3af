import pytest
import torch

from kernels.cases import SEED
from tamis.kernels import dispatch
from tamis.kernels.attention import arguments


@pytest.fixture
def known_dropout(monkeypatch):
    """Dropout whose factors the tests can compute."""

    def seed(dropout, device):
        return torch.tensor([SEED], device=device) if dropout.p > 0.0 else None

    monkeypatch.setattr(dispatch, "_seed", seed)


@pytest.fixture
def everything_is_long(monkeypatch):
    """Tiles without weights are found and skipped in rows of any length."""
    from tamis.kernels.attention import tuning
    from tamis.kernels.runtime.launch import plans

    monkeypatch.setattr(arguments, "LONG", 1)
    monkeypatch.setattr(tuning, "scan_programs", lambda: 3)
    plans.clear()
    yield
    plans.clear()


@pytest.fixture
def everything_is_decoding(monkeypatch):
    """Few queries take the kernels for decoding whatever the number of keys, which are split into many parts."""
    from tamis.kernels.decode import launch
    from tamis.kernels.runtime.launch import plans

    monkeypatch.setattr(arguments, "MANY", 1)
    monkeypatch.setattr(launch, "SPANS", (64, 64))
    plans.clear()
    yield
    plans.clear()
