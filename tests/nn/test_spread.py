"""The spread of scores: measured as one would by hand, and set exactly, whatever the model and mechanism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tamis.mechanisms import EntmaxAttention, SoftmaxAttention
from tamis.mechanisms.registry import MECHANISMS
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.nn import Attention, MultiheadAttention, measure_spread, set_spread

SIZES = {"embed_dim": 32, "num_heads": 4, "ffn_dim": 48, "vocab_size": 50}


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(0))


def test_the_measure_is_the_deviation_over_visible_keys():
    torch.manual_seed(0)
    layer = Attention(16, 2, mechanism=EntmaxAttention(2))
    x = torch.randn(3, 6, 16)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:] = False
    (found,) = measure_spread(layer, x, key_mask=mask, is_causal=True).values()
    query, key = (project(x).view(3, 6, 2, 8).transpose(1, 2) for project in (layer.q_proj, layer.k_proj))
    scores = (query @ key.mT / 8**0.5).detach()
    for head in range(2):
        variances = []
        for row in range(3):
            for place in range(6):
                seen = scores[row, head, place, : place + 1][mask[row, : place + 1]]
                variances += [seen.var(correction=0)] if len(seen) > 1 else []
        assert found[head].item() == pytest.approx(torch.stack(variances).mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("spread", [0.05, 0.2, 1.7])
def test_every_site_of_every_mechanism_gets_the_spread(mechanism: str, spread: float):
    torch.manual_seed(0)
    names = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    model = Seq2Seq(Seq2SeqConfig(encoder_layers=2, decoder_layers=2, **SIZES, **names))
    source, target = tokens(4, 9), tokens(4, 7)
    before = set_spread(model, source, target, spread=spread)
    assert len(before) == 6
    for found in measure_spread(model, source, target).values():
        torch.testing.assert_close(found, torch.full_like(found, spread), rtol=1e-4, atol=0.0)
    assert model.training


@pytest.mark.parametrize("position", ["rope", "alibi", "nape", "learned"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_positions_and_shared_keys(position: str, num_kv_heads: int, bias: bool):
    torch.manual_seed(0)
    config = CausalLMConfig(**SIZES, num_layers=2, num_kv_heads=num_kv_heads, bias=bias, position=position)
    model = CausalLM(config)
    for name, parameter in model.named_parameters():
        if bias and name.endswith(("q_proj.bias", "k_proj.bias")):
            nn.init.normal_(parameter)
    set_spread(model, tokens(3, 11), spread=0.3)
    for found in measure_spread(model, tokens(3, 11)).values():
        torch.testing.assert_close(found, torch.full_like(found, 0.3), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dims", [{}, {"kdim": 24, "vdim": 24}])
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_drop_in_for_torch(dims: dict[str, int], need_weights: bool):
    torch.manual_seed(0)
    layer = MultiheadAttention(32, 4, mechanism=EntmaxAttention(4, 1.5), batch_first=True, **dims)
    query, key = torch.randn(2, 5, 32), torch.randn(2, 7, dims.get("kdim", 32))
    set_spread(layer, query, key, key, need_weights=need_weights)
    (found,) = measure_spread(layer, query, key, key).values()
    torch.testing.assert_close(found, torch.full_like(found, 0.2), rtol=1e-4, atol=0.0)


def test_the_default_is_what_each_mechanism_asks_for():
    torch.manual_seed(0)
    dense, sparse = SoftmaxAttention(), EntmaxAttention(4)
    model = nn.Sequential(Attention(32, 4, mechanism=dense), Attention(32, 4, mechanism=sparse))
    x = torch.randn(4, 20, 32)
    set_spread(model, x)
    wide, narrow = measure_spread(model, x).values()
    torch.testing.assert_close(wide, torch.full_like(wide, 1.0), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(narrow, torch.full_like(narrow, 0.2), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("spread", [0.05, 0.2, 1.0])
@pytest.mark.parametrize(
    "dims", [{}, {"num_kv_heads": 2}, {"memory_dim": 96}, {"head_dim": 32}, {"bias": False}], ids=str
)
def test_a_layer_starts_with_the_spread_it_is_given(spread: float, dims: dict[str, int]):
    torch.manual_seed(0)
    layer = Attention(128, 4, mechanism=EntmaxAttention(4), initial_spread=spread, **dims)
    memory = torch.randn(8, 50, dims.get("memory_dim", 128))
    (found,) = measure_spread(layer, torch.randn(8, 50, 128), memory).values()
    torch.testing.assert_close(found.mean(), torch.tensor(spread, dtype=found.dtype), rtol=0.1, atol=0.0)


@pytest.mark.parametrize("dims", [{}, {"kdim": 96, "vdim": 96}, {"bias": False}], ids=str)
def test_the_drop_in_for_torch_starts_with_the_spread_it_is_given(dims: dict[str, int]):
    torch.manual_seed(0)
    layer = MultiheadAttention(128, 4, mechanism=EntmaxAttention(4), initial_spread=0.2, **dims)
    layer.reset_parameters()
    key = torch.randn(8, 50, dims.get("kdim", 128))
    (found,) = measure_spread(layer, torch.randn(8, 50, 128), key, key).values()
    torch.testing.assert_close(found.mean(), torch.tensor(0.2, dtype=found.dtype), rtol=0.1, atol=0.0)


def test_a_spread_of_a_layer_that_is_none():
    for layer in (Attention, MultiheadAttention):
        with pytest.raises(ValueError, match="initial_spread must be a number above 0, got 0"):
            layer(32, 4, initial_spread=0.0)


def test_a_scale_of_zero_has_no_spread():
    torch.manual_seed(0)
    (found,) = measure_spread(Attention(32, 4), torch.randn(2, 5, 32), scale=0.0).values()
    assert found.tolist() == [0.0] * 4


def test_values_and_later_layers_stay():
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(**SIZES, num_layers=2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    set_spread(model, tokens(2, 9), spread=0.4)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".q_proj." in name or ".k_proj." in name for name in changed)


class Normalised(Attention):
    """As some models do, between projection and scores."""

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return nn.functional.normalize(super()._split(x, heads), dim=-1)


def test_what_cannot_have_it_is_refused():
    x = torch.randn(2, 5, 32)
    with pytest.raises(ValueError, match="no attention layer of tamis"):
        set_spread(nn.Linear(32, 32), x)
    with pytest.raises(ValueError, match="spread must be a number above 0, got -1"):
        set_spread(Attention(32, 4), x, spread=-1)
    with pytest.raises(ValueError, match="such as a norm, undoes their scale"):
        set_spread(Normalised(32, 4), x, spread=0.2)
    flat = Attention(32, 4)
    nn.init.zeros_(flat.q_proj.weight)
    nn.init.zeros_(flat.q_proj.bias)
    with pytest.raises(ValueError, match="must differ to have a spread"):
        set_spread(flat, x, spread=0.2)
    assert "resolve" not in flat.mechanism.__dict__
