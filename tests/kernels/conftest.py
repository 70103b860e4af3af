import pytest
import torch

from kernels.cases import SEED
from tamis.kernels import arguments, dispatch


@pytest.fixture
def known_dropout(monkeypatch):
    """Dropout whose factors the tests can compute."""

    def seed(dropout_p, generator, device):
        return torch.tensor([SEED], device=device) if dropout_p > 0.0 else None

    monkeypatch.setattr(dispatch, "_seed", seed)


@pytest.fixture
def everything_is_long(monkeypatch):
    """Tiles without weights are found and skipped in rows of any length."""
    from tamis.kernels import launch

    monkeypatch.setattr(arguments, "LONG", 1)
    monkeypatch.setattr(launch, "scan_programs", lambda: 3)
    launch._plans.clear()
    yield
    launch._plans.clear()


@pytest.fixture
def everything_is_decoding(monkeypatch):
    """Few queries take the kernels for decoding whatever the number of keys, which are split into many parts."""
    from tamis.kernels import launch, launch_decode

    monkeypatch.setattr(arguments, "MANY", 1)
    monkeypatch.setattr(launch_decode, "SPANS", (64, 64))
    launch._plans.clear()
    yield
    launch._plans.clear()
