"""Packed products of every build that runs here: exact in int8, and as torch has them in fp32."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tamis.native import library, product
from tamis.native.product import Packed

pytestmark = pytest.mark.skipif(product.obstacle() is not None, reason=str(product.obstacle()))


@pytest.fixture(params=library.status().built)
def build(request: Any, monkeypatch: Any):
    """The products of one build."""
    try:
        native: ctypes.CDLL = library._open(request.param, library.status().built)[1]
    except library._UnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(library, "load", lambda: native)
    product.functions.cache_clear()
    yield request.param
    product.functions.cache_clear()


SIZES = [(1, 1, 1), (5, 64, 16), (7, 63, 65), (13, 100, 33), (97, 37, 130), (0, 8, 8)]
"""Rows, inputs, outputs."""


@pytest.mark.parametrize("size", SIZES)
def test_fp32(build: str, size: tuple[int, int, int]):
    rows, inputs, outputs = size
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    expected = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(Packed(weight, bias)(x).double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(Packed(weight)(x, "relu").double(), (expected - bias).relu(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_int8_is_exact(build: str, size: tuple[int, int, int]):
    """Integers whose largest is 127 in each row are their own quantisation."""
    rows, inputs, outputs = size
    x = torch.randint(-127, 128, (rows, inputs)).float()
    weight = torch.randint(-127, 128, (outputs, inputs)).float()
    x[:, 0] = 127.0
    weight[:, -1] = -127.0
    found = Packed(weight, precision="int8")(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=0.0, rtol=1e-6)


def test_int8_scales_rows_and_outputs(build: str):
    x, weight = torch.randn(9, 200), torch.randn(70, 200)
    x, weight = x * torch.logspace(-6, 6, 9)[:, None], weight * torch.logspace(-6, 6, 70)[:, None]
    x[3] = 0.0
    found, expected = Packed(weight, precision="int8")(x), F.linear(x, weight)
    size = x.norm(dim=1)[:, None] * weight.norm(dim=1)
    assert ((found - expected).abs() <= 0.01 * size).all()


@pytest.mark.parametrize("size", SIZES)
def test_bf16(build: str, size: tuple[int, int, int]):
    rows, inputs, outputs = size
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    expected = F.linear(x.double(), weight.double())
    found = Packed(weight.float(), precision="bf16")(x.float())
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("precision", product.PRECISIONS)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_row_alone(build: str, precision: str, strange: float):
    x = torch.randn(8, 40)
    x[2, 3] = strange
    found = Packed(torch.randn(30, 40), precision=precision)(x)
    assert not found[2].isfinite().any()
    assert found[[0, 1, 3, 4, 5, 6, 7]].isfinite().all()


@pytest.mark.parametrize("precision", product.PRECISIONS)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_spoils_its_output_alone(build: str, precision: str, strange: float):
    weight = torch.randn(30, 40)
    weight[2, 3] = strange
    found = Packed(weight, precision=precision)(torch.randn(8, 40))
    assert not found[:, 2].isfinite().any()
    assert found[:, 3:].isfinite().all()


def test_without_inputs_there_is_no_product():
    with pytest.raises(ValueError, match=r"a product needs inputs, got weights of shape \(3, 0\)"):
        Packed(torch.empty(3, 0), precision="int8")


@pytest.mark.parametrize("function", ["gelu", "silu"])
def test_functions(build: str, function: str):
    x = torch.linspace(-30, 30, 4001)[:, None]
    expected = getattr(F, function)(x.double())
    torch.testing.assert_close(Packed(torch.ones(1, 1))(x, function).double(), expected, atol=1e-6, rtol=1e-6)
