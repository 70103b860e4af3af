import pytest
import torch

from training import tiny


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes that tests start: another number of threads adds up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tiny.prepared(tmp_path_factory.mktemp("tiny"))
