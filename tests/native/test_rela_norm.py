"""The norm of ReLA in C++ against its plain operations in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.kernels.rela_norm import ops
from tamis.mechanisms.rela import EPSILON, ReLANorm, plain_norm
from tamis.native import library, rela_norm

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"C++ kernels are {library.status()}")
VARIANTS = {"g": (True, True), "i": (True, False), "rms": (False, False)}


def drawn(rows: int, width: int, variant: str, scale: float = 1.0) -> tuple[list[Tensor | None], Tensor]:
    """z with a null row, gain and gate where the variant has them, and what comes back."""
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    z = torch.randn(rows, width, generator=generator).relu() * scale
    z[:1] = 0.0
    given = [torch.randn(width, generator=generator) if has else None for has in VARIANTS[variant]]
    return [z, *given], torch.randn(rows, width, generator=generator)


def native(z: Tensor, gain: Tensor | None, gate: Tensor | None) -> Tensor:
    return ops.rela_norm(z, gain, gate, EPSILON, plain_norm, ops.NATIVE)


def results(norm: Any, given: list[Tensor | None], dy: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in given]
    y = norm(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [x for x in leaves if x is not None], dy.to(dtype))]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 100.0])
@pytest.mark.parametrize("shape", [(2, 2), (5, 16), (33, 17), (67, 24), (100, 128), (3, 1000), (4000, 8)], ids=str)
def test_agrees_with_plain_operations(shape: tuple[int, int], scale: float, variant: str) -> None:
    given, dy = drawn(*shape, variant, scale)
    wanted = results(plain_norm, given, dy, torch.float64)
    # Of few channels little is left of d z: what comes back through a fixed scale, less what the norm takes of that.
    through = results(lambda *x: plain_norm(*x, mean=_fixed_mean), given, dy, torch.float64)
    for name, ours, exact, larger in zip("yzgw", results(native, given, dy), wanted, through, strict=False):
        size = max(exact.norm(), larger.norm() if name == "z" else 0.0)
        assert (ours - exact).norm() <= 1e-6 * size + 1e-12


def _fixed_mean(z: Tensor) -> Tensor:
    return z.mean(-1, keepdim=True).detach()


def test_a_null_row_gives_and_passes_nothing() -> None:
    given, dy = drawn(5, 24, "g")
    dy[0] = float("inf")
    y, *gradients = results(native, given, dy)
    assert (y[0] == 0.0).all()
    assert (gradients[0][0] == 0.0).all()
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("where", ["z", "gain", "gate"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_shows_where_it_does_in_plain_operations(where: str, value: float) -> None:
    given, _ = drawn(4, 20, "g")
    at = given[("z", "gain", "gate").index(where)]
    assert at is not None
    at[..., 3] = value
    torch.testing.assert_close(native(*given), plain_norm(*given), equal_nan=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)], ids=str)
def test_empty_inputs(shape: tuple[int, int]) -> None:
    y, dz, dgain, dgate = results(native, [torch.ones(shape), *torch.ones(2, shape[1])], torch.ones(shape))
    assert y.shape == dz.shape == shape
    assert (dgain == 0.0).all()
    assert (dgate == 0.0).all()


def test_strides_are_minded() -> None:
    z, gains, dy = torch.randn(32, 6).t(), torch.randn(32, 3), torch.randn(6, 1).expand(6, 32)
    given = [z, gains[:, 1], torch.full((1,), 0.5).expand(32)]
    for ours, plain in zip(results(native, given, dy), results(plain_norm, given, dy), strict=True):
        torch.testing.assert_close(ours, plain)


def test_threads_change_no_bit(threads: None) -> None:
    found = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(results(native, *drawn(1000, 40, "g")))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_layers_take_it_and_leave_the_rest_to_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, z = ReLANorm(24, 8), torch.randn(5, 24)
    assert ops.worker(z) is ops.NATIVE
    assert ops.worker(z.double()) is None
    assert "fp32" in str(rela_norm.obstacle(z.double()))
    torch.func.vmap(lambda row: [row, _assert_plain(row)][0])(z)
    with torch.autograd.forward_ad.dual_level():
        _assert_plain(z)
    torch.compile(lambda x: [norm(x), _assert_plain(x)][0], backend="eager", fullgraph=True)(z)
    torch.testing.assert_close(norm(z), plain_norm(z, norm.gain, norm.gate))
    monkeypatch.setattr(library, "missing", lambda: "none were built")
    assert "none were built" in str(rela_norm.obstacle(z))
    _assert_plain(z)


def _assert_plain(z: Tensor) -> None:
    assert ops.worker(z) is None


def test_second_and_batched_derivatives_take_the_plain_operations() -> None:
    given, dy = drawn(3, 24, "g")
    leaves = [x.requires_grad_() for x in given if x is not None]

    def penalty(norm: Any) -> Any:
        y = norm(*leaves)
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        return torch.autograd.grad(y.square().sum() + sum(x.square().sum() for x in first), leaves)

    for ours, plain in zip(penalty(native), penalty(plain_norm), strict=True):
        torch.testing.assert_close(ours, plain)
    many = torch.randn(4, 3, 24)
    found = torch.autograd.grad(native(*leaves), leaves, many, is_grads_batched=True)
    for i, one in enumerate(many):
        for ours, plain in zip(found, torch.autograd.grad(plain_norm(*leaves), leaves, one), strict=True):
            torch.testing.assert_close(ours[i], plain)
