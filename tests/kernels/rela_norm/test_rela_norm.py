"""The fused norm of ReLA against its plain operations: in Triton's interpreter, and compiled where there is a GPU."""

import pytest
import torch

from tamis.kernels.rela_norm import ops
from tamis.mechanisms.rela import EPSILON, ReLANorm, plain_norm

pytest.importorskip("triton")
from tamis.kernels.rela_norm.ops import rela_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)


def inputs(shape, dtype, variant):
    norm = ReLANorm(shape[-1], shape[-1] // 2, variant).to(DEVICE)
    z = torch.randn(shape, device=DEVICE).relu().to(dtype)
    z[..., 0, :] = 0.0  # a null row
    return norm, z.requires_grad_(), torch.randn(shape, device=DEVICE).to(dtype)


def exact(norm, z, grad):
    """In fp64, by the plain operations."""
    wide = ReLANorm(norm.embed_dim, norm.head_dim, norm.variant).to(DEVICE)
    for mine, other in zip(wide.parameters(), norm.parameters(), strict=True):
        mine.data = other.data.double()
    z = z.detach().double().requires_grad_()
    y = wide(z)
    return [y, *torch.autograd.grad(y, (z, *wide.parameters()), grad.double())]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", ["g", "i", "rms"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (5, 67, 24), (2, 3, 2500), (9, 999, 512)], ids=str)
def test_compiled_agrees_with_plain_operations(shape, variant, dtype):
    agrees(shape, variant, dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("variant", ["g", "i", "rms"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (5, 67, 24)], ids=str)  # of the last three programs share the rows
def test_interpreted_agrees_with_plain_operations(shape, variant, dtype):
    agrees(shape, variant, dtype)


def agrees(shape, variant, dtype):
    norm, z, grad = inputs(shape, dtype, variant)
    y = rela_norm(z, norm.gain, norm.gate, EPSILON, plain_norm)
    assert y.dtype == dtype
    found = [y, *torch.autograd.grad(y, (z, *norm.parameters()), grad)]
    reference = exact(norm, z, grad)
    eps = torch.finfo(dtype).eps
    for ours, wanted in zip(found[:2], reference[:2], strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2 * eps, atol=2 * eps * wanted.abs().max().item())
    for ours, wanted in zip(found[2:], reference[2:], strict=True):  # sums in fp32, whatever comes in
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
    assert (found[0][..., 0, :] == 0.0).all()
    assert (found[1][..., 0, :] == 0.0).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
def test_no_rows():
    z = torch.empty(0, 16, requires_grad=True)
    gain = torch.ones(16, requires_grad=True)
    y = rela_norm(z, gain, None, EPSILON, plain_norm)
    dz, dgain = torch.autograd.grad(y, (z, gain), torch.empty(0, 16))
    assert y.shape == dz.shape == (0, 16)
    assert (dgain == 0.0).all()


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
def test_plain_operations_where_no_kernel_runs(monkeypatch):
    z = torch.ones(2, 8)
    assert "torch.float64" in ops.obstacle(z.double())
    assert "8192 channels, got 8193" in ops.obstacle(torch.ones(1, ops.MAX_CHANNELS + 1))
    torch.func.vmap(lambda row: check("torch.func", row))(z)
    with torch.autograd.forward_ad.dual_level():
        check("forward-mode", z)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "CUDA" in ops.obstacle(z)


def check(words, z):
    assert words in ops.obstacle(z)
    return z


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
@pytest.mark.parametrize("variant", ["g", "i", "rms"])
def test_operations_are_registered_as_torch_expects(variant):
    norm, z, grad = inputs((2, 3, 24), torch.float32, variant)
    parts = [None if x is None else x.detach() for x in (norm.gain, norm.gate)]
    arguments = (z.detach(), *parts, EPSILON)
    torch.library.opcheck(ops.norm_forward, arguments)
    torch.library.opcheck(ops.norm_backward, (*arguments, grad))


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
def test_strides_are_minded():
    z, gains, dy = torch.randn(32, 6).t(), torch.randn(32, 3), torch.randn(6, 1).expand(6, 32)
    gain, gate = gains[:, 1], torch.full((1,), 0.5).expand(32)
    leaves = [x.detach().requires_grad_() for x in (z, gain, gate)]
    assert not leaves[0].is_contiguous()
    found = rela_norm(*leaves, EPSILON, plain_norm)
    wanted = plain_norm(*leaves)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(ops.norm_forward(z, gain, gate, EPSILON), wanted)
    for ours, plain in zip(
        torch.autograd.grad(found, leaves, dy), torch.autograd.grad(wanted, leaves, dy), strict=True
    ):
        torch.testing.assert_close(ours, plain)


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
def test_second_derivatives_take_the_plain_operations():
    norm, z, grad = inputs((3, 24), torch.float32, "g")
    leaves = (z, *norm.parameters())

    def penalty(norm_of):
        y = norm_of(*leaves)
        first = torch.autograd.grad(y, leaves, grad, create_graph=True)
        return torch.autograd.grad(y.square().sum() + sum(x.square().sum() for x in first), leaves)

    for ours, plain in zip(penalty(lambda *x: rela_norm(*x, EPSILON, plain_norm)), penalty(plain_norm), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_whatever_comes_back_to_a_null_row_stays_there(value):
    norm, z, grad = inputs((5, 24), torch.float32, "g")
    grad[0] = value  # the null row
    y = rela_norm(z, norm.gain, norm.gate, EPSILON, plain_norm)
    dz, dgain, dgate = torch.autograd.grad(y, (z, norm.gain, norm.gate), grad)
    assert (dz[0] == 0.0).all()
    assert all(x.isfinite().all() for x in (dz, dgain, dgate))


@pytest.mark.skipif(DEVICE == "cuda", reason="runs compiled")
@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_what_needs_no_gradient_gets_none(needed):
    norm, z, grad = inputs((5, 24), torch.float32, "g")
    leaves = [x.detach().requires_grad_(own) for x, own in zip((z, norm.gain, norm.gate), needed, strict=True)]
    rela_norm(*leaves, EPSILON, plain_norm).backward(grad)
    assert tuple(x.grad is not None for x in leaves) == needed


def test_compiled_it_gives_the_same_to_the_bit():
    norm, z, grad = inputs((4, 5, 64), torch.float32, "g")
    leaves = (z, *norm.parameters())

    def run(norm_of):
        y = norm_of(z, norm.gain, norm.gate, EPSILON, plain_norm)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    for ours, eager in zip(run(torch.compile(rela_norm, fullgraph=True, backend=backend)), run(rela_norm), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.gpu
def test_the_layer_takes_the_kernel_unless_it_cannot():
    z = torch.randn(4, 64, device="cuda")
    assert ops.obstacle(z) is None
    norm = ReLANorm(64, 16).cuda()
    torch.testing.assert_close(norm(z), torch.compile(norm, fullgraph=True)(z))
    tangent = torch.randn_like(z)
    exact = torch.func.jvp(norm.double(), (z.double(),), (tangent.double(),))[1]
    torch.testing.assert_close(torch.func.jvp(norm.float(), (z,), (tangent,))[1].double(), exact, rtol=1e-5, atol=1e-5)
