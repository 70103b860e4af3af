"""The kernels in Triton's interpreter: slow, on the CPU, and the same code."""

import pytest
import torch

import tamis
from kernels.cases import ADVERSARIAL, FACTORS, Problem, check, check_mass, check_statistics, covering, describe

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs compiled in test_compiled.py")

SMALL = {
    **FACTORS,
    "lengths": ((37, 37), (1, 20), (20, 70), (5, 150)),
    "head_dims": ((16, 16), (24, 40)),
    "structure": ("full", "causal", "causal window", "causal alibi", "positions", "packed"),
    "layout": ("contiguous", "odd strides"),
}


@pytest.mark.parametrize("case", covering(SMALL), ids=describe)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_pairs_of_features(case, known_dropout):
    check(Problem(case, torch.float32))


HALF = {**SMALL, "lengths": ((37, 37), (5, 150)), "structure": ("causal", "packed"), "mask": ("none",), "groups": (2,)}


@pytest.mark.parametrize("case", covering(HALF)[:6], ids=describe)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fp16(case, known_dropout):
    check(Problem(case, torch.float16))


def inputs(*shape, **options):
    return [torch.randn(shape, **options) for _ in range(3)]


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
@pytest.mark.parametrize("kind", ADVERSARIAL)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mass_is_one_on_adversarial_rows(alpha, kind):
    check_mass(kind, alpha, 150)


def test_empty_lengths():
    for num_q, num_k in ((0, 3), (3, 0), (0, 0)):
        query = torch.randn(2, 2, num_q, 16, requires_grad=True)
        key = torch.randn(2, 2, num_k, 16)
        out = tamis.entmax_attention(query, key, key, backend="triton")
        (grad,) = torch.autograd.grad(out.sum(), query)
        assert (out == 0.0).all()
        assert (grad == 0.0).all()


def test_nan_in_padding_stays_there():
    query, key, value = inputs(1, 2, 20, 16)
    clean = tamis.entmax_attention(query, key, value, key_lengths=torch.tensor([15]), backend="triton")
    key[:, :, 15:], value[:, :, 15:] = torch.nan, torch.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = tamis.entmax_attention(*leaves, key_lengths=torch.tensor([15]), backend="triton")
    torch.testing.assert_close(out, clean, rtol=0.0, atol=0.0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("rule", [{"alpha": 1.5}, {"alpha": 2.0}, {"alpha": 1.2}, {"activation": "relu"}], ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_that_is_seen_shows_in_its_rows_and_no_others(rule, length):
    query, key, value = inputs(1, 1, length, 16)
    attention = tamis.relu_attention if "activation" in rule else tamis.entmax_attention
    clean = attention(query, key, value, is_causal=True, backend="triton", **rule)
    query[:, :, 3], key[:, :, 12] = torch.nan, torch.nan
    out = attention(query, key, value, is_causal=True, backend="triton", **rule)
    wrong = out.isnan().all(-1).flatten()
    expected = (torch.arange(length) == 3) | (torch.arange(length) >= 12)
    assert torch.equal(wrong, expected)
    # Rows of a tile share their number of sweeps, which the bad rows no longer ask for: equal to the solver's accuracy.
    torch.testing.assert_close(out[:, :, ~expected], clean[:, :, ~expected], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["key_lengths", "alibi_slopes", "positions", "cu_seqlens"])
def test_small_vectors_may_have_any_strides(name):
    query, key, value = inputs(1 if name == "cu_seqlens" else 2, 2, 20, 16)
    options = {
        "key_lengths": {"key_lengths": torch.tensor([7, 15])},
        "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.1])},
        "positions": {"query_positions": torch.arange(20).flip(0), "is_causal": True},
        "cu_seqlens": {"cu_seqlens_q": torch.tensor([0, 7, 20])},
    }[name]
    strided = {k: torch.stack([v, 0 * v], -1)[..., 0] if torch.is_tensor(v) else v for k, v in options.items()}
    plain = tamis.entmax_attention(query, key, value, backend="triton", **options)
    assert torch.equal(tamis.entmax_attention(query, key, value, backend="triton", **strided), plain)


def test_dropout_follows_the_generator():
    query, key, value = inputs(2, 2, 30, 16)

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return tamis.entmax_attention(query, key, value, dropout_p=0.5, generator=generator, backend="triton")

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_dropout_rate_and_independence():
    case = {name: values[0] for name, values in FACTORS.items()} | {"dropout": 0.3, "lengths": (256, 256)}
    kept = (Problem(case, torch.float32).kept(987654321) > 0.0).double().flatten(0, 1)
    n = kept.numel()
    assert abs(kept.mean().item() - 0.7) < 4 * (0.21 / n) ** 0.5
    for shift in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 1, -1)):
        other = kept.roll(shift, (0, 1, 2))
        covariance = ((kept - 0.7) * (other - 0.7)).mean().item()
        assert abs(covariance) < 5 * 0.21 / n**0.5


def test_opcheck():
    from tamis.kernels.attention.ops import attend_backward, attend_forward

    query, key, value = inputs(1, 2, 8, 16)
    e = torch.tensor([0.3, 0.6])
    arguments = (query, key, value, e, *[None] * 9, "power", 0.0, 0.0, 0.25, -1, 0, 0.0, False)
    torch.library.opcheck(attend_forward, (*arguments, True))
    out, out2, rows, bits, _ = attend_forward(*arguments, True)
    torch.library.opcheck(attend_backward, (*arguments, torch.randn(out.shape), out2, rows, bits, True))


def test_activation_checkpointing():
    query, key, value = inputs(1, 2, 20, 16, requires_grad=True)

    def attention(*x):
        return tamis.entmax_attention(*x, is_causal=True, backend="triton")

    plain = torch.autograd.grad(attention(query, key, value).sum(), (query, key, value))
    out = torch.utils.checkpoint.checkpoint(attention, query, key, value, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sum(), (query, key, value)), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_compile_whole_graph_with_dynamic_lengths():
    alpha = torch.tensor([1.3, 1.7], requires_grad=True)

    def loss(query, key, value):
        return tamis.entmax_attention(query * 2.0, key, value, alpha=alpha, backend="triton").square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 10, 150):
        leaves = inputs(1, 2, length, 16, requires_grad=True)
        expected = torch.autograd.grad(loss(*leaves), (*leaves, alpha))
        for a, b in zip(torch.autograd.grad(compiled(*leaves), (*leaves, alpha)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["dtype", "head size", "alpha per query", "mask with gradient", "activation", "vmap"])
def test_obstacles_are_named(what):
    query, key, value = inputs(1, 2, 4, 16)
    calls = {
        "dtype": (
            lambda: tamis.entmax_attention(query.double(), key.double(), value.double(), backend="triton"),
            "float64",
        ),
        "head size": (lambda: tamis.entmax_attention(*inputs(1, 1, 4, 300), backend="triton"), "256"),
        "alpha per query": (
            lambda: tamis.entmax_attention(query, key, value, alpha=torch.full((1, 2, 4, 1), 1.5), backend="triton"),
            "one per head",
        ),
        "mask with gradient": (
            lambda: tamis.entmax_attention(query, key, value, torch.zeros(4, 4, requires_grad=True), backend="triton"),
            "attn_mask",
        ),
        "activation": (
            lambda: tamis.relu_attention(query, key, value, activation="identity", backend="triton"),
            "identity",
        ),
        "vmap": (
            lambda: torch.vmap(lambda q: tamis.entmax_attention(q, key, value, backend="triton"))(query[None]),
            "torch.func",
        ),
    }
    call, reason = calls[what]
    with pytest.raises(RuntimeError, match=f'backend="triton": .*{reason}'):
        call()


STATISTICS = {**SMALL, "lengths": ((20, 70), (5, 150)), "dropout": (0.3,), "head_dims": ((16, 16),)}


@pytest.mark.parametrize("case", covering(STATISTICS)[::12], ids=describe)
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_statistics(case, long, request):
    if long:
        request.getfixturevalue("everything_is_long")
    problem = Problem(case, torch.float32)
    check_statistics(problem)
