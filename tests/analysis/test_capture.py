"""Captured weights are the model's own, for every mechanism and mask, and capturing leaves no trace."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.cases import PAD, batch, causal_lm, seq2seq
from tamis.analysis import AttentionMetrics, capture
from tamis.mechanisms import MECHANISMS
from tamis.nn import Attention

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


def number_of_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@every_mechanism
def test_the_output_is_made_of_what_was_captured(mechanism):
    """The mechanism's output is weights @ values, computed here from the captured weights."""
    torch.manual_seed(0)
    layer = Attention(16, 4, mechanism=seq2seq(mechanism).encoder[0].self_attention.mechanism).double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    key_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    with torch.no_grad(), capture(layer) as captured:
        out = layer(x, key_mask=key_mask, is_causal=True)
    values = layer.v_proj(x).unflatten(-1, (4, 4)).transpose(1, 2)
    context = captured["attention"] @ values
    torch.testing.assert_close(layer.out_proj(layer.mechanism.merge(context)), out, atol=1e-6, rtol=1e-5)


@every_mechanism
def test_every_site_of_an_encoder_decoder(mechanism):
    model, (source, target) = seq2seq(mechanism), batch()
    with torch.no_grad():
        plain = model(source, target, target_mask=target != PAD)
        with capture(model) as captured:
            watched = model(source, target, target_mask=target != PAD)
    assert torch.equal(plain, watched)
    assert list(captured) == ["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"]
    real, causal = source != PAD, torch.ones(4, 4).tril().bool()
    inside = target != PAD
    expected = {
        "encoder.0.self": real[:, None, :, None] & real[:, None, None],
        "decoder.0.self": inside[:, None, :, None] & inside[:, None, None] & causal,
        "decoder.0.cross": inside[:, None, :, None] & real[:, None, None],
    }
    for site, visible in expected.items():
        assert torch.equal(captured.visible[site], visible), site
        assert captured[site].shape == (2, 4, *visible.shape[2:])
        hidden = ~visible & visible.any(-1, keepdim=True)  # of padded queries the weights may be anything
        assert captured[site].masked_select(hidden).eq(0.0).all()


@every_mechanism
@pytest.mark.parametrize("position", ["nape", "rope"])
def test_every_site_of_a_language_model(mechanism, position):
    model = causal_lm(mechanism, position=position)
    tokens = torch.tensor([[3, 4, 5, 6], [PAD, PAD, 7, 8]])
    mask = tokens != PAD
    with torch.no_grad(), capture(model) as captured:
        watched = model(tokens, mask)
    with torch.no_grad():
        assert torch.equal(watched, model(tokens, mask))
    assert list(captured) == ["layers.0.self", "layers.1.self"]
    expected = mask[:, None, :, None] & mask[:, None, None] & torch.ones(4, 4).tril().bool()
    assert torch.equal(captured.visible["layers.1.self"], expected)


def test_weights_are_those_of_the_layer_itself():
    model, (source, _) = seq2seq(position="alibi"), batch()
    inputs: list[Tensor] = []
    layer = model.encoder[0].self_attention
    handle = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad(), capture(model) as captured:
        model.encode(source)
        expected = layer.weights(inputs[0], key_mask=source != PAD, positions=torch.arange(5))
    handle.remove()
    torch.testing.assert_close(captured["encoder.0.self"][0], expected[0])


def test_steps_with_a_cache_are_the_rows_of_the_whole():
    model, (source, target) = seq2seq("asentmax"), batch()
    source, target = source[:1], target[:1]
    with torch.no_grad():
        with capture(model) as whole:
            model(source, target)
        memory, cache = model.encode(source), model.new_cache()
        for step in range(target.shape[1]):
            with capture(model) as one:
                model.decode(target[:, step : step + 1], memory, source != PAD, cache)
            for site in ("decoder.0.self", "decoder.0.cross"):
                row = whole[site][:, :, step : step + 1, : one[site].shape[3]]
                torch.testing.assert_close(one[site], row)
                assert torch.equal(one.visible[site], whole.visible[site][:, :, step : step + 1, : row.shape[3]])


def test_packed_documents_see_themselves_only():
    model = causal_lm()
    with torch.no_grad(), capture(model) as captured:
        model(torch.tensor([[3, 4, 5, 6, 7]]), cu_seqlens=torch.tensor([0, 2, 5]))
    expected = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(3, 3).tril()).bool()
    assert torch.equal(captured.visible["layers.0.self"][0, 0], expected)


def test_grouped_heads_each_have_weights():
    model, (source, target) = seq2seq(num_kv_heads=2), batch()
    with torch.no_grad(), capture(model) as captured:
        model(source, target)
    assert captured["decoder.0.cross"].shape == (2, 4, 4, 5)


def test_training_is_not_disturbed():
    """Same loss, same gradients and the same draws of dropout as without."""
    source, target = batch()
    gradients = []
    for context in (contextlib.nullcontext, capture):
        model = seq2seq().train()
        torch.manual_seed(3)
        with context(model):
            model(source, target).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        assert torch.equal(ours, plain)


def test_a_consumer_gets_everything_and_nothing_is_kept():
    model, (source, target) = seq2seq("rela"), batch()
    metrics = AttentionMetrics()
    with torch.no_grad(), capture(model, metrics) as captured:
        model(source, target)
        model(source, target)
    assert not captured
    assert metrics.results()["encoder.0.self"].rows == 2 * 8  # padded queries do not count
    assert metrics.results()["decoder.0.cross"].rows == 2 * 8  # no target mask: all do


def test_sites_are_chosen_by_name():
    model, (source, target) = seq2seq(), batch()
    with torch.no_grad(), capture(model, sites=lambda site: site.endswith("cross")) as captured:
        model(source, target)
    assert list(captured) == ["decoder.0.cross"]


def test_hooks_are_gone_afterwards_also_after_an_error():
    model, (source, target) = seq2seq(), batch()
    before = number_of_hooks(model)
    with pytest.raises(RuntimeError, match="inside"), capture(model):
        raise RuntimeError("inside")
    assert number_of_hooks(model) == before

    def fail(*_: object) -> None:
        raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"), capture(model, fail):
        model(source, target)
    assert number_of_hooks(model) == before
    with capture(model) as captured:  # nothing of the failed run is left
        model(source, target)
    assert len(captured) == 4


class Wrapped(nn.Module):
    """As DistributedDataParallel wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def test_wrappers_do_not_change_names():
    model = Wrapped(seq2seq())
    with torch.no_grad(), capture(model) as captured:
        model(*batch())
    assert "encoder.0.self" in captured


def test_a_shared_mechanism_is_recorded_once_per_site():
    model = seq2seq()
    model.encoder[1].self_attention.mechanism = model.encoder[0].self_attention.mechanism
    seen: list[str] = []
    with torch.no_grad(), capture(model, lambda site, *_: seen.append(site)):
        model(*batch())
    assert seen == ["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross"]


def test_compiled_models_are_refused():
    compiled = torch.compile(seq2seq())
    with pytest.raises(ValueError, match=r"before torch\.compile"), capture(compiled):
        pass
    inside = seq2seq()
    inside.compile()
    with pytest.raises(ValueError, match=r"before torch\.compile"), capture(inside):
        pass


@pytest.mark.gpu
@every_mechanism
def test_a_gpu_gives_the_same_figures(mechanism):
    model, (source, target) = seq2seq(mechanism), batch()
    found = []
    for device in ("cpu", "cuda"):
        metrics = AttentionMetrics()
        model.to(device)
        with torch.no_grad(), capture(model, metrics):
            model(source.to(device), target.to(device))
        found.append(metrics.summary()["all"])
    assert found[1] == pytest.approx(found[0], abs=1e-4)
