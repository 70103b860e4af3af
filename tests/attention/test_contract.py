"""The attention functions against the oracle: masks, alphas, activations, sizes, packing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cases import (
    ACTIVATIONS,
    CASES,
    EXACT,
    INF,
    MASK_SHAPES,
    Case,
    bools,
    call,
    every_function,
    leaf,
    oracle,
    randn,
    rule_options,
    some_inf,
)
from tamis.functional import entmax_attention, relu_attention


@every_function
@pytest.mark.parametrize("case", CASES)
def test_forward(name: str, case: str) -> None:
    inputs = CASES[case].inputs()
    out = call(name, inputs, **CASES[case].arguments)
    torch.testing.assert_close(out, oracle(*inputs, **CASES[case].arguments, **rule_options(name)), **EXACT)


@pytest.mark.parametrize("name", ["entmax", "softmax", "sigmoid"])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float_inf"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_of_every_shape(name: str, shape: tuple[int, ...], kind: str, is_causal: bool) -> None:
    mask = bools(*shape, seed=len(shape)) if kind == "bool" else randn(*shape, seed=1)
    if kind == "float_inf":
        mask = some_inf(mask, 2)
    inputs = Case(queries=6, keys=9).inputs()
    options = {"attn_mask": mask, "is_causal": is_causal}
    expected = oracle(*inputs, **options, **rule_options(name))
    torch.testing.assert_close(call(name, inputs, **options), expected, **EXACT)


@pytest.mark.parametrize("alpha", [1.0, 1.01, 1.12, 1.13, 1.25, 1.5, 1.7, 2.0])
@pytest.mark.parametrize("case", ["causal", "gqa", "bias_causal"])
def test_forward_of_every_alpha(alpha: float, case: str) -> None:
    inputs = CASES[case].inputs()
    options = {**CASES[case].arguments, "alpha": alpha}
    torch.testing.assert_close(entmax_attention(*inputs, **options), oracle(*inputs, **options), **EXACT)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1, 1), (6, 1), (2, 1, 1, 1), (2, 4, 6, 1)], ids=str)
def test_alpha_tensors_broadcast(shape: tuple[int, ...]) -> None:
    alpha = 1.0 + torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    case = CASES["cross_causal"]
    options = {**case.arguments, "alpha": alpha}
    torch.testing.assert_close(entmax_attention(*case.inputs(), **options), oracle(*case.inputs(), **options), **EXACT)


def test_mixed_alpha_per_head() -> None:
    alpha = torch.tensor([1.0, 1.05, 1.5, 2.0])
    inputs = CASES["gqa"].inputs()
    out = entmax_attention(*inputs, **CASES["gqa"].arguments, alpha=alpha)
    for head, value in enumerate(alpha.double()):
        expected = oracle(*inputs, **CASES["gqa"].arguments, alpha=float(value))
        torch.testing.assert_close(out[:, head], expected[:, head], **EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [0.0, -0.7])
@pytest.mark.parametrize("divide_by_count", [False, True])
@pytest.mark.parametrize("case", ["gqa", "mask_causal", "packed_cross"])
def test_activations(activation: str, bias: float, divide_by_count: bool, case: str) -> None:
    rule = {"activation": activation, "bias": bias, "divide_by_count": divide_by_count}
    arguments = {**CASES[case].arguments, **rule}
    inputs = [leaf(x) for x in CASES[case].inputs()]
    out, expected = relu_attention(*inputs, **arguments), oracle(*inputs, **arguments)
    torch.testing.assert_close(out, expected, **EXACT)
    probe = randn(*out.shape, seed=9)
    for got, want in zip(torch.autograd.grad(out, inputs, probe), torch.autograd.grad(expected, inputs, probe)):  # noqa: B905
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("divide_by_count", [False, True])
def test_minus_inf_in_an_additive_mask_hides_whatever_the_activation(activation: str, divide_by_count: bool) -> None:
    """`Masked weights are 0 whatever the activation`, and -inf masks."""
    rule = {"activation": activation, "divide_by_count": divide_by_count}
    inputs = [leaf(x) for x in CASES["bias_causal"].inputs()]
    mask = CASES["bias_causal"].options["attn_mask"]
    additive = leaf(mask)
    out = relu_attention(*inputs, attn_mask=additive, is_causal=True, **rule)
    expected = oracle(*inputs, attn_mask=mask, is_causal=True, **rule)
    torch.testing.assert_close(out, expected, **EXACT)
    probe = randn(*out.shape, seed=9)
    *got, d_mask = torch.autograd.grad(out, [*inputs, additive], probe)
    for gradient, want in zip(got, torch.autograd.grad(expected, inputs, probe), strict=True):
        torch.testing.assert_close(gradient, want, **EXACT)
    assert bool((d_mask[mask == -INF] == 0.0).all())


@every_function
@pytest.mark.parametrize("lowest", [torch.float32, torch.float64])
def test_masks_at_the_lowest_float_hide(name: str, lowest: torch.dtype) -> None:
    """What transformers writes into additive masks."""
    hide = ~bools(6, 9, seed=4)
    hide[:, 0] = False
    inputs = CASES["cross"].inputs()
    additive = torch.zeros(6, 9, dtype=torch.float64).masked_fill(hide, torch.finfo(lowest).min)
    torch.testing.assert_close(call(name, inputs, attn_mask=additive), oracle_of_mask(name, inputs, ~hide))


def oracle_of_mask(name: str, inputs: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    options = dict(rule_options(name))
    if options.pop("divide_by_count", False):  # lowest floats weigh nothing, but count as seen
        return oracle(*inputs, attn_mask=mask, **options) / inputs[1].shape[2]
    return oracle(*inputs, attn_mask=mask, **options)


@every_function
@pytest.mark.parametrize("lengths", [(1, 1), (63, 63), (100, 63), (63, 100), (1, 100), (100, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_odd_lengths(name: str, lengths: tuple[int, int], is_causal: bool) -> None:
    inputs = Case(batch=1, heads=2, key_heads=1, queries=lengths[0], keys=lengths[1]).inputs()
    options = {"is_causal": is_causal, "enable_gqa": True}
    expected = oracle(*inputs, **options, **rule_options(name))
    torch.testing.assert_close(call(name, inputs, **options), expected, **EXACT)


@every_function
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch", [2, 0])
def test_empty(name: str, sizes: tuple[int, int], is_causal: bool, batch: int) -> None:
    inputs = [leaf(x) for x in Case(batch=batch, queries=sizes[0], keys=sizes[1]).inputs()]
    out = call(name, inputs, is_causal=is_causal)
    assert out.shape == (batch, 4, sizes[0], 5)
    assert bool((out == 0.0).all())
    for gradient, x in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert gradient.shape == x.shape
        assert bool((gradient == 0.0).all())


@every_function
def test_no_heads(name: str) -> None:
    inputs = Case(heads=0, key_heads=0).inputs()
    assert call(name, inputs, is_causal=True).shape == (2, 0, 7, 5)


@every_function
def test_non_contiguous_inputs(name: str) -> None:
    case = CASES["gqa"]
    plain = case.inputs()
    strided = [leaf(x.transpose(1, 2).contiguous().transpose(1, 2)) for x in plain]
    assert not any(x.is_contiguous() for x in strided)
    dense = [leaf(x) for x in plain]
    out, expected = call(name, strided, **case.arguments), call(name, dense, **case.arguments)
    torch.testing.assert_close(out, expected, **EXACT)
    probe = randn(5, 6, 4, 2, seed=9).permute(3, 2, 1, 0)
    pairs = zip(torch.autograd.grad(out, strided, probe), torch.autograd.grad(expected, dense, probe), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, **EXACT)


@every_function
def test_expanded_inputs_and_masks(name: str) -> None:
    query, key, value = CASES["cross"].inputs()
    key, value = key[:1, :1].expand(2, 4, -1, -1), value[:1, :1].expand(2, 4, -1, -1)
    mask = bools(1, 1, 6, 1, seed=3).expand(2, 4, 6, 9)
    expected = oracle(query, key, value, attn_mask=mask, **rule_options(name))
    torch.testing.assert_close(call(name, (query, key, value), attn_mask=mask), expected, **EXACT)


@every_function
def test_arguments_stay_as_they_were(name: str) -> None:
    case = CASES["alibi_bias"]
    inputs = [leaf(x) for x in case.inputs()]
    before = [x.detach().clone() for x in (*inputs, *case.options.values())]
    call(name, inputs, **case.arguments).sum().backward()
    for x, old in zip((*inputs, *case.options.values()), before, strict=True):
        assert torch.equal(x.detach(), old)


@every_function
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_equals_separate_calls(name: str, is_causal: bool) -> None:
    lengths_q, lengths_k, spare = (3, 0, 5, 1), (4, 2, 3, 1), 2
    case = Case(batch=1, key_heads=2, queries=sum(lengths_q) + spare, keys=sum(lengths_k) + spare)
    query, key, value = (leaf(x) for x in case.inputs())
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    options = {"is_causal": is_causal, "enable_gqa": True, "alibi_slopes": slopes, "window": (3, 2)}
    cu_q, cu_k = (F.pad(torch.tensor(lengths).cumsum(0), (1, 0)) for lengths in (lengths_q, lengths_k))
    packed = call(name, (query, key, value), **options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k.int())
    parts = zip(query[:, :, :-spare].split(lengths_q, 2), *(x[:, :, :-spare].split(lengths_k, 2) for x in (key, value)))  # noqa: B905
    expected = torch.cat([call(name, part, **options) for part in parts], 2)
    torch.testing.assert_close(packed[:, :, :-spare], expected, **EXACT)
    assert bool((packed[:, :, -spare:] == 0.0).all())
    probe = randn(*packed.shape, seed=9)
    got = torch.autograd.grad(packed, (query, key, value), probe)
    want = torch.autograd.grad(expected, (query, key, value), probe[:, :, :-spare])
    for gradient, separate in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, separate, **EXACT)
        assert bool((gradient[:, :, -spare:] == 0.0).all())


@every_function
def test_cached_steps_equal_the_full_forward(name: str) -> None:
    """Bottom-right alignment: one new query against all keys so far."""
    query, key, value = CASES["causal"].inputs()
    slopes = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    options = {"is_causal": True, "alibi_slopes": slopes, "window": 4}
    full = call(name, (query, key, value), **options)
    for t in range(query.shape[2]):
        step = call(name, (query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]), **options)
        torch.testing.assert_close(step, full[:, :, t : t + 1], **EXACT)
