"""The blocked path, the path of one block, the dense path and the compiled one are one function."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from attention.cases import (
    CASES,
    EXACT,
    LONG_CASES,
    Case,
    call,
    check_gradients,
    differentiable,
    hidden_rows,
    leaf,
    output_and_gradients,
    randn,
)
from tamis.attention import blocked, blocks
from tamis.attention.call import check_call
from tamis.attention.masks import Visibility
from tamis.attention.rules import Entmax, Softmax
from tamis.functional import attention_backends, entmax_attention, softmax_attention


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    def set_blocks(tiny: bool) -> None:
        monkeypatch.setattr(blocks, "_BLOCK", 200 if tiny else 1 << 30)
        monkeypatch.setattr(blocked, "_KEEP", 0 if tiny else 1 << 30)

    return set_blocks


@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
@pytest.mark.parametrize("case", LONG_CASES)
def test_blocks_change_nothing(name: str, case: str, tiny_blocks: Callable[[bool], None]) -> None:
    case = LONG_CASES[case]
    rule = {}
    if name == "entmax":
        spread = torch.rand(case.batch, 4, case.queries, 1, generator=torch.Generator().manual_seed(2))
        rule["alpha"] = 1.0 + spread.double()
    tiny_blocks(False)
    whole = output_and_gradients(name, case, **rule)
    tiny_blocks(True)
    everything = check_call(*case.inputs(), enable_gqa=True)
    walk = blocks.Walk(everything, Entmax(1.5).bind(everything))
    assert walk.rows < case.queries or walk.head_step < case.key_heads or walk.batch_step < case.batch
    for got, want in zip(output_and_gradients(name, case, **rule), whole, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (5, 1)])
@pytest.mark.parametrize("window", [None, (-1, -1), (2, -1), (-1, 1), (0, 0), (1, 3), (20, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_are_as_narrow_as_what_they_see(
    queries: int, keys: int, window: tuple[int, int] | None, is_causal: bool
) -> None:
    everything, device = slice(None), torch.device("cpu")
    visibility = Visibility(num_queries=queries, num_keys=keys, device=device, window=window, is_causal=is_causal)
    keep, _ = visibility.block(everything, everything, everything)
    seen = torch.ones(queries, keys, dtype=torch.bool) if keep is None else keep[0, 0]
    for start, stop in itertools.combinations(range(queries + 1), 2):
        sight = visibility.keys_in_sight(slice(start, stop))
        found = seen[start:stop].any(0).nonzero()[:, 0].tolist()
        assert 0 <= sight.start < sight.stop <= keys
        if found:
            assert (sight.start, sight.stop) == (found[0], found[-1] + 1)
        narrow, _ = visibility.block(everything, everything, slice(start, stop), sight)
        assert narrow is None or torch.equal(narrow[0, 0], seen[start:stop, sight])


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_of_packed_sequences_see_those_of_their_queries(is_causal: bool) -> None:
    everything, device = slice(None), torch.device("cpu")
    bounds = torch.tensor([0, 2, 2, 5, 6]), torch.tensor([0, 3, 4, 4, 8])  # without queries, without keys; a rest
    visibility = Visibility(num_queries=8, num_keys=9, device=device, cu_seqlens=bounds, is_causal=is_causal)
    keep, _ = visibility.block(everything, everything, everything)
    for start, stop in itertools.combinations(range(9), 2):
        sight = visibility.keys_in_sight(slice(start, stop))
        assert 0 <= sight.start < sight.stop <= 9
        hidden = keep[0, 0, start:stop].clone()
        hidden[:, sight] = False
        assert not hidden.any()
    assert [visibility.keys_in_sight(slice(*places)) for places in ((0, 2), (5, 6))] == [slice(0, 3), slice(4, 8)]


@pytest.mark.parametrize("keep", [0, 1 << 30])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_kept_weights_change_nothing(keep: int, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "_KEEP", keep)
    check_gradients(entmax_attention, CASES["gqa"], alpha=alpha)


@pytest.mark.parametrize("name", ["entmax", "sigmoid"])
@pytest.mark.parametrize("case", CASES)
def test_torch_func_takes_the_dense_path_to_the_same_result(name: str, case: str) -> None:
    case = CASES[case]
    inputs, options, names = differentiable(case)
    expected = output_and_gradients(name, case)

    def function(*tensors: Tensor) -> Tensor:
        return call(name, tensors[:3], **options, **dict(zip(names, tensors[3:], strict=True)))

    out, pullback = torch.func.vjp(function, *(x.detach() for x in inputs))
    for got, want in zip((out, *pullback(randn(*out.shape, seed=9))), expected, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["entmax", "softmax", "sigmoid"])
def test_forward_mode_takes_the_dense_path_too(name: str, grad: bool) -> None:
    query, key, value = Case().inputs()
    tangent = randn(*query.shape, seed=9)
    wanted = torch.func.jvp(lambda x: call(name, (x, key, value)), (query,), (tangent,))[1]
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad):
        out = call(name, (torch.autograd.forward_ad.make_dual(query, tangent), key, value))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, wanted, **EXACT)


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_softmax_whose_scale_is_not_positive(scale: float) -> None:
    query, key, value = randn(3, 2, 4, 6, 8, dtype=torch.float32)
    scores = (scale * query @ key.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    found = softmax_attention(query, key, value, is_causal=True, scale=scale)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)


def test_forward_mode_of_softmax_passes_torchs_own_attention_over() -> None:
    query, key, value, tangent = (randn(2, 4, 6, 8, seed=seed, dtype=torch.float32) for seed in range(4))
    assert attention_backends(query, key, value, rule=Softmax()).chosen == "sdpa"

    def dense(x: Tensor) -> Tensor:
        return (x @ key.mT / 8**0.5).softmax(-1) @ value

    def ours(x: Tensor) -> Tensor:
        return softmax_attention(x, key, value)

    for differentiate in (torch.func.jvp, lambda f, x, t: torch.func.jvp(torch.func.grad(lambda y: f(y).sum()), x, t)):
        wanted, found = (differentiate(function, (query,), (tangent,)) for function in (dense, ours))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.autograd.forward_ad.dual_level():
        out = ours(torch.autograd.forward_ad.make_dual(query, tangent))
        found = torch.autograd.forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(found, torch.func.jvp(dense, (query,), (tangent,))[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("entmax", "gqa"),
        ("entmax", "bias_causal"),
        ("entmax", "window_pair"),
        ("softmax", "mask_causal"),
        ("sigmoid", "window_pair"),
    ],
)
def test_compile(name: str, case: str) -> None:
    torch._dynamo.reset()
    case = CASES[case]
    inputs, options, names = differentiable(case)

    def function(*tensors: Tensor) -> Tensor:
        return call(name, tensors[:3], **options, **dict(zip(names, tensors[3:], strict=True)))

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    gradients = torch.autograd.grad(out, inputs, randn(*out.shape, seed=9))
    for got, want in zip((out, *gradients), output_and_gradients(name, case), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("case", ["bool", "additive"])
def test_compile_with_alpha_and_masked_rows(case: str) -> None:
    torch._dynamo.reset()
    inputs = [leaf(x) for x in (*CASES["cross"].inputs(), torch.full((4,), 1.3, dtype=torch.float64))]
    options = hidden_rows()[case]

    def function(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor) -> Tensor:
        return entmax_attention(query, key, value, **options, alpha=alpha)

    probe = randn(2, 4, 6, 5, seed=9)
    results = []
    for run in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        out = run(*inputs)
        results.append((out, *torch.autograd.grad(out, inputs, probe)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


MEMORY = """
import resource, torch
from tamis.functional import {function}
def run(n):
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3)]
    {function}(*x, is_causal={causal}).square().sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = run(64)
print((run(8192) - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("function", ["entmax_attention", "relu_attention"])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_not_quadratic(function: str, causal: bool) -> None:
    """8192 x 8192 scores alone would be 256 MB; weights, gradients and masks of that size over a gigabyte."""
    script = MEMORY.format(function=function, causal=causal)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 600.0
