"""tamis.nn.MultiheadAttention is seen as tamis.nn.Attention is, in torch's layers too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.cases import PAD, VOCAB, batch
from tamis.analysis import Sentences, Tokens, analyze, capture, head_importance, learned_alphas, silenced
from tamis.mechanisms import build_mechanism
from tamis.nn import MultiheadAttention
from tamis.report import show

WIDTH, HEADS = 16, 4


def replaced(model: nn.Module, spec: Any = "entmax") -> nn.Module:
    """With every attention of torch's made ours, in evaluation."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.MultiheadAttention:
                own = MultiheadAttention(
                    WIDTH, HEADS, batch_first=child.batch_first, mechanism=build_mechanism(spec, WIDTH, HEADS)
                )
                setattr(module, name, own)
    return model.eval()


class Pair(nn.Module):
    """Called as `Seq2Seq` is, made of `nn.Transformer`."""

    def __init__(self, spec: Any = "entmax", batch_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        made = nn.Transformer(WIDTH, HEADS, 1, 1, 24, dropout=0.0, batch_first=batch_first)
        self.transformer, self.batch_first = replaced(made, spec), batch_first

    def forward(self, source: Tensor, target: Tensor, source_mask: Tensor, target_mask: Tensor) -> Tensor:
        x, y = self.embedding(source), self.embedding(target)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        return self.transformer(
            x,
            y,
            tgt_mask=torch.ones(target.shape[1], target.shape[1]).triu(1).bool(),
            src_key_padding_mask=~source_mask,
            tgt_key_padding_mask=~target_mask,
            memory_key_padding_mask=~source_mask,
        )


def sentences() -> Sentences:
    source, target = batch()
    return Sentences(source=Tokens(ids=source, mask=source != PAD), target=Tokens(ids=target, mask=target != PAD))


@pytest.mark.parametrize("spec", ["entmax", "rela", "asentmax", "softpick"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_what_is_captured_are_its_weights(spec: str, need_weights: bool):
    torch.manual_seed(0)
    layer = MultiheadAttention(WIDTH, HEADS, mechanism=build_mechanism(spec, WIDTH, HEADS)).eval()
    x, padding = torch.randn(2, 5, WIDTH), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = layer(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1]
    with torch.no_grad(), capture(layer) as captured:
        out = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]
    torch.testing.assert_close(captured["attention"], expected)
    assert torch.equal(out, layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0])
    assert torch.equal(captured.visible["attention"], (~padding[:, None, :, None] & ~padding[:, None, None]))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_sites_and_masks_of_a_transformer_of_torch(batch_first: bool):
    model, (source, target) = Pair(batch_first=batch_first), batch()
    real, inside = source != PAD, target != PAD
    with torch.no_grad(), capture(model) as captured:
        model(source, target, real, inside)
    expected = {
        "transformer.encoder.layers.0.self": real[:, None, :, None] & real[:, None, None],
        "transformer.decoder.layers.0.self": inside[:, None, :, None]
        & inside[:, None, None]
        & torch.ones(4, 4).tril().bool(),
        "transformer.decoder.layers.0.cross": inside[:, None, :, None] & real[:, None, None],
    }
    assert list(captured) == list(expected)
    for site, visible in expected.items():
        assert torch.equal(captured.visible[site], visible), site
        assert (captured[site].sum(-1) - 1.0).abs().masked_select(visible.any(-1).expand(2, HEADS, -1)).max() < 1e-5


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_it_is_analysed_and_shown():
    model = Pair().transformer.encoder
    torch.manual_seed(1)
    embedding = nn.Embedding(VOCAB, WIDTH)

    def run(model: nn.Module, given: Sentences) -> Tensor:
        return model(embedding(given.target.ids), src_key_padding_mask=~given.target.real)

    given = Sentences(target=sentences().source)
    found = analyze(model, [given], shown=[0], run=run)
    assert list(found.sites) == ["layers.0.self"]
    assert list(found.alphas) == ["layers.0.self"]
    assert len(found.sites["layers.0.self"].density) == HEADS
    assert found.shown[0].weights["layers.0.self"].shape == (1, HEADS, 5, 5)
    assert "layers.0.self" in show(model, [given], run=run).html


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_an_encoder_decoder_is_called_as_ours():
    model = Pair("asentmax")
    found = analyze(model, [sentences()], shown=[1])
    assert found.shown[1].weights["transformer.decoder.layers.0.cross"].shape == (1, HEADS, 2, 3)
    assert set(found.scales) == set(found.sites)


def test_learned_alphas_and_importance():
    torch.manual_seed(0)
    model = nn.ModuleDict({"self_attn": MultiheadAttention(WIDTH, HEADS, mechanism=build_mechanism("entmax", 16, 4))})
    layer, x = model["self_attn"].eval(), torch.randn(2, 5, WIDTH)
    assert learned_alphas(model) == {"self": pytest.approx(layer.mechanism.alpha().tolist())}
    with silenced(model, "self", 1):
        found = layer(x, x, x)[0]
    expected = layer.out_proj.weight.detach().clone()
    expected[:, 4:8] = 0.0
    layer_out = layer.out_proj.weight.data.clone()
    layer.out_proj.weight.data = expected
    torch.testing.assert_close(found, layer(x, x, x)[0])
    layer.out_proj.weight.data = layer_out
    importance = head_importance(model, lambda: float(layer(x, x, x)[0].square().sum()))
    assert len(importance.change["self"]) == HEADS


@pytest.mark.parametrize(
    "look",
    [
        lambda model: analyze(model, [sentences()]),
        lambda model: show(model, [sentences()]),
        learned_alphas,
        lambda model: capture(model).__enter__(),
        lambda model: silenced(model, "self", 0).__enter__(),
        lambda model: head_importance(model, float),
    ],
    ids=["analyze", "show", "learned_alphas", "capture", "silenced", "head_importance"],
)
def test_a_model_without_attention_to_see(look: Any):
    """Torch's own attention cannot be seen either."""
    with pytest.raises(ValueError, match=r"has no attention to see: looked for tamis\.nn\.Attention, tamis\.nn\.Multi"):
        look(nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True))
