"""The transforms on a CUDA device: the same contract as on the CPU."""

import pytest
import torch

import tamis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALPHAS = (0.5, 1.0, 1.0 + 1e-6, 1.05, 1.3, 1.5, 2.0, 3.0)


def rows(width: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    z = torch.randn(32, width, generator=generator)
    return {
        "randn": z,
        "small": 1e-6 * z,
        "large": 1e4 * z,
        "equal": torch.full_like(z, 0.3),
        "one above": torch.where(torch.arange(width) == 0, 0.0, -0.9).expand_as(z),
        "ties": z.round(),
    }[kind]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("width", [1, 63, 512, 8191, 131072])
@pytest.mark.parametrize("kind", ["randn", "small", "large", "equal", "one above", "ties"])
def test_weights_equal_those_in_fp64(alpha, width, kind):
    z = rows(width, kind)
    weights = tamis.entmax(z.cuda(), alpha).double().cpu()
    assert (weights.sum(-1) - 1).abs().max() <= 1e-5
    assert (weights - tamis.entmax(z.double(), alpha)).abs().sum(-1).max() <= 1e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_equal_those_in_fp64(alpha):
    z, upstream = torch.randn(2, 64, 300, generator=torch.Generator().manual_seed(0))
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        leaf = z.to(device, dtype).requires_grad_()
        power = torch.full((1,), alpha, dtype=torch.float64, device=device, requires_grad=True)
        grads = torch.autograd.grad(tamis.entmax(leaf, power), (leaf, power), upstream.to(device, dtype))
        results.append([grad.double().cpu() for grad in grads])
    for ours, reference in zip(*results, strict=True):
        assert (ours - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_fp32_weights(dtype):
    z = rows(1000, "randn").to(dtype).cuda()
    assert torch.equal(tamis.entmax(z, 1.5), tamis.entmax(z.float(), 1.5).to(dtype))


def test_special_rows():
    inf = float("inf")
    z = torch.tensor([[-inf, -inf], [inf, 0.0], [float("nan"), 1.0], [1.0, -inf]], device="cuda", requires_grad=True)
    weights = tamis.entmax(z, 1.5)
    assert weights[[0, 1, 3]].tolist() == [[0, 0], [1, 0], [1, 0]]
    assert weights[2].isnan().all()
    weights[[0, 1, 3]].square().sum().backward()
    assert z.grad[[0, 1, 3]].abs().max() <= 1e-6


def test_compiles_without_graph_breaks():
    @torch.compile(fullgraph=True, dynamic=True)
    def loss(scores, alpha):
        return tamis.entmax(scores, alpha).square().sum()

    alpha = torch.tensor([1.3, 1.7], device="cuda", requires_grad=True)
    for length in (17, 33):
        z = torch.randn(3, 2, length, length, device="cuda", requires_grad=True)
        compiled = torch.autograd.grad(loss(z, alpha), (z, alpha))
        eager = torch.autograd.grad(tamis.entmax(z, alpha).square().sum(), (z, alpha))
        for one, other in zip(compiled, eager, strict=True):
            torch.testing.assert_close(one, other)


def test_losses_and_relatives():
    z = rows(100, "randn").cuda().requires_grad_()
    target = torch.arange(32, device="cuda")
    for value in (
        tamis.entmax_loss(z, target, 1.5),
        tamis.normmax_loss(z, target, 2.0),
        tamis.normmax(z).square().sum(),
        tamis.budgetmax(z, 3.0).square().sum(),
    ):
        (grad,) = torch.autograd.grad(value, z)
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0
