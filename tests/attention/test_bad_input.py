"""What does not fit is refused at the door, with what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis.attention.rules import Activation, Entmax
from tamis.functional import (
    attention,
    attention_backends,
    attention_scores,
    attention_statistics,
    attention_weights,
    attention_with_statistics,
    entmax_attention,
    paged_attention,
    relu_attention,
    softmax_attention,
    sparse_attention_weights,
    visible_counts,
)

WITH_RULE = (
    attention,
    attention_backends,
    attention_weights,
    sparse_attention_weights,
    attention_statistics,
    attention_with_statistics,
)
WITH_VALUES = (*WITH_RULE[:2], entmax_attention, relu_attention, softmax_attention, attention_with_statistics)
WITH_KEYS_ONLY = (attention_scores, visible_counts)


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K, V = x(2, 4, 6, 8), x(2, 4, 9, 8), x(2, 4, 9, 5)


def name_of(function: Any) -> str | None:
    return getattr(function, "__name__", None)


# inputs, type of the error, fragments of its message
INPUTS = {
    "query_3d": ((x(4, 6, 8), K, V), ValueError, ["query", "(batch, heads, length, head_dim)", "(4, 6, 8)"]),
    "key_3d": ((Q, x(4, 9, 8), V), ValueError, ["key must be", "(4, 9, 8)"]),
    "value_5d": ((Q, K, V[None]), ValueError, ["value must be", "(1, 2, 4, 9, 5)"]),
    "query_int": ((Q.int(), K, V), TypeError, ["query", "floating-point", "torch.int32"]),
    "key_list": ((Q, [1.0], V), TypeError, ["key", "floating-point", "list"]),
    "value_complex": ((Q, K, V.to(torch.complex64)), TypeError, ["value", "floating-point", "torch.complex64"]),
    "key_dtype": ((Q, K.double(), V), ValueError, ["key must match query", "torch.float32", "torch.float64"]),
    "value_dtype": ((Q, K, V.bfloat16()), ValueError, ["value must match query", "torch.float32", "torch.bfloat16"]),
    "key_device": ((Q, x(2, 4, 9, 8, device="meta"), V), ValueError, ["key must match query", "cpu", "meta"]),
    "value_device": ((Q, K, x(2, 4, 9, 5, device="meta")), ValueError, ["value must match query", "cpu", "meta"]),
    "batch": ((Q, x(1, 4, 9, 8), x(1, 4, 9, 5)), ValueError, ["one batch size", "(2, 4, 6, 8)", "(1, 4, 9, 8)"]),
    "value_batch": ((Q, K, x(3, 4, 9, 5)), ValueError, ["one batch size", "(3, 4, 9, 5)"]),
    "head_dim": ((Q, x(2, 4, 9, 7), V), ValueError, ["one head_dim", "(2, 4, 6, 8)", "(2, 4, 9, 7)"]),
    "value_length": ((Q, K, x(2, 4, 8, 5)), ValueError, ["key and value", "(2, 4, 9, 8)", "(2, 4, 8, 5)"]),
    "value_heads": ((Q, K, x(2, 2, 9, 5)), ValueError, ["key and value", "(2, 4, 9, 8)", "(2, 2, 9, 5)"]),
    "gqa_off": ((Q, K[:, :2], V[:, :2]), ValueError, ["4 query heads", "enable_gqa=True", "(2, 2, 9, 8)"]),
    "one_head": ((Q, K[:, :1], V[:, :1]), ValueError, ["4 query heads", "enable_gqa=True", "(2, 1, 9, 8)"]),
}


@pytest.mark.parametrize("case", INPUTS)
@pytest.mark.parametrize("function", WITH_VALUES, ids=name_of)
def test_inputs(function: Callable[..., Any], case: str) -> None:
    inputs, error, fragments = INPUTS[case]
    check(function, inputs, {}, error, fragments)


@pytest.mark.parametrize("case", [case for case in INPUTS if "value" not in case])
@pytest.mark.parametrize("function", WITH_KEYS_ONLY, ids=name_of)
def test_inputs_without_values(function: Callable[..., Any], case: str) -> None:
    inputs, error, fragments = INPUTS[case]
    check(function, inputs[:2], {}, error, fragments)


@pytest.mark.parametrize("function", WITH_VALUES, ids=name_of)
@pytest.mark.parametrize("key_heads", [3, 8, 0])
def test_heads_that_do_not_divide(function: Callable[..., Any], key_heads: int) -> None:
    inputs = (Q, x(2, key_heads, 9, 8), x(2, key_heads, 9, 5))
    fragments = ["multiple of the key heads", "(2, 4, 6, 8)", f"(2, {key_heads}, 9, 8)"]
    check(function, inputs, {"enable_gqa": True}, ValueError, fragments)


def check(function: Callable[..., Any], inputs: Any, options: dict, error: type[Exception], fragments: list) -> None:
    with pytest.raises(error) as raised:
        function(*inputs, **options)
    for fragment in fragments:
        assert fragment in str(raised.value)


# options of every function
OPTIONS = {
    "mask_int": ({"attn_mask": x(6, 9).int()}, TypeError, ["attn_mask", "boolean (True = attend)", "torch.int32"]),
    "mask_list": ({"attn_mask": [[True]]}, TypeError, ["attn_mask", "boolean", "list"]),
    "mask_uint8": ({"attn_mask": x(6, 9).byte()}, TypeError, ["attn_mask", "boolean", "torch.uint8"]),
    "mask_transposed": ({"attn_mask": x(9, 6)}, ValueError, ["attn_mask", "(9, 6)", "(2, 4, 6, 9)"]),
    "mask_padding": ({"attn_mask": x(2, 9).bool()}, ValueError, ["attn_mask", "(2, 9)", "(2, 4, 6, 9)"]),
    "mask_batch_3d": ({"attn_mask": x(2, 6, 9).bool()}, ValueError, ["attn_mask", "(2, 6, 9)", "(2, 4, 6, 9)"]),
    "mask_5d": ({"attn_mask": x(1, 2, 4, 6, 9)}, ValueError, ["attn_mask", "(1, 2, 4, 6, 9)", "(2, 4, 6, 9)"]),
    "mask_empty": ({"attn_mask": x(6, 0)}, ValueError, ["attn_mask", "(6, 0)", "(2, 4, 6, 9)"]),
    "window_float": ({"window": 2.0}, TypeError, ["window", "pair (left, right)", "float"]),
    "window_bool": ({"window": True}, TypeError, ["window", "pair (left, right)", "bool"]),
    "window_str": ({"window": "3"}, TypeError, ["window", "pair (left, right)", "str"]),
    "window_below": ({"window": -2}, ValueError, ["window", "None or -1", "-2"]),
    "window_one": ({"window": (3,)}, ValueError, ["window", "pair of counts", "(3,)"]),
    "window_three": ({"window": (1, 2, 3)}, ValueError, ["window", "pair of counts", "(1, 2, 3)"]),
    "window_pair_float": ({"window": (1.5, 2)}, ValueError, ["window", "pair of counts", "(1.5, 2)"]),
    "window_pair_below": ({"window": (None, -3)}, ValueError, ["window", "pair of counts", "(None, -3)"]),
    "window_pair_bool": ({"window": (True, 2)}, ValueError, ["window", "pair of counts", "(True, 2)"]),
    "query_positions_float": ({"query_positions": x(6)}, TypeError, ["query_positions", "integer", "torch.float32"]),
    "query_positions_list": ({"query_positions": [0, 1]}, TypeError, ["query_positions", "integer", "list"]),
    "query_positions_length": ({"query_positions": x(9).int()}, ValueError, ["query_positions", "(6,)", "(9,)"]),
    "query_positions_batch": ({"query_positions": x(3, 6).int()}, ValueError, ["(6,) or (2, 6)", "(3, 6)"]),
    "query_positions_3d": ({"query_positions": x(1, 1, 6).int()}, ValueError, ["(6,) or (2, 6)", "(1, 1, 6)"]),
    "query_positions_0d": ({"query_positions": x().int()}, ValueError, ["(6,) or (2, 6)", "()"]),
    "key_positions_alone": ({"key_positions": x(9).int()}, ValueError, ["key_positions", "query_positions"]),
    "key_positions_length": (
        {"key_positions": x(6).int(), "query_positions": x(6).int()},
        ValueError,
        ["key_positions", "(9,)", "(6,)"],
    ),
    "key_positions_bool": (
        {"key_positions": x(9).bool(), "query_positions": x(6).int()},
        TypeError,
        ["key_positions", "integer", "torch.bool"],
    ),
    "key_lengths_float": ({"key_lengths": x(2)}, TypeError, ["key_lengths", "integer", "torch.float32"]),
    "key_lengths_list": ({"key_lengths": [3, 4]}, TypeError, ["key_lengths", "integer", "list"]),
    "key_lengths_size": ({"key_lengths": x(3).int()}, ValueError, ["key_lengths", "(2,)", "(3,)"]),
    "key_lengths_one": ({"key_lengths": x(1).int()}, ValueError, ["key_lengths", "(2,)", "(1,)"]),
    "key_lengths_2d": ({"key_lengths": x(2, 1).int()}, ValueError, ["key_lengths", "(2,)", "(2, 1)"]),
    "key_lengths_negative": ({"key_lengths": torch.tensor([3, -1])}, ValueError, ["key_lengths", "[0, 9]", "[3, -1]"]),
    "key_lengths_beyond": ({"key_lengths": torch.tensor([10, 9])}, ValueError, ["key_lengths", "[0, 9]", "[10, 9]"]),
    "slopes_int": ({"alibi_slopes": x(4).int()}, TypeError, ["alibi_slopes", "floating-point", "torch.int32"]),
    "slopes_float": ({"alibi_slopes": 0.5}, TypeError, ["alibi_slopes", "floating-point", "float"]),
    "slopes_heads": ({"alibi_slopes": x(3)}, ValueError, ["alibi_slopes", "(4,) or (2, 4)", "(3,)"]),
    "slopes_batch": ({"alibi_slopes": x(3, 4)}, ValueError, ["alibi_slopes", "(4,) or (2, 4)", "(3, 4)"]),
    "slopes_4d": ({"alibi_slopes": x(1, 4, 1, 1)}, ValueError, ["alibi_slopes", "(4,) or (2, 4)", "(1, 4, 1, 1)"]),
    "cu_seqlens_batch": ({"cu_seqlens_q": x(2).int()}, ValueError, ["cu_seqlens_q", "(1, heads, tokens, head_dim)"]),
    "cu_seqlens_lengths": (
        {"cu_seqlens_q": x(2).int(), "key_lengths": x(2).int()},
        ValueError,
        ["key_lengths and cu_seqlens exclude each other"],
    ),
}
FUNCTIONS = (*WITH_VALUES, attention_weights, sparse_attention_weights, attention_statistics, *WITH_KEYS_ONLY)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_options(function: Callable[..., Any], case: str) -> None:
    options, error, fragments = OPTIONS[case]
    check(function, (Q, K) if function in WITH_KEYS_ONLY else (Q, K, V), options, error, fragments)


CU = torch.tensor([0, 4, 6])
PACKED = {
    "keys_only": ({"cu_seqlens_k": CU}, ValueError, ["need cu_seqlens_q"]),
    "float": ({"cu_seqlens_q": CU.float()}, TypeError, ["cu_seqlens_q", "integer", "torch.float32"]),
    "keys_float": ({"cu_seqlens_q": CU, "cu_seqlens_k": CU.double()}, TypeError, ["cu_seqlens_k", "torch.float64"]),
    "list": ({"cu_seqlens_q": [0, 4, 6]}, TypeError, ["cu_seqlens_q", "integer", "list"]),
    "2d": ({"cu_seqlens_q": CU[None]}, ValueError, ["1-D", "(sequences + 1)", "(1, 3)"]),
    "lengths": ({"cu_seqlens_q": CU, "cu_seqlens_k": CU[:2]}, ValueError, ["one length", "(3,)", "(2,)"]),
    "too_short": ({"cu_seqlens_q": CU[:1]}, ValueError, ["sequences + 1", "(1,)"]),
    "falling": ({"cu_seqlens_q": torch.tensor([0, 5, 4])}, ValueError, ["cu_seqlens_q", "rise from 0", "[0, 5, 4]"]),
    "start": ({"cu_seqlens_q": torch.tensor([1, 4, 6])}, ValueError, ["cu_seqlens_q", "rise from 0", "[1, 4, 6]"]),
    "beyond": ({"cu_seqlens_q": torch.tensor([0, 4, 7])}, ValueError, ["cu_seqlens_q", "at most 6", "[0, 4, 7]"]),
    "keys_beyond": (
        {"cu_seqlens_q": CU, "cu_seqlens_k": torch.tensor([0, 4, 10])},
        ValueError,
        ["cu_seqlens_k", "at most 9", "[0, 4, 10]"],
    ),
    "key_lengths": ({"cu_seqlens_q": CU, "key_lengths": CU[:1]}, ValueError, ["exclude each other"]),
}


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("function", WITH_VALUES, ids=name_of)
def test_packed(function: Callable[..., Any], case: str) -> None:
    options, error, fragments = PACKED[case]
    check(function, (Q[:1], K[:1], V[:1]), options, error, fragments)


@pytest.mark.parametrize("function", WITH_VALUES, ids=name_of)
@pytest.mark.parametrize("dropout_p", [-0.1, 1.1, math.nan, math.inf])
def test_dropout(function: Callable[..., Any], dropout_p: float) -> None:
    check(function, (Q, K, V), {"dropout_p": dropout_p}, ValueError, ["dropout_p must lie in [0, 1]", str(dropout_p)])


@pytest.mark.parametrize("function", [*WITH_VALUES, attention_weights, attention_scores], ids=name_of)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scale(function: Callable[..., Any], scale: float) -> None:
    inputs = (Q, K) if function is attention_scores else (Q, K, V)
    check(function, inputs, {"scale": scale}, ValueError, ["scale must be finite", str(scale)])


ALPHAS = {
    "below": (0.99, ValueError, ["[1, 2]", "0.99"]),
    "above": (2.01, ValueError, ["[1, 2]", "2.01"]),
    "zero": (0.0, ValueError, ["alpha", "0.0"]),
    "nan": (math.nan, ValueError, ["alpha", "nan"]),
    "inf": (math.inf, ValueError, ["alpha", "inf"]),
    "str": ("1.5", TypeError, ["alpha", "number or a tensor", "str"]),
    "bool": (True, TypeError, ["alpha", "number or a tensor", "bool"]),
    "none": (None, TypeError, ["alpha", "number or a tensor", "NoneType"]),
    "tensor_below": (torch.tensor([1.5, 0.5, 1.5, 1.5]), ValueError, ["[1, 2]", "0.5"]),
    "tensor_above": (torch.tensor([1.5, 1.0, 2.0, 2.5]), ValueError, ["[1, 2]", "2.5"]),
    "tensor_scalar": (torch.tensor(3.0), ValueError, ["[1, 2]", "3"]),
    "tensor_nan": (torch.tensor([1.5, math.nan, 1.5, 1.5]), ValueError, ["alpha", "nan"]),
    "tensor_int": (torch.tensor([1, 2, 1, 2]), TypeError, ["alpha", "floating-point", "torch.int64"]),
    "shape_heads": (torch.ones(3), ValueError, ["alpha", "(4,)", "(3,)"]),
    "shape_queries": (torch.ones(6), ValueError, ["alpha", "(4,)", "(6,)"]),
    "shape_2d": (torch.ones(2, 4), ValueError, ["alpha", "(2, 4, 6, 1)", "(2, 4)"]),
    "shape_keys": (torch.ones(2, 4, 6, 9), ValueError, ["alpha", "(2, 4, 6, 1)", "(2, 4, 6, 9)"]),
    "shape_5d": (torch.ones(1, 2, 4, 6, 1), ValueError, ["alpha", "(2, 4, 6, 1)", "(1, 2, 4, 6, 1)"]),
}


@pytest.mark.parametrize("case", ALPHAS)
@pytest.mark.parametrize("function", [entmax_attention, *WITH_RULE], ids=name_of)
def test_alpha(function: Callable[..., Any], case: str) -> None:
    alpha, error, fragments = ALPHAS[case]
    options = {"alpha": alpha} if function is entmax_attention else {"rule": Entmax(alpha)}
    check(function, (Q, K, V), options, error, fragments)


@pytest.mark.parametrize("rule", ["entmax", 1.5, None, Entmax])
@pytest.mark.parametrize("function", WITH_RULE, ids=name_of)
def test_what_is_no_rule(function: Callable[..., Any], rule: Any) -> None:
    check(function, (Q, K, V), {"rule": rule}, TypeError, ["rule must be a Rule, such as Entmax(1.5)", repr(rule)])


@pytest.mark.parametrize("function", [relu_attention, *WITH_RULE], ids=name_of)
@pytest.mark.parametrize(
    ("activation", "nearest"), [("relu2", "relu"), ("sigmod", "sigmoid"), ("squared-relu", "squared_relu")]
)
def test_unknown_activation(function: Callable[..., Any], activation: str, nearest: str) -> None:
    fragments = ["activation must be one of relu, squared_relu", repr(activation), f"did you mean {nearest!r}"]
    options = {"activation": activation} if function is relu_attention else {"rule": Activation(activation)}
    check(function, (Q, K, V), options, ValueError, fragments)


@pytest.mark.parametrize("activation", ["", "swish", "ЯЯЯ"])
def test_activation_like_none(activation: str) -> None:
    fragments = ["activation must be one of relu", repr(activation)]
    check(relu_attention, (Q, K, V), {"activation": activation}, ValueError, fragments)


@pytest.mark.parametrize("activation", [None, torch.relu, 3], ids=["none", "function", "int"])
def test_activation_of_a_wrong_type(activation: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="activation"):
        relu_attention(Q, K, V, activation=activation)


WITH_BACKEND = (
    attention,
    entmax_attention,
    relu_attention,
    softmax_attention,
    sparse_attention_weights,
    attention_statistics,
    attention_with_statistics,
)


@pytest.mark.parametrize("function", WITH_BACKEND, ids=name_of)
@pytest.mark.parametrize("backend", ["cuda", "Triton", "", None])
def test_unknown_backend(function: Callable[..., Any], backend: str) -> None:
    fragments = ["backend must be one of auto, reference, sdpa, triton, native, blocked, dense", repr(backend)]
    check(function, (Q, K, V), {"backend": backend}, ValueError, fragments)


@pytest.mark.parametrize("function", WITH_BACKEND, ids=name_of)
def test_triton_on_a_cpu_says_why_not(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r'backend="triton": .{10,}'):
        function(Q, K, V, backend="triton")


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_unknown_options(function: Callable[..., Any]) -> None:
    inputs = (Q, K) if function in WITH_KEYS_ONLY else (Q, K, V)
    check(function, inputs, {"widnow": 3}, TypeError, ["widnow"])


@pytest.mark.parametrize("function", WITH_VALUES, ids=name_of)
def test_the_same_input_without_the_mistake_is_accepted(function: Callable[..., Any]) -> None:
    """So that no error above comes from the inputs that the cases share."""
    function(Q, K, V, attn_mask=x(6, 9), window=(1, None), key_lengths=torch.tensor([9, 3]), alibi_slopes=x(2, 4))
    function(Q[:1], K[:1], V[:1], cu_seqlens_q=CU, cu_seqlens_k=CU.int())


NOT_NUMBERS = [("a", "got str"), (True, "got bool"), (torch.tensor(1.0, requires_grad=True), "got a tensor")]


@pytest.mark.parametrize("name", ["scale", "dropout_p"])
@pytest.mark.parametrize(("value", "got"), NOT_NUMBERS)
def test_numbers_are_numbers(name, value, got):
    with pytest.raises(TypeError, match=f"{name} must be a number, {got}"):
        entmax_attention(x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), **{name: value})


@pytest.mark.parametrize("name", ["bias", "slope"])
@pytest.mark.parametrize(("value", "got"), [*NOT_NUMBERS, (None, "got NoneType")])
def test_numbers_of_rules_are_numbers(name, value, got):
    with pytest.raises(TypeError, match=f"{name} must be a number, {got}"):
        attention(x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), rule=Activation("relu", **{name: value}))


def test_numbers_are_finite():
    inputs = x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4)
    with pytest.raises(ValueError, match="bias must be finite, got inf"):
        relu_attention(*inputs, bias=math.inf)
    with pytest.raises(ValueError, match=r"alpha must be a finite number above 0, got about 2\*\*1329"):
        entmax_attention(*inputs, alpha=10**400)


@pytest.mark.parametrize("name", ["is_causal", "enable_gqa"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_switches_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got {value!r}"):
        entmax_attention(x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), **{name: value})


def test_a_generator_is_one():
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator, got int"):
        entmax_attention(x(1, 2, 3, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), dropout_p=0.1, generator=3)


MAPPED = {
    "query": (x(6, 1, 2, 3, 4), lambda q: sparse_attention_weights(q, x(1, 2, 5, 4))),
    "key": (x(6, 1, 2, 5, 4), lambda k: sparse_attention_weights(x(1, 2, 3, 4), k)),
    "mask": (x(6, 3, 5).bool(), lambda mask: sparse_attention_weights(x(1, 2, 3, 4), x(1, 2, 5, 4), attn_mask=mask)),
    "slopes": (x(6, 2), lambda m: sparse_attention_weights(x(1, 2, 3, 4), x(1, 2, 5, 4), alibi_slopes=m)),
    "alpha": (x(6, 2) + 1.5, lambda a: sparse_attention_weights(x(1, 2, 3, 4), x(1, 2, 5, 4), rule=Entmax(a))),
}


@pytest.mark.parametrize("case", MAPPED)
def test_sparse_weights_cannot_be_stacked(case):
    many, function = MAPPED[case]
    with pytest.raises(ValueError, match="vmap cannot stack it"):
        torch.func.vmap(function)(many)


def test_sparse_weights_of_what_is_not_mapped_pass_through_vmap():
    query, key = x(1, 2, 3, 4), x(1, 2, 5, 4)
    found = torch.func.vmap(lambda y: sparse_attention_weights(query, key).val.sum() + y)(x(3))
    torch.testing.assert_close(found, torch.full((3,), 6.0))


def test_dropout_of_many_calls_at_once():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 50, 4)

    def call(k: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return attention(query, k, k, dropout_p=0.5, generator=generator)

    same, different = (torch.vmap(call, randomness=kind)(key.expand(2, 1, 2, 50, 4)) for kind in ("same", "different"))
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    with pytest.raises(ValueError, match="takes no generator"):
        torch.vmap(lambda k: call(k, torch.Generator()), randomness="different")(key.expand(2, 1, 2, 50, 4))


@pytest.mark.parametrize("backend", ["auto", "dense", "blocked", "native"])
@pytest.mark.parametrize("window", [2**31 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 10**400])
def test_a_window_beyond_all_distances_is_none(backend: str, window: int):
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    for sides, plain in ((window, None), ((window, 0), (None, 0)), ((1, window), (1, None))):
        found = attention(query, key, key, window=sides, backend=backend)
        torch.testing.assert_close(found, attention(query, key, key, window=plain, backend="dense"))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [2**30, 2**31 - 1, 2**31, 2**63 - 1])
def test_a_window_beyond_all_distances_is_none_on_a_gpu(window: int):
    query, key = torch.randn(1, 2, 70, 16, device="cuda"), torch.randn(1, 2, 90, 16, device="cuda")
    for sides, plain in ((window, None), ((window, 0), (None, 0)), ((1, window), (1, None))):
        found = attention(query, key, key, window=sides, backend="triton")
        torch.testing.assert_close(found, attention(query, key, key, window=plain, backend="triton"))


def test_divide_by_count_is_called_as_it_is():
    with pytest.raises(TypeError, match="divide_by_count must be True or False, got 'no'"):
        relu_attention(Q, K, V, divide_by_count="no")


def test_pages_that_are_not_there():
    pool, query = x(0, 16, 2, 8), x(1, 2, 1, 8)
    with pytest.raises(ValueError, match="block_table must name pages, and there are none, got 0"):
        paged_attention(query, pool, pool, torch.zeros(1, 1, dtype=torch.long), key_lengths=torch.tensor([4]))
    pool = x(3, 16, 2, 8)
    with pytest.raises(TypeError, match="page_norms must be an fp32 tensor, as a rounded norm is no bound, got list"):
        paged_attention(
            query, pool, pool, torch.zeros(1, 1, dtype=torch.long), key_lengths=torch.tensor([4]), page_norms=[1]
        )


@pytest.mark.parametrize("function", [entmax_attention, relu_attention, softmax_attention])
def test_heads_of_size_zero_have_equal_scores(function):
    query, key = torch.zeros(1, 2, 3, 0, requires_grad=True), torch.zeros(1, 2, 5, 0)
    value = torch.randn(1, 2, 5, 4, requires_grad=True)
    out = function(query, key, value)
    share = 0.0 if function is relu_attention else 0.2
    torch.testing.assert_close(out, share * value.sum(2, keepdim=True).expand_as(out))
    out.sum().backward()
    torch.testing.assert_close(value.grad, torch.full_like(value, 3 * share))
    assert function(query, key, value[..., :0]).shape == (1, 2, 3, 0)
