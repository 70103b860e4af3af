"""Decoding on a GPU: every pair of features, long caches, and what only compiled code can show."""

import pytest
import torch

import tamis
from kernels.cases import FACTORS, Problem, check, covering, decoded, describe, error
from kernels.decode import paged_cases
from kernels.decode.paged_cases import Paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
decoding = pytest.mark.usefixtures("everything_is_decoding")

FEW = {
    **FACTORS,
    "lengths": ((1, 150), (1, 64), (2, 300), (16, 1100)),
    "groups": (1, 2, 4),
    "structure": ("full", "causal", "causal window", "causal alibi", "positions"),
    "dropout": (0.0,),
}


@decoding
@pytest.mark.parametrize("case", covering(FEW), ids=describe)
def test_pairs_of_features_in_bf16(case):
    check(Problem(case, torch.bfloat16, "cuda"), decoded)


@decoding
@pytest.mark.parametrize("case", covering(FEW, seed=1)[::3], ids=describe)
def test_pairs_of_features_in_fp16(case):
    check(Problem(case, torch.float16, "cuda"), decoded)


@decoding
@pytest.mark.parametrize("case", covering(FEW, seed=2)[::3], ids=describe)
def test_pairs_of_features_in_fp32(case):
    check(Problem(case, torch.float32, "cuda"), decoded)


@decoding
@pytest.mark.parametrize("case", covering(paged_cases.FACTORS), ids=describe)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pages(case, dtype):
    paged = Paged(case, dtype, "cuda")
    assert error(paged.run(backend="triton"), paged.exact()) < (5e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("rule", [1.5, "learned", "relu"])
@pytest.mark.parametrize(("groups", "queries"), [(1, 1), (2, 16)])
def test_far_pages_are_not_read_and_change_nothing(rule, groups, queries):
    case = {"rule": rule, "structure": "alibi", "page": 16, "groups": groups, "queries": queries, "norms": True}
    paged = Paged(case, torch.bfloat16, "cuda")
    paged.options["alibi_slopes"] = torch.tensor([4.0, 1.0], device="cuda")
    plain = paged.run(backend="triton", page_norms=None)
    assert torch.equal(paged.run(backend="triton"), plain)
    paged.key[paged.table[0, :4].long()] = torch.nan
    assert torch.equal(paged.run(backend="triton"), plain)


def cache(context, batch=2, heads=8, key_heads=2, dim=128, dtype=torch.bfloat16, queries=1):
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    return draw(batch, heads, queries, dim), draw(batch, key_heads, context, dim), draw(batch, key_heads, context, dim)


@pytest.mark.parametrize("rule", [tamis.Entmax(alpha) for alpha in (1.5, 2.0, 1.2, 1.0)], ids=str)
@pytest.mark.parametrize("context", [1024, 8191, 131072])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("queries", [1, 8, 16])
def test_long_caches(rule, context, sharpness, queries):
    query, key, value = cache(context, queries=queries)
    options = {"enable_gqa": True, "is_causal": True, "rule": rule}
    out = tamis.attention(query * sharpness, key, value, backend="triton", **options)
    weights = tamis.attention_weights((query * sharpness).double(), key.double(), **options)
    assert error(out, weights @ value.double().repeat_interleave(4, 1)) < 1e-2


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
@pytest.mark.parametrize("n", [1024, 20000])
def test_mass_is_one_on_adversarial_rows(alpha, n):
    index = torch.arange(n, device="cuda")
    one_above = torch.where(index == 3, 0.0, -1.0 / (alpha - 1.0) + 1e-3)
    rows = (0.0 * index, one_above, torch.linspace(990.0, 1000.0, n, device="cuda"), 1.0 + 1e-6 * index)
    query, key = torch.ones(1, 1, 4, 16, device="cuda"), torch.zeros(1, 1, n, 16, device="cuda")
    mask = torch.stack(rows).view(1, 1, 4, n)
    out = tamis.entmax_attention(query, key, torch.ones_like(key), mask, alpha=alpha, backend="triton")
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0.0, atol=1e-5)


def test_two_runs_are_equal_to_the_bit():
    inputs = cache(20000)
    run = lambda: tamis.entmax_attention(*inputs, alpha=1.3, enable_gqa=True)  # noqa: E731
    assert torch.equal(run(), run())


@pytest.mark.parametrize("rule", [{"alpha": 1.5}, {"activation": "relu"}], ids=str)
def test_a_graph_reads_what_the_cache_holds_at_every_replay(rule):
    query, key, value = cache(4096)
    lengths = torch.tensor([4096, 100], device="cuda")
    attention = tamis.relu_attention if "activation" in rule else tamis.entmax_attention
    run = lambda: attention(query, key, value, enable_gqa=True, key_lengths=lengths, **rule)  # noqa: E731
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    key.copy_(torch.randn_like(key))
    lengths.copy_(torch.tensor([7, 3000]))
    graph.replay()
    assert torch.equal(out, run())


def test_growing_caches_share_their_compiled_kernels():
    from tamis.kernels.decode import device

    def variants():
        return sum(len(caches[0]) for caches in device.scores.device_caches.values())

    def run(context):
        tamis.entmax_attention(*cache(context), enable_gqa=True, backend="triton")

    for context in (1100, 1104, 2048, 4096):
        run(context)
    known = variants()
    for context in range(1200, 3000, 77):
        run(context)
    assert variants() == known


@pytest.mark.parametrize("mechanism", ["entmax15", "rela", "asentmax"])
def test_generation_decodes(mechanism, monkeypatch):
    from tamis.kernels.attention import arguments
    from tamis.kernels.decode import ops
    from tamis.models.causal_lm import CausalLM, CausalLMConfig

    config = CausalLMConfig(vocab_size=50, embed_dim=64, num_heads=4, num_kv_heads=2, num_layers=2, mechanism=mechanism)
    model = CausalLM(config).cuda().eval()
    tokens = torch.randint(50, (2, 90), device="cuda")
    with torch.no_grad():
        whole = model(tokens)
        monkeypatch.setattr(arguments, "MANY", 1)
        taken, plain = [], ops.decode
        monkeypatch.setattr(ops, "decode", lambda *a: taken.append(1) or plain(*a))
        cached = model.new_cache()
        model(tokens[:, :80], cache=cached)
        steps = torch.cat([model(tokens[:, i : i + 1], cache=cached) for i in range(80, 90)], 1)
    assert len(taken) == 2 * 10
    torch.testing.assert_close(steps, whole[:, 80:], rtol=1e-3, atol=1e-3)
