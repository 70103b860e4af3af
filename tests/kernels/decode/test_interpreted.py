"""Decoding in Triton's interpreter, where any number of keys is many."""

import pytest
import torch

import tamis
from kernels.cases import (
    ADVERSARIAL,
    FACTORS,
    Problem,
    check,
    check_mass,
    covering,
    decoded,
    error,
    parameters,
    poisoned,
)
from kernels.decode import paged_cases
from kernels.decode.paged_cases import Paged

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs compiled in test_compiled.py"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
decoding = pytest.mark.usefixtures("everything_is_decoding")

FEW = {
    **FACTORS,
    "lengths": ((1, 150), (1, 64), (2, 90)),
    "head_dims": ((16, 16), (24, 40)),
    "structure": ("full", "causal", "causal window", "causal alibi", "positions"),
    "dropout": (0.0,),
    "layout": ("contiguous", "odd strides"),
}


@decoding
@pytest.mark.parametrize("case", parameters(covering(FEW), every=9))
def test_pairs_of_features(case):
    check(Problem(case, torch.float32), decoded)


MANY_ROWS = {name: values[0] for name, values in FEW.items()} | {"groups": 4, "structure": "causal"}


@decoding
@pytest.mark.parametrize("head_dims", [(256, 160), (24, 40)], ids=str)
def test_more_rows_than_a_tile_holds_in_fp16(head_dims):
    case = MANY_ROWS | {"rule": "relu", "lengths": (16, 40), "head_dims": head_dims}
    check(Problem(case, torch.float16), decoded)


@decoding
@pytest.mark.parametrize(
    ("rule", "lengths", "structure"),
    [
        (1.5, (8, 150), "causal alibi"),
        (1.5, (15, 600), "positions"),
        (2.0, (15, 90), "causal window"),
        ("learned", (8, 150), "causal window"),
    ],
    ids=str,
)
def test_many_rows_of_a_tile(rule, lengths, structure):
    case = MANY_ROWS | {"rule": rule, "lengths": lengths, "structure": structure, "mask": "lengths"}
    check(Problem(case, torch.float32), decoded)


@decoding
@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_mass_is_one_on_adversarial_rows(alpha, kind):
    check_mass(kind, alpha, 300)


@decoding
@pytest.mark.parametrize("case", parameters(covering(paged_cases.FACTORS), every=5))
def test_pages(case):
    paged = Paged(case, torch.float32)
    exact = paged.exact()
    assert error(paged.run(backend="triton"), exact) < 5e-6
    assert error(paged.run(), exact) < 5e-6  # the plain path
    assert (exact[2] == 0.0).all()


FAR = {"structure": "alibi", "page": 16, "groups": 1, "queries": 1, "norms": True}


@pytest.mark.parametrize(("rule", "groups", "queries"), [(1.5, 1, 1), ("relu", 1, 1), (1.5, 2, 16)])
def test_far_pages_are_not_read_and_change_nothing(rule, groups, queries):
    paged = Paged(FAR | {"rule": rule, "groups": groups, "queries": queries}, torch.float32)
    paged.options["alibi_slopes"] = torch.tensor([4.0, 1.0])
    plain = paged.run(backend="triton", page_norms=None)
    assert torch.equal(paged.run(backend="triton"), plain)
    paged.key[paged.table[0, :4].long()] = torch.nan
    assert torch.equal(paged.run(backend="triton"), plain)
    assert paged.run(backend="triton", page_norms=None)[0].isnan().any()


@decoding
def test_a_far_key_counts_where_it_outweighs_its_distance():
    paged = Paged(FAR | {"rule": 1.5}, torch.float32)
    paged.options["alibi_slopes"] = torch.tensor([0.5, 0.0])
    paged.key[paged.table[0, 0].long(), 3] = 100.0 * paged.query[0, :, 0] / paged.query[0, :, 0].norm(dim=-1)[:, None]
    paged.norms = paged.key.nan_to_num().norm(dim=-1).amax(1)
    assert error(paged.run(backend="triton"), paged.exact()) < 5e-6
    paged.value[paged.table[0, 0].long(), 3] = torch.nan
    assert paged.run(backend="triton")[0].isnan().all()


@decoding
@pytest.mark.parametrize("queries", [1, 16])
def test_values_without_a_weight_are_not_read(queries):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, queries, 16), 6.0 * torch.randn(1, 1, 400, 16), torch.randn(1, 1, 400, 16)
    run = lambda: tamis.entmax_attention(query, key, value, enable_gqa=True, backend="triton")  # noqa: E731
    plain = run()
    support = (tamis.attention_weights(query, key, enable_gqa=True) > 0.0).any(2).any(1).flatten()
    assert support.float().mean() < 0.2
    value[:, :, ~support] = torch.nan
    assert torch.equal(run(), plain)


@decoding
@pytest.mark.parametrize("rule", [{"alpha": 1.5}, {"alpha": torch.tensor([1.2, 1.7])}, {"activation": "relu"}], ids=str)
def test_nan_shows_in_the_rows_that_see_it_and_in_no_others(rule):
    query, key, value = torch.randn(1, 2, 1, 16), torch.randn(2, 2, 100, 16), torch.randn(2, 2, 100, 16)
    query = query.expand(2, -1, -1, -1)
    key[0, 1, 50], key[1, :, 70:], value[1, :, 70:] = torch.nan, torch.nan, torch.nan
    attention = tamis.relu_attention if "activation" in rule else tamis.entmax_attention
    with poisoned():
        out = attention(query, key, value, key_lengths=torch.tensor([100, 70]), backend="triton", **rule)
    assert torch.equal(out.isnan().all(-1).flatten(), torch.tensor([False, True, False, False]))
    assert torch.equal(out.isnan().any(-1), out.isnan().all(-1))


def test_decoding_is_what_few_queries_of_many_keys_without_gradients_do(monkeypatch):
    from tamis.kernels.attention import ops as attention
    from tamis.kernels.decode import ops as decoding

    taken = []
    monkeypatch.setattr(decoding, "decode", lambda a: taken.append("decode") or a.query)
    monkeypatch.setattr(attention, "_forward", lambda *a: taken.append("forward") or [a[0]] * 5)

    def path(queries=1, keys=512, **options):
        query, key = torch.randn(1, 1, queries, 16), torch.randn(1, 1, keys, 16)
        query.requires_grad_(options.pop("trains", False))
        tamis.entmax_attention(query, key, key, backend="triton", **options)
        return taken.pop()

    assert path() == path(keys=5000, is_causal=True) == path(window=5) == "decode"
    assert path(trains=True) == path(dropout_p=0.1) == "forward"
    for queries, keys in ((1, 512), (4, 512), (7, 896), (16, 2048)):
        assert path(queries, keys) == "decode"
        assert path(queries, keys - 1) == "forward"
    assert path(17, 5000) == "forward"
    packed = {"cu_seqlens_q": torch.tensor([0, 1]), "cu_seqlens_k": torch.tensor([0, 512])}
    assert path(**packed) == "forward"
    with torch.no_grad():
        assert path(trains=True) == "decode"


@decoding
def test_growing_caches_share_their_kernels():
    from tamis.kernels.decode import device
    from tamis.kernels.runtime.launch import plans

    for keys in (65, 96, 100, 128):
        tamis.entmax_attention(torch.randn(1, 1, 1, 16), *[torch.randn(1, 1, keys, 16)] * 2, backend="triton")
    own = [plan for (kernel, _), plan in plans.items() if kernel is device.scores]
    assert len(own) == 4
    assert len({plan._launch._constants for plan in own}) == 1


@decoding
def test_lengths_of_zero():
    for num_q, num_k in ((0, 3), (3, 0)):
        out = tamis.entmax_attention(
            torch.randn(1, 2, num_q, 16), *[torch.randn(1, 2, num_k, 16)] * 2, backend="triton"
        )
        assert out.shape == (1, 2, num_q, 16)
        assert (out == 0.0).all()


def test_opcheck():
    from tamis.kernels.decode.ops import decode_forward

    query, key = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 40, 16)
    options = (None, *[None] * 9, "squares", 0.5, 0.0, 0.25, -1, 0, 0.0, False)
    torch.library.opcheck(decode_forward, (query, key, key, *options, None, None))
    pages, table, lengths = torch.randn(3, 2, 16, 16), torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20])
    options = (None, None, None, lengths, *[None] * 6, *options[10:])
    torch.library.opcheck(decode_forward, (query, pages, pages, *options, table, None))


@decoding
def test_compile_whole_graph_with_dynamic_lengths():
    def attention(query, key):
        return tamis.relu_attention(query * 2.0, key, key, backend="triton")

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (40, 70):
        inputs = torch.randn(1, 1, 1, 16), torch.randn(1, 1, length, 16)
        torch.testing.assert_close(compiled(*inputs), attention(*inputs))


BAD = {
    "block_table must be an integer": {"block_table": torch.zeros(2, 3)},
    r"block_table must be \(2, pages": {"block_table": torch.zeros(3, 3, dtype=torch.long)},
    r"block_table must lie in \[0, 4\]": {"block_table": torch.full((2, 3), 5)},
    r"key_lengths must lie in \[0, 48\]": {"key_lengths": torch.tensor([49, 1])},
    "must be alike": {"value_pages": torch.zeros(5, 8, 1, 16)},
    "key_pages must be": {"key_pages": torch.zeros(5, 16, 16)},
    r"page_norms must be \(5, 1\)": {"page_norms": torch.zeros(5, 2)},
    "a multiple of 16": {
        "page_norms": torch.zeros(5, 1),
        **dict.fromkeys(("key_pages", "value_pages"), torch.zeros(5, 8, 1, 16)),
        "key_lengths": torch.tensor([3, 1]),
    },
    "page_norms must be an fp32 tensor": {"page_norms": torch.zeros(5, 1, dtype=torch.bfloat16)},
    "backend must be": {"backend": "fast"},
    "must match query": dict.fromkeys(("key_pages", "value_pages"), torch.zeros(5, 16, 1, 16, dtype=torch.float16)),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_said(message):
    pages = torch.zeros(5, 16, 1, 16)
    good = {
        "query": torch.zeros(2, 2, 1, 16),
        "key_pages": pages,
        "value_pages": pages,
        "block_table": torch.zeros(2, 3, dtype=torch.long),
        "key_lengths": torch.tensor([40, 3]),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        tamis.paged_attention(**{**good, **BAD[message]})


@pytest.mark.parametrize(("queries", "trains", "reason"), [(17, False, "up to 16"), (1, True, "no gradient")])
def test_what_pages_have_no_kernel_for(queries, trains, reason):
    query, pages = torch.randn(1, 1, queries, 16, requires_grad=trains), torch.randn(4, 16, 1, 16)
    arguments = (query, pages, pages, torch.arange(4)[None], torch.tensor([60]))
    with pytest.raises(RuntimeError, match=f'backend="triton": .*{reason}'):
        tamis.paged_attention(*arguments, backend="triton")
    assert tamis.paged_attention(*arguments).requires_grad == trains
