"""The C++ kernels of attention against the dense form in fp64, and that nothing but the call decides the result."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tamis
from native.random_calls import check, draw, needs_kernels
from tamis.native import attention

pytestmark = needs_kernels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(batch: int, heads: int, queries: int, keys: int, dim: int = 32, grad: bool = True) -> list[Tensor]:
    generator = seeded(1)
    sizes = (queries, keys, keys)
    return [torch.randn(batch, heads, size, dim, generator=generator).mul_(1.5).requires_grad_(grad) for size in sizes]


def results(x: list[Tensor], *more: Tensor, **options: Any) -> list[Tensor]:
    out = tamis.attention(*x, backend="native", **options)
    probe = torch.randn(out.shape, generator=seeded(2))
    return [out.detach(), *torch.autograd.grad(out, [*x, *more], probe)]


@pytest.mark.parametrize("first", range(0, 400, 20))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(400, 10400, 200))
def test_many_random_calls(first: int) -> None:
    for seed in range(first, first + 200):
        check(seed)


@pytest.mark.parametrize("seed", [8, 110])
def test_one_term_too_many_of_a_slope_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed)
    drawn = draw(seed)
    shape = (*drawn.inputs["query"].shape[:3], drawn.inputs["value"].shape[3])
    terms = drawn.slope_terms(torch.randn(shape, generator=seeded(seed)).double()).abs()
    term = float(terms[terms > 0.0].median())
    backward = attention.backward

    def wrong(*given: Any) -> attention.Gradients:
        found = backward(*given)
        return found._replace(slopes=found.slopes + term)

    monkeypatch.setattr(attention, "backward", wrong)
    with pytest.raises(AssertionError, match=f"seed {seed}: slopes is off"):
        check(seed)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_slopes_where_all_keys_are_far(alpha: float) -> None:
    """What all distances have in common moves no weight, and must not make an error larger."""
    x = inputs(1, 2, 50, 60)
    probe = torch.randn(1, 2, 50, 32, generator=seeded(2))

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        slopes = torch.zeros(2, dtype=dtype, requires_grad=True)
        options: dict[str, Any] = {"alibi_slopes": slopes, "query_positions": torch.arange(50) + 2**20}
        out = tamis.attention(*(y.to(dtype) for y in x), rule=tamis.Entmax(alpha), backend=backend, **options)
        return torch.autograd.grad(out, slopes, probe.to(dtype))[0].double()

    torch.testing.assert_close(gradient(torch.float32, "native"), gradient(torch.float64, "dense"), rtol=1e-5, atol=0.0)


def everything(seed: int) -> list[Tensor]:
    drawn = draw(seed)
    shape = (*drawn.inputs["query"].shape[:3], drawn.inputs["value"].shape[3])
    probe = torch.randn(shape, generator=seeded(seed)).double()
    return drawn.run(torch.float32, probe, backend="native", dropout_p=0.2, generator=seeded())


def test_threads_change_no_bit(threads: None) -> None:
    for seed in range(60):
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(everything(seed))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), seed


def test_few_heads_and_many_threads(threads: None) -> None:
    """One head is cut into parts, whose gradients of keys are added up in one order."""
    alpha = torch.tensor([1.4], requires_grad=True)
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(results(inputs(1, 1, 600, 600), alpha, rule=tamis.Entmax(alpha), is_causal=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("room", [0, 700, 20000])
def test_weights_that_are_not_kept_are_solved_for_again(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [everything(seed) for seed in range(40)]
    monkeypatch.setattr(attention, "_capacity", lambda a: room)
    for seed, want in enumerate(kept):
        assert all(torch.equal(a, b) for a, b in zip(everything(seed), want, strict=True)), seed


def test_what_is_kept_is_bounded_by_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KEEP", 100)
    kept: list[int] = []
    forward = attention.forward

    def watched(*given: Any) -> attention.Results:
        found = forward(*given)
        kept.append(found.kept.numel() - attention._SPARE)
        return found

    monkeypatch.setattr(attention, "forward", watched)
    tamis.entmax_attention(*inputs(2, 3, 500, 500, dim=16), alpha=1.01, backend="native")
    tamis.entmax_attention(*inputs(2, 3, 8, 8, dim=16), alpha=1.01, backend="native")
    assert kept == [int(attention.SHARE * (2 * 3 * 500 * (16 + 16))), 2 * 3 * 8 * 8]


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_dropout_keeps_or_scales(alpha: float) -> None:
    query, key, _ = inputs(2, 3, 64, 64, grad=False)
    identity = torch.eye(64).expand(2, 3, 64, 64)
    plain = tamis.entmax_attention(query, key, identity, alpha=alpha, backend="native")

    def dropped(p: float, seed: int) -> Tensor:
        rule = tamis.Entmax(alpha)
        return tamis.attention(query, key, identity, dropout_p=p, generator=seeded(seed), rule=rule, backend="native")

    out = dropped(0.3, 0)
    kept = out != 0.0
    torch.testing.assert_close(out[kept], plain[kept] / 0.7)
    positive = plain > 0.0
    share = (kept & positive).sum() / positive.sum()
    assert abs(float(share) - 0.7) < 5.0 * math.sqrt(0.21 / float(positive.sum()))
    assert torch.equal(out, dropped(0.3, 0))
    assert not torch.equal(out, dropped(0.3, 1))
    assert bool((dropped(1.0, 0) == 0.0).all())
    if alpha == 1.0:  # each row, head and sequence has its own
        assert torch.unique(kept.reshape(-1, 64), dim=0).shape[0] == 2 * 3 * 64


@pytest.mark.parametrize("alpha", [1.0, 1.5])
@pytest.mark.parametrize("room", [0, 1 << 20])
def test_dropout_gradients_use_the_same_mask(alpha: float, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that were dropped show where values are the identity; the rest is plain arithmetic."""
    monkeypatch.setattr(attention, "_capacity", lambda a: room)
    query, key, value = inputs(2, 2, 70, 90, dim=16)
    identity = torch.eye(90).expand(2, 2, 90, 90)
    options: dict[str, Any] = {"dropout_p": 0.4, "rule": tamis.Entmax(alpha), "backend": "native"}
    with torch.no_grad():
        kept = tamis.attention(query, key, identity, generator=seeded(3), **options) != 0.0
        factors = torch.where(kept, 1.0 / 0.6, 0.0)
    out = tamis.attention(query, key, value, generator=seeded(3), **options)
    expected = (tamis.attention_weights(query, key, rule=tamis.Entmax(alpha)) * factors) @ value
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    probe = torch.randn(out.shape, generator=seeded(2))
    found, wanted = (torch.autograd.grad(x, (query, key, value), probe) for x in (out, expected))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_far_keys_are_not_looked_at() -> None:
    """Beyond the reach of ALiBi a key may hold anything that is no longer than the others."""
    query, key, value = inputs(1, 2, 900, 900, grad=False)
    slopes = torch.tensor([2.0, 0.5])
    options: dict[str, Any] = {"alibi_slopes": slopes, "is_causal": True}
    for rule in (tamis.Entmax(1.5), tamis.Entmax(1.05), tamis.Activation("relu")):
        out = tamis.attention(query, key, value, rule=rule, backend="native", **options)
        exact = tamis.attention(*(x.double() for x in (query, key, value)), rule=rule, backend="dense", **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.1])])
@pytest.mark.parametrize("queries", [1, 5])
def test_pages_beyond_the_length_need_not_be_there(queries: int, slopes: Tensor | None) -> None:
    generator = seeded()
    query = torch.randn(2, 2, queries, 16, generator=generator)
    keys, values = (torch.randn(10, 16, 2, 16, generator=generator) for _ in range(2))
    table = torch.full((2, 40), 2**30)
    table[0, :3], table[1, 0] = torch.tensor([4, 2, 7]), 9
    given = (query, keys, values, table, torch.tensor([40, 9]))
    found, want = (
        tamis.paged_attention(*given, is_causal=True, alibi_slopes=slopes, backend=backend)
        for backend in ("native", "blocked")
    )
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", [0, 2**33, -(2**40)])
def test_positions_of_any_size(start: int) -> None:
    query, key, value = inputs(1, 2, 9, 9, grad=False)
    options: dict[str, Any] = {"query_positions": torch.arange(9) + start, "rule": tamis.Activation("relu")}
    options["alibi_slopes"] = torch.tensor([1e-11, 1e-13])
    out = tamis.attention(query, key, value, backend="native", **options)
    exact = tamis.attention(query.double(), key.double(), value.double(), backend="dense", **options)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_rounded_once(dtype: torch.dtype) -> None:
    """What is computed of narrow inputs is what fp32 computes of the same numbers, rounded."""
    narrow = [x.detach().to(dtype) for x in inputs(2, 2, 40, 60)]
    wide = results([x.float().requires_grad_() for x in narrow], rule=tamis.Entmax(1.4))
    out = tamis.attention(*(x.requires_grad_() for x in narrow), rule=tamis.Entmax(1.4), backend="native")
    assert torch.equal(out, wide[0].to(dtype))
    probe = torch.randn(out.shape, generator=seeded(2)).to(dtype)
    for got, x in zip(torch.autograd.grad(out, narrow, probe), narrow, strict=True):
        assert got.dtype == dtype
        assert got.shape == x.shape


def test_inference_mode_and_checkpointing() -> None:
    x = inputs(2, 2, 50, 50)
    options: dict[str, Any] = {"rule": tamis.Entmax(1.3), "dropout_p": 0.1, "backend": "native"}
    with torch.inference_mode():
        plain = tamis.attention(*x, generator=seeded(), **options)
    torch.manual_seed(0)
    want = tamis.attention(*x, **options)
    want_gradients = torch.autograd.grad(want.sum(), x)
    torch.manual_seed(0)
    out = checkpoint(lambda *y: tamis.attention(*y, **options), *x, use_reentrant=False)
    assert torch.equal(out, want)
    assert torch.equal(out, plain)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.sum(), x), want_gradients, strict=True))


def test_threads_of_the_caller() -> None:
    want = results(inputs(2, 2, 60, 60), rule=tamis.Entmax(1.5))
    found: list[list[Tensor]] = []
    workers = [
        threading.Thread(target=lambda: found.append(results(inputs(2, 2, 60, 60), rule=tamis.Entmax(1.5))))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4
    assert all(torch.equal(a, b) for some in found for a, b in zip(some, want, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork(threads: None) -> None:
    torch.set_num_threads(1)  # torch's own pool does not outlive a fork
    x = inputs(1, 2, 40, 40, grad=False)
    want = tamis.entmax_attention(*x, backend="native")
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(tamis.entmax_attention(*x, backend="native"), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_it_leaves_to_others() -> None:
    query, key, value = inputs(1, 2, 5, 5, grad=False)
    mask = torch.zeros(5, 5, requires_grad=True)
    for options, reason in (
        ({"attn_mask": mask}, "attn_mask needs a gradient"),
        ({"rule": tamis.Softpick()}, "there is no C\\+\\+ kernel for Softpick"),
        ({"rule": tamis.Activation("gelu")}, "gelu has no zeros to leave out"),
        ({"rule": tamis.Activation("leaky_relu", slope=-0.1)}, "negative slope"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            tamis.attention(query, key, value, backend="native", **options)
    with pytest.raises(RuntimeError, match="fp32, bf16 and fp16"):
        tamis.attention(query.double(), key.double(), value.double(), backend="native")
