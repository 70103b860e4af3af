"""Under torch.compile the kernel itself runs, in memory linear in the length."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tamis
from native.random_calls import needs_kernels
from tamis.attention import native

pytestmark = needs_kernels


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that ran, in order."""
    ran: list[str] = []
    for name in ("forward", "backward"):
        run = getattr(native.attention, name)
        monkeypatch.setattr(native.attention, name, lambda *a, run=run, name=name: ran.append(name) or run(*a))
    return ran


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.3},
    "mask": {"attn_mask": torch.arange(9) < 6},
    "packed": {"cu_seqlens_q": torch.tensor([0, 4, 9]), "is_causal": True},
    "window": {"window": 3, "alibi_slopes": torch.tensor([0.5, 0.1])},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", [tamis.Entmax(1.5), tamis.Activation("relu")], ids=["entmax", "relu"])
def test_the_kernel_runs_once_forward_and_once_backward(option: str, rule: tamis.Rule, calls: list[str]) -> None:
    torch._dynamo.reset()
    x = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)]

    def function(*x: Tensor) -> Tensor:
        return tamis.attention(*x, rule=rule, **OPTIONS[option]).square()

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(*x)
    gradients = torch.autograd.grad(out.sum(), x)
    assert calls == ["forward", "backward"]
    if option != "dropout":
        plain = function(*x)
        torch.testing.assert_close(out, plain)
        for got, want in zip(gradients, torch.autograd.grad(plain.sum(), x), strict=True):
            torch.testing.assert_close(got, want)


def test_learned_alphas_and_slopes_have_gradients() -> None:
    torch._dynamo.reset()
    x = [torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3)]
    alpha = torch.linspace(1.1, 1.9, 4).requires_grad_()
    slopes = torch.rand(4, requires_grad=True)

    def function(*x: Tensor) -> Tensor:
        return tamis.entmax_attention(*x[:3], alpha=x[3], alibi_slopes=x[4])

    leaves = (*x, alpha, slopes)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    plain = function(*leaves)
    torch.testing.assert_close(compiled, plain)
    probe = torch.randn_like(plain)
    found = [torch.autograd.grad(out, leaves, probe) for out in (compiled, plain)]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_the_same_tensor_as_query_key_and_value(calls: list[str]) -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 9, 16, requires_grad=True)
    out = torch.compile(lambda x: tamis.entmax_attention(x, x, x), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(out, tamis.entmax_attention(x, x, x))
    assert calls == ["forward", "forward"]


def test_bounds_of_sequences_that_only_the_kernel_sees_stay_within_the_keys() -> None:
    torch._dynamo.reset()
    x = [torch.randn(1, 2, 20, 16) for _ in range(3)]
    compiled = torch.compile(
        lambda *x: tamis.entmax_attention(*x[:3], cu_seqlens_q=x[3]), fullgraph=True, backend="aot_eager"
    )
    found = compiled(*x, torch.tensor([0, 5, 2**40]))
    torch.testing.assert_close(found, tamis.entmax_attention(*x, cu_seqlens_q=torch.tensor([0, 5, 20])))


def test_operations_are_what_torch_wants_of_them() -> None:
    x = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    call = tamis.attention_backends(*x)
    assert call.chosen == "native"
    from tamis.attention.call import check_call
    from tamis.attention.rules import bind

    checked = check_call(*x, is_causal=True)
    arguments = native._arguments(checked, bind(tamis.Entmax(1.5), checked))
    torch.library.opcheck(native.native_forward, (*arguments, False, True))


MEMORY = """
import resource, torch, tamis
def run(n):
    x = [torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3)]
    f = torch.compile(lambda *x: tamis.entmax_attention(*x, is_causal=True), backend="aot_eager", dynamic=False)
    f(*x).square().sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = run(64)
print((run(4096) - before) / 1024)
"""


def test_memory_is_not_quadratic() -> None:
    """4096 x 4096 scores alone would be 67 MB, and the dense form has five of that size."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40.0
