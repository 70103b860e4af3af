"""The C++ kernels for rows: exact, to the bit the same whatever surrounds a row, and called wherever torch may be."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tamis
from oracles import entmax_exact
from tamis.native import library, rows
from tamis.transforms.entmax import vjp_rows

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))

ALPHAS = (1.0, 1.0 + 1e-6, 1.1, 1.1249, 1.125, 1.3, 1.5, 1.75, 2.0)
WIDTHS = (1, 7, 64, 100, 128, 129, 513, 5000)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def every_result(z: Tensor, alpha: float | Tensor, target: Tensor, upstream: Tensor) -> list[Tensor]:
    """Weights, losses and gradients, each with a row for a row of z."""
    leaf = z.clone().requires_grad_()
    alphas = torch.as_tensor(alpha, dtype=torch.promote_types(z.dtype, torch.float32)).expand(len(z), 1)
    alphas = alphas.clone().requires_grad_()
    weights = tamis.entmax(leaf, alphas, backend="native")
    losses = tamis.entmax_loss(leaf, target, alphas, reduction="none", backend="native")
    return [
        weights.detach(),
        losses.detach(),
        *torch.autograd.grad(weights, (leaf, alphas), upstream),
        *torch.autograd.grad(losses.sum(), (leaf, alphas)),
    ]


def cases(n: int, count: int = 37) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of all kinds, an alpha for each, targets and gradients of the weights."""
    z = randn(count, n, seed=n)
    z[1] *= 100.0
    z[2] *= 1e-3
    z[3] = 0.0
    z[4] = torch.linspace(0.0, 1e-6, n)
    z[5, n // 2 :] = -math.inf
    z[6] = -math.inf
    z[7, -1] = math.inf
    z[8, 0] = math.nan
    z[9] *= 1e-42
    alpha = torch.tensor(ALPHAS).repeat(count // len(ALPHAS) + 1)[:count, None]
    return z, alpha, torch.arange(count) % n, randn(count, n, seed=n + 1)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("one_alpha", [None, 1.1, 1.3, 1.5, 2.0], ids=str)
def test_results_to_the_bit_for_any_number_of_threads_and_any_neighbours(n: int, one_alpha: float | None):
    z, alpha, target, upstream = cases(n)
    alpha = alpha if one_alpha is None else torch.full_like(alpha, one_alpha)
    whole = every_result(z, alpha, target, upstream)
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(2))
    moved = every_result(z[order], alpha[order], target[order], upstream[order])
    assert same(moved, [x[order] for x in whole])
    for part in (slice(3, 4), slice(11, 30)):
        alone = every_result(z[part], alpha[part], target[part], upstream[part])
        assert same(alone, [x[part] for x in whole])


def test_threads_change_nothing():
    """A size that torch shares out."""
    z, alpha, target, upstream = cases(700, 300)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(every_result(z, alpha, target, upstream))
    finally:
        torch.set_num_threads(before)
    assert all(same(found[0], other) for other in found[1:])


def test_a_row_does_not_depend_on_neighbours_whose_alpha_is_for_plain_torch():
    z = randn(6, 40)
    alpha = torch.tensor([1.5, 3.0, 1.3, 0.5, 2.0, 1.05])[:, None]
    inside = torch.tensor([0, 2, 4, 5])
    assert torch.equal(tamis.entmax(z, alpha)[inside], tamis.entmax(z[inside], alpha[inside], backend="native"))
    outside = torch.tensor([1, 3])
    alone = tamis.entmax(z[outside], alpha[outside], backend="reference")
    torch.testing.assert_close(tamis.entmax(z, alpha)[outside], alone, rtol=1e-6, atol=1e-7)


def adversarial(n: int) -> Tensor:
    """Rows that are hard on a threshold, in fp32."""
    z = torch.zeros(8, n, dtype=torch.float64)
    z[0] = -torch.logspace(-8, 0.5, n, dtype=torch.float64)
    z[1] = torch.linspace(0.0, 1e-5, n, dtype=torch.float64)
    z[2, 0] = 1.9999999
    z[3, 0] = 1e6
    z[4] = torch.where(torch.arange(n) % 2 == 0, 0.0, -1.0)
    z[5] = -torch.arange(n, dtype=torch.float64) * 1e-7 + 1e3
    z[6] = randn(n, dtype=torch.float64) * 1e-30
    z[7] = -(torch.arange(n, dtype=torch.float64) ** 0.5)
    return z.float()


@pytest.mark.parametrize("alpha", [1.0 + 1e-6, 1.1, 1.125, 1.3, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("n", [40, 200])
def test_adversarial_rows_have_the_exact_weights(alpha: float, n: int):
    z = adversarial(n)
    weights = rows.solve(z, alpha - 1.0)[0].double()
    assert (weights - entmax_exact(z, alpha)).abs().sum(-1).max() <= 6e-6
    precise = rows.solve(z.double(), alpha - 1.0)[0]
    assert (precise - entmax_exact(z, alpha)).abs().sum(-1).max() <= 2e-13


@pytest.mark.parametrize("alpha", [1.0, 1.05, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("n", [33, 300, 20000])
def test_gradients_of_adversarial_rows_in_fp64(alpha: float, n: int):
    """Those of exact weights: the Jacobian is that of the weights alone."""
    z = adversarial(n).double()
    p, floor = rows.solve(z, alpha - 1.0)
    upstream = randn(8, n, dtype=torch.float64)
    found = rows.gradient(p, floor, upstream, alpha - 1.0, False)[0]
    expected = torch.empty_like(p)
    vjp_rows(p, alpha - 1.0, floor, upstream, expected, torch.empty_like(p))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strided_rows_are_read_where_they_lie(dtype: torch.dtype):
    wide = randn(20, 90).to(dtype)
    for view in (wide[:, 5:70], wide[::2, :64], wide[:1].expand(4, 90), wide.T):
        assert torch.equal(rows.solve(view, 0.5)[0], rows.solve(view.contiguous(), 0.5)[0])
    assert rows._in_order(wide[::2, 5:70]).data_ptr() == wide[0, 5:].data_ptr()


def test_a_million_scores():
    z = randn(2, 2**20)
    for alpha in (1.1, 1.3, 1.5, 2.0):
        weights = rows.solve(z, alpha - 1.0)[0].double()
        assert (weights.sum(-1) - 1.0).abs().max() <= 1e-5
        assert (weights - rows.solve(z.double(), alpha - 1.0)[0]).abs().sum(-1).max() <= 1e-5


def test_outside_of_its_range_it_says_so():
    z = randn(3, 5)
    for alpha in (0.5, 2.5, torch.tensor([[1.5], [3.0], [1.2]])):
        with pytest.raises(RuntimeError, match=r'backend="native": the C\+\+ kernels are for alpha in \[1, 2\]'):
            tamis.entmax(z, alpha, backend="native")
    with pytest.raises(RuntimeError, match='backend="native"'):
        tamis.entmax_loss(z, torch.tensor([0, 1, 2]), 3.0, backend="native")


# ---------------------------------------------------------------------------------------------------------------
# Wherever torch may call them


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called, in order."""
    made: list[str] = []
    call = rows._call

    def counted(name: str, *arguments: Any) -> None:
        made.append(name.removeprefix("tamis_"))
        call(name, *arguments)

    monkeypatch.setattr(rows, "_call", counted)
    return made


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda z, a, t: tamis.entmax(z * 2.0, 1.5).square().sum(), id="number"),
        pytest.param(lambda z, a, t: tamis.entmax(z * 2.0, a).square().sum(), id="tensor"),
        pytest.param(lambda z, a, t: tamis.sparsemax(z * 2.0).square().sum(), id="sparsemax"),
    ],
)
def test_a_compiled_function_calls_the_kernels(function: Callable[..., Tensor], calls: list[str]):
    z, alpha = randn(6, 20).requires_grad_(), torch.tensor(1.3)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(z, alpha, None), z)
    assert calls == ["forward", "backward"]
    torch.testing.assert_close(found, torch.autograd.grad(function(z, alpha, None), z)[0])


@pytest.mark.parametrize("alpha", [1.5, torch.tensor(1.3)], ids=str)
def test_a_compiled_loss_calls_the_kernels(alpha: float | Tensor, calls: list[str]):
    z, target = randn(6, 20).requires_grad_(), torch.arange(6)
    compiled = torch.compile(lambda z: tamis.entmax_loss(z, target, alpha), backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(z), z)
    assert calls[0] == ("forward" if isinstance(alpha, Tensor) else "loss_forward")
    torch.testing.assert_close(found, torch.autograd.grad(tamis.entmax_loss(z, target, alpha), z)[0])


def test_a_target_that_only_the_kernel_sees_is_checked():
    z = randn(4, 20)
    compiled = torch.compile(lambda target: tamis.entmax_loss(z, target, 1.5), backend="aot_eager", fullgraph=True)
    compiled(torch.tensor([0, 1, 2, 19]))
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(torch.tensor([0, 1, 2, 20]))


def test_the_eager_paths_call_them_once(calls: list[str]):
    z, target = randn(6, 20).requires_grad_(), torch.arange(6)
    tamis.entmax_loss(z, target, 1.5).backward()
    assert calls == ["loss_forward", "loss_backward"]
    calls.clear()
    tamis.entmax(z, 1.5).square().sum().backward()
    assert calls == ["forward", "backward"]
    calls.clear()
    tamis.entmax_threshold(z, 1.5)
    assert calls == ["forward"]
    calls.clear()
    tamis.entmax(z, 1.5, backend="reference").square().sum().backward()
    tamis.entmax_loss(z, target, 1.5, backend="reference")
    assert calls == []


def test_many_gradients_at_once_and_inference_mode():
    z, target = randn(3, 6, dtype=torch.float64).requires_grad_(), torch.tensor([1, 2, 3])
    for backend in ("native", "reference"):
        losses = tamis.entmax_loss(z, target, 1.5, reduction="none", backend=backend)
        (found,) = torch.autograd.grad(losses, z, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
        weights = tamis.entmax(z.detach(), 1.5, backend=backend)
        torch.testing.assert_close(found.sum(0), weights - torch.eye(6, dtype=torch.float64)[target])
    with torch.inference_mode():
        inside = tamis.entmax(z.detach(), 1.5), tamis.entmax_loss(z.detach(), target, 1.5)
    assert torch.equal(inside[0], tamis.entmax(z.detach(), 1.5))
    assert torch.equal(inside[1], tamis.entmax_loss(z.detach(), target, 1.5))


def test_several_python_threads_at_once():
    z, alpha, target, upstream = cases(300, 100)
    expected = every_result(z, alpha, target, upstream)
    agree = []

    def work() -> None:
        agree.extend(same(every_result(z, alpha, target, upstream), expected) for _ in range(5))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert agree == [True] * 20


class Rows(torch.utils.data.Dataset):
    """Weights of rows, computed by whoever loads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return tamis.entmax(randn(200, 600, seed=index), 1.3)


def test_workers_that_are_forked_after_threads_were_used():
    here = [Rows()[index] for index in range(8)]
    loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(a, b) for a, b in zip(loader, here, strict=True))


# ---------------------------------------------------------------------------------------------------------------
# Random calls


def random_call(seed: int) -> None:
    """One call of every kernel against plain torch in fp64."""
    generator = torch.Generator().manual_seed(seed)
    pick = lambda count: int(torch.randint(count, (), generator=generator))  # noqa: E731
    n, count = int(2 ** (pick(1200) / 100.0)), 1 + pick(20)
    scale = 10.0 ** (pick(50) / 10.0 - 3.0)
    dtype = (torch.float32, torch.float64, torch.bfloat16, torch.float16)[pick(4)]
    z = (torch.randn(count, n, generator=generator) * scale).to(dtype)
    if pick(3) == 0:
        z[torch.rand(z.shape, generator=generator) < 0.5] = -math.inf
        z[:, pick(n)] = 0.0
    special = (1.0, 1.5, 2.0, 1.125, 1.0 + 1e-6)
    alpha = special[pick(5)] if pick(2) else 1.0 + float(torch.rand((), generator=generator))
    alphas = torch.full((count, 1), alpha, dtype=torch.float64)
    if pick(2):
        alphas = 1.0 + torch.rand(count, 1, generator=generator, dtype=torch.float64)
    work = torch.promote_types(dtype, torch.float32)
    alphas = alphas.to(work)
    target = torch.randint(n, (count,), generator=generator)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5

    precise = tamis.entmax(z.double(), alphas.double(), backend="reference")
    weights = rows.solve(z, alphas - 1.0)[0].double()
    assert (weights - precise).abs().sum(-1).max() <= tolerance, (seed, "weights")
    assert (weights.sum(-1) - 1.0).abs().max() <= 1e-5, (seed, "mass")

    options = rows.Loss(target, ignore_index=-100)
    losses, kept = rows.losses(z, alphas - 1.0, options, True)
    exact = tamis.entmax_loss(z.double(), target, alphas.double(), reduction="none", backend="reference")
    finite = exact.isfinite()
    assert torch.equal(finite, losses.isfinite()), (seed, "infinite losses")
    relative = (losses.double() - exact)[finite].abs() / (1.0 + exact[finite].abs())
    assert not relative.numel() or relative.max() <= tolerance, (seed, "loss")
    found = rows.loss_gradient(z, kept, torch.ones(1), alphas - 1.0, options, True)[0].double()
    wanted = precise - torch.nn.functional.one_hot(target, n)
    assert (found - wanted).abs().sum(-1).max() <= tolerance, (seed, "gradient of the loss")


def test_random_calls():
    for seed in range(60):
        random_call(seed)


@pytest.mark.slow
def test_two_thousand_random_calls():
    for seed in range(1000, 3000):
        random_call(seed)
