"""Every test of the transforms runs twice: by the C++ kernels, where they apply, and by plain torch."""

import pytest

from tamis.native import library


@pytest.fixture(params=["native", "plain"], autouse=True)
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(library, "missing", _missing)
    elif library.missing() is not None:
        pytest.skip(library.missing())
    return request.param


def _missing():
    return "plain torch is to be tested"


_missing._dynamo_marked_constant = True
