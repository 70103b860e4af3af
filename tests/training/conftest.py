import pytest

from training import tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tiny.prepared(tmp_path_factory.mktemp("tiny"))
