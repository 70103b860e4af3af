"""The kernels on a GPU: every pair of features in every dtype, and what only compiled code can show."""

import logging

import pytest
import torch

import tamis
from kernels.cases import (
    ACTIVATIONS,
    FACTORS,
    Problem,
    check,
    check_statistics,
    covering,
    describe,
    error,
    fused,
    plant,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("case", covering(FACTORS), ids=describe)
def test_pairs_of_features_in_bf16(case, known_dropout):
    check(Problem(case, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("case", covering(FACTORS, seed=1)[::2], ids=describe)
def test_pairs_of_features_in_fp16(case, known_dropout):
    check(Problem(case, torch.float16, "cuda"))


SMALLER = {**FACTORS, "head_dims": ((16, 16), (64, 64), (24, 40))}


@pytest.mark.parametrize("case", covering(SMALLER, seed=2)[::2], ids=describe)
def test_pairs_of_features_in_fp32(case, known_dropout):
    check(Problem(case, torch.float32, "cuda"))


@pytest.mark.parametrize("case", covering(FACTORS, seed=3)[:8], ids=describe)
def test_two_runs_are_equal_to_the_bit(case, known_dropout):
    problem = Problem(case, torch.bfloat16, "cuda")
    for a, b in zip(fused(problem), fused(problem), strict=True):
        assert torch.equal(a, b)


LONGER = {
    **FACTORS,
    "rule": (1.5, 2.0, 1.3, 1.0, "learned", "near one"),
    "lengths": ((300, 300), (1, 900), (200, 1100), (700, 130)),
    "head_dims": ((64, 64), (24, 40), (80, 128), (256, 160)),
    "structure": ("full", "causal", "window", "causal alibi", "positions"),
}


@pytest.mark.parametrize("case", covering(LONGER), ids=describe)
def test_long_rows_in_bf16(case, known_dropout, everything_is_long):
    check(Problem(case, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("case", covering(LONGER, seed=1)[::4], ids=describe)
def test_long_rows_in_fp32(case, known_dropout, everything_is_long):
    check(Problem(case, torch.float32, "cuda"))


@pytest.mark.parametrize("case", covering(LONGER, seed=2)[:4], ids=describe)
def test_two_runs_on_long_rows_are_equal_to_the_bit(case, known_dropout, everything_is_long):
    problem = Problem(case, torch.bfloat16, "cuda")
    for a, b in zip(fused(problem), fused(problem), strict=True):
        assert torch.equal(a, b)


ELEMENTWISE = {**LONGER, "rule": ACTIVATIONS, "structure": (*LONGER["structure"], "packed")}


@pytest.mark.parametrize("case", covering({**FACTORS, "rule": ("leaky_relu", "gelu")})[::4], ids=describe)
def test_smooth_rules_on_short_rows(case, known_dropout):
    check(Problem(case, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("case", covering(ELEMENTWISE), ids=describe)
def test_long_rows_of_elementwise_rules_in_bf16(case, known_dropout, everything_is_long):
    check(Problem(case, torch.bfloat16, "cuda"))


@pytest.mark.parametrize("case", covering(ELEMENTWISE, seed=1)[::4], ids=describe)
def test_long_rows_of_elementwise_rules_in_fp32(case, known_dropout, everything_is_long):
    check(Problem(case, torch.float32, "cuda"))


@pytest.mark.parametrize("case", covering({**ELEMENTWISE, "rule": ("relu", "squared_relu")})[:4], ids=describe)
def test_two_runs_of_relu_on_long_rows_are_equal_to_the_bit(case, known_dropout, everything_is_long):
    problem = Problem(case, torch.bfloat16, "cuda")
    for a, b in zip(fused(problem), fused(problem), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rule", ["relu", "squared_relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_without_weights_are_skipped(rule, dtype):
    check(plant(rule, (700, 5000), 64, dtype, "cuda"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_relu_agrees_with_flex_attention(is_causal):
    from tamis.bench.relu import flex_relu_attention

    leaves = tensors(2048, dtype=torch.float32, requires_grad=True)
    grad = torch.randn_like(leaves[0])
    ours, theirs = tamis.relu_attention(*leaves, is_causal=is_causal), flex_relu_attention(*leaves, is_causal)
    gradients = (torch.autograd.grad(out, leaves, grad) for out in (ours, theirs))
    for a, b in zip((ours, *next(gradients)), (theirs, *next(gradients)), strict=True):
        assert error(a, b.double()) < 1e-3


@pytest.mark.parametrize("case", covering({**LONGER, "rule": FACTORS["rule"]}, seed=3)[::8], ids=describe)
def test_statistics(case):
    check_statistics(Problem(case, torch.float32, "cuda"))


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
@pytest.mark.parametrize("n", [128, 500, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mass_is_one_on_adversarial_rows(alpha, n, dtype):
    index = torch.arange(n, device="cuda")
    scores = torch.stack(
        [
            torch.zeros(n, device="cuda"),
            torch.where(index == 3, 0.0, -1.0 / (alpha - 1.0) + 1e-3),
            torch.linspace(990.0, 1000.0, n, device="cuda"),
            1.0 + 1e-6 * index,
        ]
    ).view(1, 1, 4, n)
    query, key = (
        torch.ones(1, 1, 4, 16, device="cuda", dtype=dtype),
        torch.zeros(1, 1, n, 16, device="cuda", dtype=dtype),
    )
    ones = torch.ones(1, 1, n, 16, device="cuda", dtype=dtype)
    out = tamis.entmax_attention(query, key, ones, scores.to(dtype), alpha=alpha, backend="triton")
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8  # the weights themselves are rounded before the product
    torch.testing.assert_close(out.float(), torch.ones_like(out, dtype=torch.float32), rtol=0.0, atol=tolerance)


def test_keys_beyond_what_16_bits_count():
    key = torch.randn(1, 2, 40_000, 64, device="cuda")
    query = key[:, :, -300:].clone()  # attends to the last of them
    value = torch.randn(1, 2, 40_000, 64, device="cuda", requires_grad=True)
    out = tamis.entmax_attention(query, key, value, backend="triton")
    out.sum().backward()
    weights = tamis.functional.attention_weights(query.double(), key.double())
    torch.testing.assert_close(out.double(), weights @ value.double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value.grad[..., 0].double(), weights.sum(2), rtol=1e-4, atol=1e-4)


def tensors(length=100, heads=4, dim=64, dtype=torch.bfloat16, **options):
    return [torch.randn(2, heads, length, dim, device="cuda", dtype=dtype, **options) for _ in range(3)]


def learned(heads=4):
    return torch.linspace(1.1, 1.9, heads, device="cuda", requires_grad=True)


@pytest.mark.parametrize("length", [100, 300])
def test_nothing_waits_for_the_device(length):
    query, key, value = tensors(length, requires_grad=True)
    alpha = learned()
    lengths = torch.tensor([length, 10], device="cuda")

    def step():
        out = tamis.entmax_attention(query, key, value, alpha=alpha, key_lengths=lengths, dropout_p=0.1)
        out.sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_draws_new_dropout_at_every_replay():
    query, key, value = tensors()
    run = lambda: tamis.entmax_attention(query, key, value, dropout_p=0.5)  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    first = out.clone()
    graph.replay()
    assert first.isfinite().all()
    assert not torch.equal(first, out)


def test_compile_whole_graph_with_dynamic_lengths():
    alpha = learned()

    def loss(query, key, value):
        return tamis.entmax_attention(query * 2.0, key, value, alpha=alpha, is_causal=True).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for length in (40, 41, 200):
        leaves = tensors(length, dtype=torch.float32, requires_grad=True)  # where compiled code rounds as eager code
        expected = torch.autograd.grad(loss(*leaves), (*leaves, alpha))
        for a, b in zip(torch.autograd.grad(compiled(*leaves), (*leaves, alpha)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_lengths_share_their_compiled_kernels():
    from tamis.kernels.attention.device import forward

    def variants():
        return sum(len(caches[0]) for caches in forward.forward.device_caches.values())

    def run(length):
        tamis.entmax_attention(*tensors(length), backend="triton")

    for length in (70, 80, 96, 112, 128):  # multiples of 16 and others are told apart, and no more
        run(length)
    known = variants()
    for length in range(65, 129):
        run(length)
    assert variants() == known


def test_auto_takes_the_kernel_and_says_once_where_it_cannot(caplog, monkeypatch):
    from tamis.kernels import dispatch

    query, key, value = tensors()
    calls = []
    original = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda *a: calls.append(1) or original(*a))
    tamis.entmax_attention(query, key, value)
    assert calls == [1]
    from tamis.functional import backends

    backends._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tamis"):
        for _ in range(3):
            tamis.relu_attention(query, key, value, activation="identity")
    assert [r.message.count("not for identity") for r in caplog.records] == [1]


def test_activation_checkpointing_and_dropout():
    query, key, value = tensors(requires_grad=True)

    def attention(*x):
        return tamis.entmax_attention(*x, dropout_p=0.3)

    torch.manual_seed(0)
    plain = torch.autograd.grad(attention(query, key, value).sum(), (query, key, value))
    torch.manual_seed(0)
    out = torch.utils.checkpoint.checkpoint(attention, query, key, value, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), (query, key, value)), plain, strict=True):
        assert torch.equal(a, b)


def test_fully_sharded_model(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/rendezvous", world_size=1, rank=0)
    try:
        layer = tamis.nn.Attention(64, 4, mechanism=tamis.mechanisms.EntmaxAttention(4)).cuda()
        fully_shard(layer)
        x = torch.randn(2, 30, 64, device="cuda")
        layer(x).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
    finally:
        torch.distributed.destroy_process_group()
