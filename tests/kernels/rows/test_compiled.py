"""Row transforms on a GPU: all dtypes and widths, hard rows, and what only compiled code can show."""

import pytest
import torch

import tamis
from kernels.rows.row_cases import KINDS, SPECIAL, close, gradients, losses, scores
from tamis.kernels.rows import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALPHAS = (0.5, 1.0, 1.0 + 1e-6, 1.05, 1.3, 1.5, 1.9, 2.0, 3.0)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (1, 2, 63, 100, 512, 1000, 4096, 4097, 8192, 8193, 32768, 50257, 131072)


def per_row(rows, low=1.0, high=2.0):
    return torch.linspace(low, high, rows, device="cuda").unsqueeze(-1)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("width", [1, 63, 512, 8191, 32768])
def test_hard_rows_equal_those_in_fp64(alpha, width):
    for kind in KINDS:
        z = scores(kind, 8, width).cuda()
        weights = tamis.entmax(z, alpha, backend="triton").double()
        exact = tamis.entmax(z.double(), alpha)
        assert (weights.sum(-1) - 1.0).abs().max() <= 1e-5, kind
        assert (weights - exact).abs().sum(-1).max() <= 1e-5, kind


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 2.5, "per row"])
def test_gradients_in_every_dtype_and_width(alpha, dtype, width):
    alpha = per_row(8) if alpha == "per row" else alpha
    z, g = scores("randn", 8, width).to("cuda", dtype), torch.randn(8, width).to("cuda", dtype)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # empty memory is then filled with NaN
    try:
        ours = gradients(z, alpha, g, dtype, "triton")
    finally:
        torch.use_deterministic_algorithms(before)
    close(ours, gradients(z, alpha, g, torch.float64, "reference"), dtype)


@pytest.mark.parametrize("width", [5, 1000, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0, 3.0, "per row"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_in_every_dtype(alpha, dtype, width, smoothing):
    alpha = per_row(16, 0.8, 2.4) if alpha == "per row" else alpha
    z, target = scores("randn", 16, width).to("cuda", dtype), torch.randint(width, (16,), device="cuda")
    target[3] = -100
    weight = torch.rand(width, device="cuda")
    options = {"label_smoothing": smoothing, "weight": weight}
    ours = losses(z, target, alpha, dtype, "triton", **options)
    close(ours, losses(z, target, alpha, torch.float64, "reference", **options), dtype)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("repeats", [1, 20, 3000])
def test_special_rows(alpha, repeats):
    z = SPECIAL.repeat(1, repeats).cuda()
    target = torch.zeros(len(z), dtype=torch.long, device="cuda")
    for run in (
        lambda backend: gradients(z, alpha, torch.ones_like(z), torch.float32, backend),
        lambda backend: losses(z, target, alpha, torch.float32, backend),
    ):
        torch.testing.assert_close(run("triton"), run("reference"), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("width", [100, 32768])
@pytest.mark.parametrize("alpha", [1.05, 1.5, "per row"])
def test_two_runs_are_equal_to_the_bit(alpha, width):
    alpha = per_row(64) if alpha == "per row" else alpha
    z, g = torch.randn(2, 64, width, device="cuda").unbind(0)
    target = torch.randint(width, (64,), device="cuda")
    for run in (
        lambda: gradients(z, alpha, g, torch.float32, "triton"),
        lambda: losses(z, target, alpha, torch.bfloat16, "triton"),
    ):
        for a, b in zip(run(), run(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("width", [100, 32768])
def test_nothing_waits_for_the_device(width):
    z = torch.randn(32, width, device="cuda", requires_grad=True)
    alpha = per_row(32).requires_grad_()
    target = torch.randint(width, (32,), device="cuda")

    def step():
        (tamis.entmax(z, alpha).square().sum() + tamis.entmax_loss(z, target, alpha)).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [64, 6000])
def test_compiled_kernels_are_reused_only_where_they_fit(width):
    """Rows that start at any multiple of four bytes, one or many of them, and numbers of one kind."""
    memory = torch.randn(17, width + 16, device="cuda")
    for first, rows, alpha in ((0, 16, 1.3), (0, 16, 1.4), (1, 16, 1.4), (3, 17, 1.4), (0, 1, 1.5), (1, 1, 2.5)):
        z = memory[:rows, first : first + width]
        target = torch.arange(rows, device="cuda")
        for _ in range(2):
            ours = gradients(z, alpha, z, torch.float32, "triton")
            close(ours, gradients(z, alpha, z, torch.float64, "reference"), torch.float32)
            ours = losses(z, target, alpha, torch.float32, "triton")
            close(ours, losses(z, target, alpha, torch.float64, "reference"), torch.float32)


def test_cuda_graph():
    z = torch.randn(16, 20000, device="cuda")
    tamis.entmax(z, 1.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights = tamis.entmax(z, 1.5)
    z.copy_(torch.randn_like(z))
    graph.replay()
    assert torch.equal(weights, tamis.entmax(z, 1.5))


def test_compile_whole_graph_with_dynamic_widths():
    alpha = torch.tensor([1.3], device="cuda", requires_grad=True)
    target = torch.tensor([1, 2, 3, 0], device="cuda")

    def value(z):
        weights = tamis.entmax(z * 2.0, alpha)
        return weights.square().sum() + tamis.entmax_loss(z, target, alpha)

    compiled = torch.compile(value, fullgraph=True, dynamic=True)
    for width in (40, 41, 20000):
        z = torch.randn(4, width, device="cuda", requires_grad=True)
        found = torch.autograd.grad(compiled(z), (z, alpha))
        torch.testing.assert_close(found, torch.autograd.grad(value(z), (z, alpha)), rtol=1e-4, atol=1e-5)


def test_auto_takes_the_kernel(monkeypatch):
    calls = []
    original = launch.solve
    monkeypatch.setattr(launch, "solve", lambda *a: calls.append(1) or original(*a))
    z = torch.randn(4, 100, device="cuda")
    tamis.entmax(z)
    tamis.entmax_loss(z, torch.zeros(4, dtype=torch.long, device="cuda"))
    assert calls == [1, 1]
    tamis.entmax(z.double())
    assert calls == [1, 1]


def test_the_loss_keeps_no_weights():
    z = torch.randn(4096, 32768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(32768, (4096,), device="cuda")
    tamis.entmax_loss(z[:8], target[:8])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = tamis.entmax_loss(z, target)
    assert torch.cuda.max_memory_allocated() - before < 0.1 * z.numel() * z.element_size()
    loss.backward()
