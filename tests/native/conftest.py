"""What tests of the C++ kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def threads() -> Iterator[None]:
    """A test that sets the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
