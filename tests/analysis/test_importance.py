"""Silencing a head is removing its part of the output projection, for every mechanism."""

from __future__ import annotations

import json

import pytest
import torch

from analysis.cases import batch, causal_lm, seq2seq
from tamis.analysis import head_importance, silenced
from tamis.mechanisms import MECHANISMS, ReLAttention
from tamis.nn import Attention

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


@every_mechanism
def test_a_silent_head_is_one_that_the_projection_does_not_read(mechanism):
    """Set the columns of the head in the output projection to zero, by hand."""
    model, cut, (source, target) = seq2seq(mechanism), seq2seq(mechanism), batch()
    with torch.no_grad():
        cut.decoder[0].cross_attention.out_proj.weight[:, 2 * 4 : 3 * 4] = 0.0
        before = model(source, target)
        with silenced(model, "decoder.0.cross", 2):
            found = model(source, target)
        assert torch.equal(model(source, target), before)  # no trace is left
        torch.testing.assert_close(found, cut(source, target))
        assert not torch.equal(found, before)


@pytest.mark.parametrize("variant", ["g", "i", "rms", "layernorm", "none"])
def test_the_other_heads_go_on_as_they_were(variant):
    """What one head adds is what its channels add, whatever norm runs over all of them."""
    layer = Attention(16, 4, mechanism=ReLAttention(16, 4, variant)).double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(x)
        parts = []
        for head in range(4):
            with silenced(layer, "attention", head):
                parts.append(whole - layer(x))
        torch.testing.assert_close(sum(parts) + layer.out_proj.bias, whole)


def test_silencing_within_silencing():
    model, tokens = causal_lm(), torch.tensor([[1, 2, 3]])
    with torch.no_grad(), silenced(model, "layers.0.self", 0), silenced(model, "layers.0.self", 3):
        found = model(tokens)
        model.layers[0].self_attention.out_proj.weight[:, :4] = 0.0
        model.layers[0].self_attention.out_proj.weight[:, 12:] = 0.0
    torch.testing.assert_close(model(tokens), found)


def test_importance_is_the_change_of_the_loss():
    model, (source, target) = seq2seq("rela").train(), batch()

    def loss() -> float:
        assert not model.training
        return float(model(source, target).square().mean())

    found = head_importance(model, loss, sites=lambda site: site.startswith("decoder"))
    assert model.training
    assert list(found.change) == ["decoder.0.self", "decoder.0.cross"]
    model.eval()
    with torch.no_grad():
        assert found.baseline == loss()
        with silenced(model, "decoder.0.self", 1):
            assert found.change["decoder.0.self"][1] == loss() - found.baseline
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_a_head_that_nobody_reads_is_idle():
    model, (source, target) = seq2seq(), batch()
    with torch.no_grad():
        model.encoder[0].self_attention.out_proj.weight[:, 4:8] = 0.0
    found = head_importance(model, lambda: float(model(source, target).abs().mean()))
    assert found.change["encoder.0.self"][1] == 0.0
    assert sum(len(change) for change in found.change.values()) == 16
    assert all(change != 0.0 for change in (*found.change["encoder.1.self"], *found.change["decoder.0.cross"]))


def test_nothing_is_left_after_an_error():
    model, (source, target) = seq2seq(), batch()
    before = model(source, target)
    with pytest.raises(RuntimeError, match="inside"), silenced(model, "encoder.0.self", 0):
        raise RuntimeError("inside")
    assert torch.equal(model(source, target), before)


def test_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="did you mean"), silenced(seq2seq(), "encoder.0.slef", 0):
        pass
    with pytest.raises(ValueError, match="heads 0 to 3, got 4"), silenced(seq2seq(), "encoder.0.self", 4):
        pass
    with (
        pytest.raises(ValueError, match=r"Linear has no attention to see: looked for tamis.nn.Attention"),
        silenced(torch.nn.Linear(2, 2), "attention", 0),
    ):
        pass
    compiled = seq2seq()
    compiled.compile()
    with pytest.raises(ValueError, match=r"before torch\.compile"), silenced(compiled, "encoder.0.self", 0):
        pass
