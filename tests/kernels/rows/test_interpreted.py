"""Row transforms in Triton's interpreter, those of wide rows too: with a limit so low that narrow rows are wide."""

import pytest
import torch

import tamis
from kernels.rows.row_cases import KINDS, SPECIAL, close, gradients, losses, scores

pytest.importorskip("triton")
from tamis.kernels.rows import launch, ops
from tamis.kernels.runtime.launch import plans

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs compiled in test_compiled.py"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

ALPHAS = (0.5, 1.0 + 1e-6, 1.05, 1.3, 1.5, 2.0, 3.0)
PER_ROW = torch.tensor([0.6, 1.0, 1.0001, 1.1, 1.3, 1.5, 2.0, 2.5]).unsqueeze(-1)


@pytest.fixture(params=["resident", "streamed"])
def way(request, monkeypatch):
    """How rows are solved."""
    if request.param == "streamed":
        for name, value in {"RESIDENT": 0, "RESIDENT_BACKWARD": 0, "LINES": 4, "LINE": 16, "BLOCK": 64}.items():
            monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(launch, "TILE", 512)  # several tiles of narrow rows
    plans.clear()
    yield request.param
    plans.clear()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_weights_equal_those_in_fp64(alpha, way):
    z = torch.cat([scores(kind, 1, 150) for kind in KINDS])
    weights = tamis.entmax(z, alpha, backend="triton").double()
    exact = tamis.entmax(z.double(), alpha)
    for kind, ours, truth in zip(KINDS, weights, exact, strict=True):
        assert abs(ours.sum() - 1.0) <= 1e-6, kind
        assert (ours - truth).abs().sum() <= 2e-6, kind


@pytest.mark.parametrize("width", [1, 16, 63, 300])
@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.5])
def test_widths(alpha, width, way):
    z, g = scores("randn", 2, width), torch.randn(2, width)
    ours = gradients(z, alpha, g, torch.float32, "triton")
    exact = gradients(z, alpha, g, torch.float64, "reference")
    assert (ours[0] - exact[0]).abs().sum(-1).max() <= 2e-6
    torch.testing.assert_close(ours[1].double(), exact[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.5, 2.0, "per row"])
def test_gradients_equal_those_in_fp64(alpha, dtype, way):
    alpha = PER_ROW if alpha == "per row" else alpha
    rows = 8 if torch.is_tensor(alpha) else 2
    z, g = scores("randn", rows, 100).to(dtype), (torch.randn(rows, 100) + 2.0).to(dtype)
    close(gradients(z, alpha, g, dtype, "triton"), gradients(z, alpha, g, torch.float64, "reference"), dtype)


def test_scores_without_weight_get_no_gradient(way):
    z, g = scores("masked", 4, 100), torch.full((4, 100), torch.nan)
    weights = tamis.entmax(z, 1.5, backend="reference")
    g = torch.where(weights > 0.0, 1.0, g)
    (dz,) = gradients(z, 1.5, g, torch.float32, "triton")[1:]
    assert (dz[weights == 0.0] == 0.0).all()


@pytest.mark.parametrize("shape", [(), (2, 1, 1), (3, 1), (2, 3, 1)])
def test_shapes_of_alpha(shape):
    alpha = torch.linspace(1.1, 1.9, max(1, torch.Size(shape).numel())).view(shape)
    z, g = torch.randn(2, 2, 3, 40).unbind(0)
    close(
        gradients(z, alpha, g, torch.float32, "triton"),
        gradients(z, alpha, g, torch.float64, "reference"),
        torch.float32,
    )


def test_one_alpha_per_head():
    alpha = torch.tensor([1.0, 1.5, 1.8])
    z, g = torch.randn(2, 2, 3, 6, 20).unbind(0)
    close(
        gradients(z, alpha, g, torch.float32, "triton"),
        gradients(z, alpha, g, torch.float64, "reference"),
        torch.float32,
    )


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (1, 3, 1, 1), (1, 1, 3, 1), (2, 3, 3, 1)])
def test_alphas_in_any_order(shape):
    alpha = torch.linspace(1.1, 2.3, torch.Size(shape).numel()).view(shape)
    z, g = torch.randn(2, 2, 3, 3, 20).unbind(0)
    close(
        gradients(z, alpha, g, torch.float32, "triton"),
        gradients(z, alpha, g, torch.float64, "reference"),
        torch.float32,
    )
    target = torch.randint(20, (2, 3, 3))
    ours, plain = (
        tamis.entmax_loss(z.movedim(-1, 1), target, alpha.movedim(-1, 1), backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(ours, plain)


def test_one_plan_for_all_numbers_of_a_kind():
    z, target = torch.randn(4, 20), torch.tensor([1, 2, 3, 4])
    for alpha in (1.3, 1.4, 2.5, 3.5):
        ours, plain = (gradients(z, alpha, z, torch.float32, backend) for backend in ("triton", "reference"))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
        ours, plain = (losses(z, target, alpha, torch.float32, backend) for backend in ("triton", "reference"))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_alphas_beyond_what_fp32_can_tell():
    alpha = torch.tensor([[1e-9], [1.5], [3e38]])
    z, g = torch.randn(2, 3, 20).unbind(0)
    ours, plain = (gradients(z, alpha, g, torch.float32, backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert (ours[2][[0, 2]] == 0.0).all()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dim_and_mask_and_strides(dim, way):
    z = torch.randn(4, 5, 12).mT
    mask = torch.rand(z.shape) > 0.3
    ours = tamis.entmax(z, 1.5, dim, mask=mask, backend="triton")
    torch.testing.assert_close(ours, tamis.entmax(z, 1.5, dim, mask=mask), rtol=1e-5, atol=1e-6)
    wide = torch.randn(4, 40)[:, ::2]
    torch.testing.assert_close(tamis.sparsemax(wide, backend="triton"), tamis.sparsemax(wide), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tamis.entmax15(wide, backend="triton"), tamis.entmax15(wide), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.5, 1.3, 1.5, 2.0, 3.0])
def test_special_rows(alpha, way):
    z = SPECIAL.repeat(1, 18)
    plain, ours = (
        gradients(z, alpha, torch.ones_like(z), torch.float32, backend) for backend in ("reference", "triton")
    )
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert (ours[0][0] == 0.0).all()
    assert ours[0][2:4].isnan().all()
    assert (ours[1][:2] == 0.0).all()


def test_bad_alpha_shows(way):
    alpha = torch.tensor([[1.5], [float("nan")], [-1.0]])
    z = torch.randn(3, 40)
    weights = ops.weights(z, alpha - 1.0)
    assert weights[0].isfinite().all()
    assert weights[1:].isnan().all()


def test_no_rows_and_no_scores():
    for shape in ((0, 5), (3, 0), (0, 0)):
        z = torch.randn(shape, requires_grad=True)
        weights = tamis.entmax(z, 1.5, backend="triton")
        (grad,) = torch.autograd.grad(weights.sum(), z)
        assert weights.shape == grad.shape == shape


CLASSES = 90
WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3))
WEIGHT[4] = 0.0
OPTIONS = [{}, {"weight": WEIGHT}, {"label_smoothing": 0.1}, {"weight": WEIGHT, "label_smoothing": 0.1}]


def targets(rows):
    target = torch.randint(CLASSES, (rows,))
    target[1] = -100
    return target


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("alpha", [1.5, "per row"])
def test_loss_of_classes(alpha, options, way):
    alpha = PER_ROW if alpha == "per row" else alpha
    rows = 8 if torch.is_tensor(alpha) else 3
    z, target = scores("offset", rows, CLASSES), targets(rows)
    ours = losses(z, target, alpha, torch.float32, "triton", **options)
    close(ours, losses(z, target, alpha, torch.float64, "reference", **options), torch.float32)
    assert ours[0][1] == 0.0
    assert (ours[1][1] == 0.0).all()


@pytest.mark.parametrize("alpha", [1.5, PER_ROW], ids=["number", "per row"])
def test_loss_of_probabilities(alpha, way):
    z, target = scores("randn", 8, CLASSES), torch.randn(8, CLASSES).softmax(-1)
    ours = losses(z, target, alpha, torch.float32, "triton", label_smoothing=0.1)
    close(ours, losses(z, target, alpha, torch.float64, "reference", label_smoothing=0.1), torch.float32)


@pytest.mark.parametrize("alpha", [1.3, 2.0, 3.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_of_special_rows(alpha, smoothing, way):
    z = SPECIAL.repeat(1, 18)
    target = torch.tensor([0, 0, 0, 0, 0, 3])
    plain, ours = (
        losses(z, target, alpha, torch.float32, backend, label_smoothing=smoothing)
        for backend in ("reference", "triton")
    )
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_loss_is_exactly_zero_beyond_the_margin(way):
    z = torch.randn(2, 60)
    z[:, 7] = 9.0
    for alpha in (1.5, 1.3, 2.0):
        ours = losses(z, torch.full((2,), 7), alpha, torch.float32, "triton")
        assert (ours[0] == 0.0).all()
        assert (ours[1] == 0.0).all()


def test_loss_in_more_dimensions():
    z, target = torch.randn(2, 7, 3, 4), torch.randint(7, (2, 3, 4))
    alpha = torch.linspace(1.1, 1.9, 24).view(2, 3, 4)
    ours = tamis.entmax_loss(z, target, alpha, backend="triton")
    torch.testing.assert_close(ours, tamis.entmax_loss(z, target, alpha))
    torch.testing.assert_close(tamis.sparsemax_loss(z, target, backend="triton"), tamis.sparsemax_loss(z, target))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_reduced_loss(reduction, dtype):
    target, alpha = targets(4), torch.tensor(1.4, requires_grad=True)
    z = scores("randn", 4, CLASSES).to(dtype).requires_grad_()
    options = {"weight": WEIGHT, "label_smoothing": 0.1, "reduction": reduction}
    found = []
    for backend in ("triton", "reference"):
        loss = tamis.entmax_loss(z, target, alpha, backend=backend, **options)
        found.append((loss, *torch.autograd.grad(loss * 3.0, (z, alpha))))
    assert found[0][0].dtype == dtype
    torch.testing.assert_close(*found, rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=1e-5)


def test_learned_class_weights():
    z, target, weight = torch.randn(4, CLASSES), torch.tensor([0, 3, 7, 2]), WEIGHT.clone().requires_grad_()
    ours, plain = (
        torch.autograd.grad(tamis.entmax_loss(z, target, weight=weight, backend=backend), weight)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_second_derivatives(dtype):
    z, g = torch.randn(2, 4, 12).to(dtype).unbind(0)
    target = torch.tensor([1, 2, 3, 4])

    def second(backend, function):
        leaf, alpha = z.clone().requires_grad_(), torch.tensor(1.4, requires_grad=True)
        first = torch.autograd.grad(function(leaf, alpha, backend), (leaf, alpha), create_graph=True)
        return torch.autograd.grad((first[0] * g).sum() + first[1], (leaf, alpha))

    def weights(leaf, alpha, backend):
        return (tamis.entmax(leaf, alpha, backend=backend) * g).sum()

    def loss(leaf, alpha, backend):
        return tamis.entmax_loss(leaf, target, alpha, backend=backend)

    def soft_loss(leaf, alpha, backend):
        return tamis.entmax_loss(leaf, g.softmax(-1), alpha, backend=backend)

    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for function in (weights, loss, soft_loss):
        for a, b in zip(second("triton", function), second("reference", function), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_registered():
    z = torch.randn(3, 20)
    e = torch.full((3, 1), 0.4)
    state = torch.ops.tamis.rows_forward(z, e, 0.0)[1]
    target, weight = torch.tensor([1, -100, 3]), torch.rand(20)
    loss_state = torch.ops.tamis.rows_loss_forward(z, e, 0.0, target, weight, -100, 0.1, True, False)[1]
    for op, arguments in {
        torch.ops.tamis.rows_forward: (z, e, 0.0),
        torch.ops.tamis.rows_backward: (z, state, z, e, 0.0, False, True),
        torch.ops.tamis.rows_loss_forward: (z, None, 0.5, None, None, 0, 0.0, False, False),
        torch.ops.tamis.rows_loss_backward: (z, loss_state, z[:, 0], e, 0.0, target, weight, -100, 0.1, True, False),
    }.items():
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles_without_graph_breaks():
    alpha = torch.tensor([1.3], requires_grad=True)
    target = torch.tensor([1, 2, 3, 0])

    def value(z):
        weights = tamis.entmax(z * 2.0, alpha, backend="triton")
        return weights.square().sum() + tamis.entmax_loss(z, target, alpha, backend="triton")

    compiled = torch.compile(value, fullgraph=True, dynamic=True, backend="aot_eager")
    for width in (20, 33):
        z = torch.randn(4, width, requires_grad=True)
        found = torch.autograd.grad(compiled(z), (z, alpha))
        torch.testing.assert_close(found, torch.autograd.grad(value(z), (z, alpha)), rtol=1e-5, atol=1e-6)


def test_backend_is_checked_and_obstacles_are_named(monkeypatch):
    z = torch.randn(3, 20)
    with pytest.raises(ValueError, match="backend must be one of auto, reference, native, triton"):
        tamis.entmax(z, backend="cuda")
    with pytest.raises(RuntimeError, match="fp16, bf16 and fp32"):
        tamis.entmax(z.double(), backend="triton")
    with pytest.raises(RuntimeError, match="transforms and forward-mode"):
        torch.func.vmap(lambda x: tamis.entmax(x, backend="triton"))(z)
    with pytest.raises(RuntimeError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        tamis.entmax_loss(z, torch.tensor([0, 1, 2]), backend="triton")
    monkeypatch.setattr(ops, "MAX_WIDTH", 10)
    with pytest.raises(RuntimeError, match="up to 10 scores"):
        tamis.sparsemax(z, backend="triton")


def test_plain_operations_on_the_cpu(monkeypatch):
    monkeypatch.setattr(ops, "weights", lambda *_: pytest.fail("a kernel ran"))
    tamis.entmax(torch.randn(3, 20))
