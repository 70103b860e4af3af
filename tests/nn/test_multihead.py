"""MultiheadAttention is torch's but for the mechanism, also inside torch's own layers."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tamis.mechanisms import (
    ASEntmaxAttention,
    EntmaxAttention,
    Mechanism,
    ReLAttention,
    SoftmaxAttention,
    SoftpickAttention,
)
from tamis.nn import MultiheadAttention

EMBED, HEADS, BATCH, QUERIES, KEYS = 16, 4, 3, 5, 7
TOLERANCE: dict[str, float] = {"atol": 1e-6, "rtol": 1e-5}


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, **options})
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    ours = MultiheadAttention(EMBED, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_of(kind: str) -> Tensor | None:
    """Torch's polarity: True is forbidden.  Key 0 is always allowed."""
    shape = {"2": (QUERIES, KEYS), "3": (BATCH * HEADS, QUERIES, KEYS), "p": (BATCH, KEYS)}
    if kind == "none":
        return None
    forbidden = torch.rand(shape[kind[-1]], generator=torch.Generator().manual_seed(len(kind))) < 0.4
    forbidden[..., 0] = False
    if kind.startswith("bool"):
        return forbidden
    additive = normal(*forbidden.shape, seed=4)
    return additive.masked_fill(forbidden, -math.inf) if kind.startswith("inf") else additive


@pytest.mark.parametrize("padding", ["none", "bool-p", "float-p", "inf-p"])
@pytest.mark.parametrize("mask", ["none", "bool-2", "bool-3", "float-2", "float-3", "inf-2", "inf-3"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks_of_every_kind_equal_torch(mask: str, padding: str):
    theirs, ours = pair()
    query, key, value = normal(BATCH, QUERIES, EMBED), normal(BATCH, KEYS, EMBED), normal(BATCH, KEYS, EMBED, seed=2)
    options = {"attn_mask": mask_of(mask), "key_padding_mask": mask_of(padding)}
    expected, expected_weights = theirs(query, key, value, average_attn_weights=False, **options)
    out, weights = ours(query, key, value, average_attn_weights=False, **options)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    torch.testing.assert_close(weights, expected_weights, **TOLERANCE)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6}, {"vdim": 10}, {"kdim": 6, "vdim": 10}])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_shapes_equal_torch(sizes: dict[str, int], bias: bool, batch_first: bool, batched: bool):
    theirs, ours = pair(bias=bias, batch_first=batch_first, **sizes)
    lead = (BATCH,) if batched else ()
    widths = (EMBED, sizes.get("kdim", EMBED), sizes.get("vdim", EMBED))
    inputs = [normal(*lead, n, w, seed=n) for n, w in zip((QUERIES, KEYS, KEYS), widths, strict=True)]
    if batched and not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    kept = torch.zeros(*lead, KEYS, dtype=torch.bool)
    kept[..., -2:] = True
    inputs = [x.requires_grad_() for x in inputs]
    for average in (True, False):
        expected = theirs(*inputs, key_padding_mask=kept, average_attn_weights=average)
        got = ours(*inputs, key_padding_mask=kept, average_attn_weights=average)
        for ours_, theirs_ in zip(got, expected, strict=True):
            torch.testing.assert_close(ours_, theirs_, **TOLERANCE)
    names = dict(theirs.named_parameters())
    assert names.keys() == dict(ours.named_parameters()).keys()
    for a, b in zip(
        torch.autograd.grad(got[0].square().sum(), [*inputs, *(dict(ours.named_parameters())[n] for n in names)]),
        torch.autograd.grad(expected[0].square().sum(), [*inputs, *names.values()]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("need_weights", [True, False])
def test_weights_come_only_when_needed(need_weights: bool):
    theirs, ours = pair()
    x = normal(BATCH, QUERIES, EMBED)
    out, weights = ours(x, x, x, need_weights=need_weights)
    expected, expected_weights = theirs(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert (weights is None) == (expected_weights is None) == (not need_weights)


def test_causal_hint():
    theirs, ours = pair()
    x, mask = normal(BATCH, QUERIES, EMBED), nn.Transformer.generate_square_subsequent_mask(QUERIES)
    for options in ({"attn_mask": mask, "is_causal": True}, {"attn_mask": mask}):
        expected = theirs(x, x, x, need_weights=False, **options)[0]
        torch.testing.assert_close(ours(x, x, x, need_weights=False, **options)[0], expected, **TOLERANCE)
    with pytest.raises(ValueError, match="attn_mask"):
        ours(x, x, x, is_causal=True)


@pytest.mark.parametrize("kind", ["bool-2", "inf-2"])
def test_a_three_dimensional_mask_of_an_unbatched_input(kind: str):
    theirs, ours = pair()
    query, key = normal(QUERIES, EMBED), normal(KEYS, EMBED)
    mask = mask_of(kind).expand(HEADS, -1, -1)
    expected = theirs(query, key, key, attn_mask=mask)
    for a, b in zip(ours(query, key, key, attn_mask=mask), expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("kind", ["int64", "uint8", "list"])
@pytest.mark.parametrize("wrong", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("beside", ["none", "bool", "float"])
def test_a_mask_that_is_neither_boolean_nor_float_is_refused(kind: str, wrong: str, beside: str):
    """Also beside a mask that is right: added to it, integers would let padding through."""
    _, ours = pair()
    masks = {"attn_mask": mask_of("bool-2"), "key_padding_mask": mask_of("bool-p")}
    other = "attn_mask" if wrong == "key_padding_mask" else "key_padding_mask"
    masks[wrong] = masks[wrong].tolist() if kind == "list" else masks[wrong].to(getattr(torch, kind))
    masks[other] = {"none": None, "bool": masks[other], "float": masks[other].float()}[beside]
    with pytest.raises(TypeError, match=rf"{wrong} must be boolean \(True = forbidden\).*got .*{kind}"):
        ours(normal(BATCH, QUERIES, EMBED), normal(BATCH, KEYS, EMBED), normal(BATCH, KEYS, EMBED), **masks)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attn_mask", (KEYS,)),
        ("attn_mask", (1, KEYS)),
        ("attn_mask", (QUERIES, 1)),
        ("attn_mask", (KEYS, QUERIES)),
        ("attn_mask", (1, QUERIES, KEYS)),
        ("attn_mask", (BATCH, QUERIES, KEYS)),
        ("attn_mask", (BATCH, HEADS, QUERIES, KEYS)),
        ("key_padding_mask", (1, 1)),
        ("key_padding_mask", (1, KEYS)),
        ("key_padding_mask", (BATCH, 1)),
        ("key_padding_mask", (BATCH, QUERIES)),
        ("key_padding_mask", (BATCH, 1, KEYS)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_shapes_that_torch_refuses_are_refused(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, batched: bool
):
    theirs, ours = pair()
    lead = (BATCH,) if batched else ()
    inputs = [normal(*lead, length, EMBED) for length in (QUERIES, KEYS, KEYS)]
    mask = torch.zeros(shape, dtype=dtype)
    with pytest.raises((AssertionError, RuntimeError)):
        theirs(*inputs, **{name: mask})
    for need_weights in (True, False):
        with pytest.raises(ValueError, match=rf"{name} must be of shape .*{KEYS},?\).*got"):
            ours(*inputs, need_weights=need_weights, **{name: mask})


def test_dropout_of_weights_in_training_only():
    torch.manual_seed(0)
    ours = MultiheadAttention(EMBED, HEADS, dropout=0.5)
    x = normal(BATCH, QUERIES, EMBED)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.train()
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("average", [True, False])
def test_weights_in_training_are_the_dropped_ones(average: bool):
    """As torch's, to the same random numbers: a user who plots them sees what the output was made of."""
    theirs, ours = pair(dropout=0.5)
    x = normal(BATCH, QUERIES, EMBED)
    results = []
    for module in (theirs, ours):
        torch.manual_seed(1)
        results.append(module(x, x, x, average_attn_weights=average))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
    if not average:
        assert 0.3 < (results[1][1] == 0.0).float().mean() < 0.7


@pytest.mark.parametrize("name", ["softmax", "entmax", "rela", "softpick"])
@pytest.mark.parametrize("average", [True, False])
def test_dtypes_under_autocast_are_those_of_torch(name: str, average: bool):
    theirs, _ = pair()
    ours, x = MultiheadAttention(EMBED, HEADS, mechanism=MECHANISMS[name]()), normal(BATCH, QUERIES, EMBED)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = (m(x, x, x, average_attn_weights=average) for m in (theirs, ours))
        assert ours(x, x, x, need_weights=False)[0].dtype == theirs(x, x, x, need_weights=False)[0].dtype
    assert [y.dtype for y in got] == [y.dtype for y in expected]


@pytest.mark.parametrize("mechanism", ["entmax", "rela", "softpick", "asentmax"])
def test_asking_for_weights_does_not_change_the_output(mechanism: str):
    torch.manual_seed(0)
    ours = MultiheadAttention(EMBED, HEADS, mechanism=MECHANISMS[mechanism]()).eval()
    query, key = normal(BATCH, QUERIES, EMBED), normal(BATCH, KEYS, EMBED, seed=1)
    masks = {"attn_mask": mask_of("bool-3"), "key_padding_mask": mask_of("bool-p")}
    with_weights, without = (ours(query, key, key, need_weights=need, **masks)[0] for need in (True, False))
    torch.testing.assert_close(with_weights, without, **TOLERANCE)


def test_attributes_are_those_of_torch():
    theirs, ours = pair()
    names = [name for name in vars(theirs) if not name.startswith("_")]
    assert {"embed_dim", "num_heads", "bias_k", "bias_v", "add_zero_attn"} <= {*names}
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}


MECHANISMS: dict[str, Any] = {
    "softmax": SoftmaxAttention,
    "entmax": lambda: EntmaxAttention(HEADS),
    "sparsemax": lambda: EntmaxAttention(HEADS, 2.0),
    "rela": lambda: ReLAttention(EMBED, HEADS),
    "rela-gelu": lambda: ReLAttention(EMBED, HEADS, "none", "gelu"),
    "asentmax": lambda: ASEntmaxAttention(EMBED, HEADS),
    "softpick": SoftpickAttention,
}


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("additive", [False, True])
def test_fully_masked_rows_are_the_bias_alone_and_never_nan(name: str, additive: bool):
    torch.manual_seed(0)
    ours = MultiheadAttention(EMBED, HEADS, mechanism=MECHANISMS[name]())
    nn.init.normal_(ours.out_proj.bias)
    x = normal(BATCH, QUERIES, EMBED).requires_grad_()
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[1] = True
    if additive:
        padding = torch.zeros(BATCH, QUERIES).masked_fill(padding, -math.inf)
    out, weights = ours(x, x, x, key_padding_mask=padding)
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(QUERIES, -1))
    assert (weights[1] == 0.0).all()
    assert torch.isfinite(out).all()
    out.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[1] == 0.0).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mechanism_inside_runs_forward_and_backward(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    ours = MultiheadAttention(EMBED, HEADS, mechanism=MECHANISMS[name]()).to(dtype)
    x = normal(BATCH, QUERIES, EMBED).to(dtype).requires_grad_()
    out, weights = ours(x, x, x)
    assert out.dtype == weights.dtype == dtype
    out.float().square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in (x, *ours.parameters()))


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_unsupported_options_raise(option: str):
    with pytest.raises(ValueError, match=option):
        MultiheadAttention(EMBED, HEADS, **{option: True})


def test_bad_sizes_raise():
    with pytest.raises(ValueError, match="multiple"):
        MultiheadAttention(10, 4)
    for heads in (0, -4):
        with pytest.raises(ValueError, match=f"num_heads must be .* at least 1, got {heads}"):
            MultiheadAttention(16, heads)


def test_a_mechanism_that_does_not_fit_is_refused():
    with pytest.raises(TypeError, match=r"build_mechanism\(\"entmax\", 16, 4\)"):
        MultiheadAttention(EMBED, HEADS, mechanism="entmax")
    with pytest.raises(ValueError, match=r"EntmaxAttention was built for num_heads=1, but the layer has 4"):
        MultiheadAttention(EMBED, HEADS, mechanism=EntmaxAttention(1))
    with pytest.raises(ValueError, match=r"ReLAttention was built for embed_dim=32"):
        MultiheadAttention(EMBED, HEADS, mechanism=ReLAttention(32, HEADS))


def test_device_and_dtype():
    ours = MultiheadAttention(EMBED, HEADS, kdim=6, device="meta", dtype=torch.float64)
    assert {p.dtype for p in ours.parameters()} == {torch.float64}
    assert {p.device.type for p in ours.parameters()} == {"meta"}


# ---------------------------------------------------------------------------------------------------------------
# Inside torch's layers


class Counted(Mechanism):
    """Another mechanism, and how often it was asked."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        return self.inner(query, key, value, **options)

    def merge(self, context: Tensor) -> Tensor:
        return self.inner.merge(context)


def with_ours(layer: nn.Module, name: str) -> nn.Module:
    """A copy of a torch layer in which each attention is ours."""
    layer = copy.deepcopy(layer)
    for module in list(layer.modules()):
        for child, attention in list(module.named_children()):
            if isinstance(attention, nn.MultiheadAttention):
                ours = MultiheadAttention(EMBED, HEADS, mechanism=Counted(MECHANISMS[name]()))
                ours.load_state_dict(attention.state_dict(), strict=False)
                setattr(module, child, ours.train(attention.training))
    return layer


def calls(layer: nn.Module) -> list[int]:
    return [module.calls for module in layer.modules() if isinstance(module, Counted)]


def encoder_layer(norm_first: bool = False) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True, norm_first=norm_first)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"src_mask": nn.Transformer.generate_square_subsequent_mask(KEYS)},
    "hint": {"src_mask": nn.Transformer.generate_square_subsequent_mask(KEYS), "is_causal": True},
    "bool": {"src_mask": torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)},
    "padding": {"src_key_padding_mask": torch.arange(KEYS) >= torch.tensor([[7], [4], [5]])},
    "both": {
        "src_mask": torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.arange(KEYS) >= torch.tensor([[7], [4], [5]]),
    },
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_encoder_layer_uses_the_mechanism(training: bool, grad: bool, norm_first: bool, masks: str):
    """Torch's fused inference path (eval without gradients) must not go around it."""
    theirs = encoder_layer(norm_first).train(training)
    x = normal(BATCH, KEYS, EMBED)
    with torch.set_grad_enabled(grad):
        expected = theirs(x, **MASKS[masks])
        for name in ("softmax", "sparsemax"):
            ours = with_ours(theirs, name)
            out = ours(x, **MASKS[masks])
            assert calls(ours) == [1]
            visible = ~MASKS[masks].get("src_key_padding_mask", torch.zeros(BATCH, KEYS, dtype=torch.bool))
            difference = (out - expected)[visible].abs().max()
            assert difference < 1e-5 if name == "softmax" else difference > 1e-3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.filterwarnings("ignore:.*nested.*", "ignore:.*prototype.*")
def test_encoder_uses_the_mechanism(training: bool, grad: bool, masks: str, when: str):
    """Whether the layers are exchanged before the encoder is built or in a finished one."""
    masks_of = {key.replace("src_mask", "mask"): value for key, value in MASKS[masks].items()}
    theirs = nn.TransformerEncoder(encoder_layer(), 2).train(training)
    if when == "before":
        ours = nn.TransformerEncoder(with_ours(encoder_layer(), "softmax"), 2).train(training)
    else:
        ours = with_ours(theirs, "softmax")
    x = normal(BATCH, KEYS, EMBED)
    with torch.set_grad_enabled(grad):
        expected, out = theirs(x, **masks_of), ours(x, **masks_of)
    assert calls(ours) == [1, 1]
    visible = ~masks_of.get("src_key_padding_mask", torch.zeros(BATCH, KEYS, dtype=torch.bool))
    assert out.shape == x.shape
    torch.testing.assert_close(out[visible], expected[visible], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*nested.*")
def test_encoder_with_padding_gives_no_nan_with_any_mechanism(name: str, training: bool):
    """Torch turns boolean masks into additive ones of -inf before its layers see them."""
    encoder = nn.TransformerEncoder(with_ours(encoder_layer(), name), 2).train(training)
    x = normal(BATCH, KEYS, EMBED).requires_grad_()
    masks = {key.replace("src_mask", "mask"): value for key, value in MASKS["both"].items()}
    out = encoder(x, **masks)
    assert torch.isfinite(out).all()
    visible = ~masks["src_key_padding_mask"]
    out[visible].square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[~visible] == 0.0).all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layer_uses_the_mechanisms(training: bool, norm_first: bool):
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    theirs.train(training)
    target, memory = normal(BATCH, QUERIES, EMBED), normal(BATCH, KEYS, EMBED, seed=1)
    options = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES),
        "tgt_is_causal": True,
        "memory_key_padding_mask": MASKS["padding"]["src_key_padding_mask"],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(target, memory, **options)
        for name in ("softmax", "sparsemax"):
            ours = with_ours(theirs, name)
            out = ours(target, memory, **options)
            assert calls(ours) == [1, 1]
            difference = (out - expected).abs().max()
            assert difference < 1e-5 if name == "softmax" else difference > 1e-3
