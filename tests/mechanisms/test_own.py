"""Mechanisms of one's own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tamis
from mechanisms.cases import EMBED, HEAD_DIM, HEADS, KEYS, QUERIES, inputs, some_mask
from oracles import entmax15_by_sorting
from tamis import functional
from tamis.analysis import analyze, learned_alphas
from tamis.analysis.intervention import altered
from tamis.analysis.tokens import Sentences, Tokens
from tamis.attention.rules import Entmax, Rule
from tamis.mechanisms import MECHANISMS, Inputs, LearnedAlpha, Mechanism
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn import Attention


def documented(name: str) -> Any:
    """What docs/attention.md shows readers how to write, in a block of about twenty lines."""
    text = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    block = next(
        block for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M) if f"class {name}(" in block
    )
    assert len([line for line in block.splitlines() if line]) <= 22
    models = {"CausalLM": CausalLM, "CausalLMConfig": CausalLMConfig}
    namespace: dict[str, Any] = {"torch": torch, "tamis": tamis, "Entmax": Entmax, "Mechanism": Mechanism, **models}
    exec(block, namespace)
    return namespace[name]


@pytest.fixture
def squaremax() -> Iterator[type[Mechanism]]:
    """The mechanism with a rule of its own, known by name for the time of a test."""
    yield documented("SquaremaxAttention")
    MECHANISMS.pop("squaremax", None)


def squaremax_oracle(query: Tensor, key: Tensor, bias: Tensor, visible: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", query, key) / math.sqrt(query.shape[3])
    weights = torch.where(visible, (scores + bias[:, None, None]).clamp(min=0.0) ** 2, 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0.0, weights / torch.where(total > 0.0, total, 1.0), 0.0)


@pytest.mark.parametrize("mask", ["none", "boolean", "additive", "causal", "lengths"])
def test_a_rule_of_ones_own_is_right_under_every_mask(squaremax: type[Mechanism], mask: str):
    mechanism, data = squaremax(HEADS).double(), inputs(torch.float64)
    with torch.no_grad():
        mechanism.bias.copy_(torch.tensor([-0.5, 0.0, 0.5, 1.0]))
    keep = some_mask().expand(-1, HEADS, -1, -1)
    visible, options = {
        "none": (torch.ones_like(keep), {}),
        "boolean": (keep, {"attn_mask": keep}),
        "additive": (keep, {"attn_mask": torch.zeros(keep.shape).masked_fill(~keep, -math.inf)}),
        "causal": (torch.ones_like(keep).tril(KEYS - QUERIES), {"is_causal": True}),
        "lengths": (torch.arange(KEYS).expand_as(keep) < 4, {"key_lengths": torch.tensor([4, 4])}),
    }[mask]
    tensors = [data[name].requires_grad_() for name in ("query", "key", "value")]
    out = mechanism(*tensors, **options)
    expected = squaremax_oracle(*tensors[:2], mechanism.bias, visible) @ tensors[2]
    torch.testing.assert_close(out, expected)
    leaves, probe = [*tensors, mechanism.bias], torch.randn(out.shape, dtype=torch.float64)
    for got, want in zip(*(torch.autograd.grad(x, leaves, probe) for x in (out, expected)), strict=True):
        torch.testing.assert_close(got, want)
    sparse = functional.sparse_attention_weights(*tensors[:2], rule=mechanism.resolve(*tensors[:2], None, {})[1])
    torch.testing.assert_close(sparse.to_dense(), mechanism.weights(*tensors[:2]))


def test_a_rule_of_ones_own_trains_decodes_is_analysed_and_saved(squaremax: type[Mechanism], tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "embed_dim": 32, "num_heads": HEADS, "ffn_dim": 64, "num_layers": 2}
    model = CausalLM(CausalLMConfig(**sizes, mechanism={"name": "squaremax", "start": 0.5}))
    text = torch.arange(5).repeat(4, 5)  # 0 1 2 3 4 0 1 ...
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(60):
        losses.append(F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    assert all((layer.self_attention.mechanism.bias != 0.5).all() for layer in model.layers)

    model.eval()
    with torch.no_grad():
        cache, whole = model.new_cache(), model(text)
        steps = [model(text[:, :9], cache=cache)[:, -1:], *(model(text[:, i : i + 1], cache=cache) for i in (9, 10))]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 8:11], rtol=1e-4, atol=1e-5)

    sentences = Sentences(target=Tokens(ids=text, mask=torch.ones_like(text, dtype=torch.bool)))
    found = analyze(model, [sentences])
    assert set(found.sites) == {"layers.0.self", "layers.1.self"}
    densities = [density for site in found.sites.values() for density in site.density]
    assert 0.0 < min(densities) < 1.0

    model.save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path).eval()
    assert again.config.mechanism == {"name": "squaremax", "start": 0.5}
    with torch.no_grad():
        assert torch.equal(again(text), whole)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, [9] * 5),
        ({"is_causal": True}, [5, 6, 7, 8, 9]),
        ({"window": (2, 0)}, [3] * 5),
        ({"key_lengths": torch.tensor([4, 4])}, [4] * 5),
        ({"attn_mask": torch.arange(KEYS) < 6, "is_causal": True}, [5, 6, 6, 6, 6]),
        ({"is_causal": True, "query_positions": torch.tensor([0, 1, 2, 3, 8])}, [1, 2, 3, 4, 9]),
        ({"scale": 0.5, "dropout_p": 0.0, "backend": "reference", "alibi_slopes": torch.zeros(HEADS)}, [9] * 5),
    ],
)
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_the_documented_mechanism_is_right_under_every_option(
    options: dict[str, Any], count: list[int], key_heads: int
):
    mechanism, data = documented("SharperWithLength")(HEADS), inputs(torch.float64)
    with torch.no_grad():
        mechanism.rate.copy_(torch.tensor([0.0, 0.2, 0.5, 1.0]))
    data["key"], data["value"] = data["key"][:, :key_heads], data["value"][:, :key_heads]
    out = mechanism(**data, **options, enable_gqa=key_heads != HEADS)
    factor = torch.tensor(count).double() ** mechanism.rate.detach().double()[:, None]
    expected = functional.entmax_attention(
        data["query"] * factor[..., None], data["key"], data["value"], **options, enable_gqa=key_heads != HEADS
    )
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_a_mechanism_without_a_rule_says_so():
    with pytest.raises(NotImplementedError, match=r"Mechanism must define rule\(\)"):
        Mechanism()(**inputs())


class LaplaceAttention(Mechanism):
    """A mechanism with a forward of its own: exp(-|score|) on what is visible, normalised."""

    def weights(self, query: Tensor, key: Tensor, *, hidden: Tensor | None = None, **options: Any) -> Tensor:
        scores, keep = functional.attention_scores(query, key, **options)
        weights = torch.where(keep, torch.exp(-torch.where(keep, scores, 0.0).abs()), 0.0)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        options.pop("dropout_p", None)
        return self.weights(query, key, **options) @ value


class TemperedEntmax(Mechanism):
    """The shorter way: a rule, and a learned temperature per head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.full((num_heads,), 2.0))

    def rule(self, inputs: Inputs) -> Rule:
        return Entmax(1.5)

    def query_scale(self, inputs: Inputs) -> Tensor:
        return self.heat[None, :, None]


@pytest.mark.parametrize("mechanism", [LaplaceAttention(), TemperedEntmax(HEADS)])
def test_a_mechanism_of_ones_own_works_in_a_layer(mechanism: Mechanism):
    torch.manual_seed(0)
    layer = Attention(EMBED, HEADS, mechanism=mechanism)
    x = torch.randn(2, 5, EMBED)
    out = layer(x, is_causal=True)
    out.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    weights = layer.weights(x, is_causal=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 5), atol=1e-5, rtol=0.0)
    assert (weights.triu(1) == 0.0).all()
    value = layer.v_proj(x).view(2, 5, HEADS, HEAD_DIM).transpose(1, 2)
    expected = layer.out_proj((weights @ value).transpose(1, 2).reshape(2, 5, EMBED))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_a_scale_of_ones_own_multiplies_the_scores():
    data = inputs()
    weights = TemperedEntmax(HEADS).weights(data["query"], data["key"])
    expected = entmax15_by_sorting(2.0 * data["query"] @ data["key"].mT / math.sqrt(HEAD_DIM))
    torch.testing.assert_close(weights.double(), expected, atol=1e-5, rtol=1e-5)


class OneAlpha(Mechanism):
    """All heads share one learned alpha; analyses ask for it by the method."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.alpha = num_heads, LearnedAlpha(1, init=1.4)

    def rule(self, inputs: Inputs) -> Rule:
        return Entmax(self.alpha().expand(self.num_heads))

    def learned_alphas(self) -> Tensor:
        return self.alpha().expand(self.num_heads)

    has_alphas = True


def test_alphas_of_a_mechanism_of_ones_own_can_be_changed_for_a_while():
    model = nn.ModuleDict({"self_attention": Attention(EMBED, HEADS, mechanism=OneAlpha(HEADS))})
    attention, x = model["self_attention"], 5.0 * torch.randn(2, 5, EMBED)
    before = attention.weights(x)
    with altered(model, alphas={"self": {1: 1.0}}):
        during = attention.weights(x)
    assert (before[:, 1] == 0.0).any()
    assert (during[:, 1] > 0.0).all()
    assert torch.equal(during[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert torch.equal(attention.weights(x), before)
    other = nn.ModuleDict({"self_attention": Attention(EMBED, HEADS, mechanism=TemperedEntmax(HEADS))})
    with (
        pytest.raises(ValueError, match="no alpha to change: it is TemperedEntmax"),
        altered(other, alphas={"self": {1: 1.0}}),
    ):
        pass


def test_analyses_ask_a_mechanism_of_ones_own():
    layer = Attention(EMBED, HEADS, mechanism=OneAlpha(HEADS))
    (alphas,) = learned_alphas(nn.ModuleDict({"self_attention": layer})).values()
    assert alphas == pytest.approx((1.4,) * HEADS)
    assert learned_alphas(nn.ModuleDict({"self_attention": Attention(EMBED, HEADS)})) == {}
