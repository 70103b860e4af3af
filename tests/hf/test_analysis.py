"""`tamis.analysis` on Hugging Face models."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny
from tamis.analysis import (
    Sentences,
    Tokens,
    analyze,
    attention_sites,
    capture,
    head_importance,
    learned_alphas,
    silenced,
)


def sentences(name, fed, rows=slice(None), trim=(0, 0)):
    """A batch, or one sentence of it without its padding."""

    def tokens(key, cut):
        ids = fed[key][rows]
        length = ids.shape[1] - cut
        mask = torch.ones_like(ids, dtype=torch.bool) if cut else real[key][rows]
        return Tokens(ids=ids[:, :length], mask=mask[:, :length])

    real = {key: fed[key] != tiny.PAD for key in ("input_ids", "decoder_input_ids") if key in fed}
    if name not in tiny.SEQ2SEQ:
        return Sentences(target=tokens("input_ids", trim[0]))
    return Sentences(source=tokens("input_ids", trim[0]), target=tokens("decoder_input_ids", trim[1]))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_padding_does_not_count(name, mechanism):
    """The figures of a padded batch are those of its sentences one by one."""
    model = tamis.hf.sparsify(tiny.build(name), mechanism, **tiny.MECHANISMS[mechanism])
    fed = tiny.inputs(name)
    fed["input_ids"][0, -3:] = tiny.PAD
    if name in tiny.SEQ2SEQ:
        fed["decoder_input_ids"][0, -2:] = tiny.PAD
    together = analyze(model, [sentences(name, fed)], run=tamis.hf.run_model)
    alone = [sentences(name, fed, slice(0, 1), (3, 2)), sentences(name, fed, slice(1, 2))]
    apart = analyze(model, alone, run=tamis.hf.run_model)
    assert together.sites.keys() == apart.sites.keys() == attention_sites(model).keys()
    for site, found in together.sites.items():
        expected = apart.sites[site]
        assert found.rows == expected.rows
        assert found.density == pytest.approx(expected.density, abs=1e-6)
        assert found.support_size == pytest.approx(expected.support_size, abs=1e-6)
        assert found.entropy == pytest.approx(expected.entropy, abs=1e-4)
    assert bool(together.scales) is (mechanism == "asentmax")


def test_sites_are_named_as_those_of_our_models():
    names = {name: set(attention_sites(tamis.hf.sparsify(tiny.build(name)))) for name in ("llama", "bert", "t5")}
    assert names["llama"] == {"layers.0.self", "layers.1.self"}
    assert names["bert"] == {"encoder.0.self", "encoder.1.self"}
    kinds = ("encoder.{}.self", "decoder.{}.self", "decoder.{}.cross")
    assert names["t5"] == {kind.format(layer) for kind in kinds for layer in (0, 1)}


def test_only_the_sites_asked_for():
    model = tamis.hf.sparsify(tiny.build("marian"))
    with capture(model, sites=lambda site: site == "decoder.1.cross") as captured:
        model(**tiny.inputs("marian"))
    assert set(captured) == {"decoder.1.cross"}


def test_layers_left_dense_are_seen_too():
    model = tamis.hf.sparsify(tiny.build("llama"), alpha=2.0, layers=[1])
    fed = tiny.inputs("llama")
    found = analyze(model, [Sentences(target=Tokens(ids=fed["input_ids"]))], run=tamis.hf.run_model)
    assert set(found.sites["layers.0.self"].density) == {1.0}
    assert max(found.sites["layers.1.self"].density) < 1.0


def test_learned_alphas():
    model = tamis.hf.sparsify(tiny.build("gpt2"), start=1.3)
    assert learned_alphas(model)["layers.1.self"] == pytest.approx([1.3] * tiny.HEADS)


def test_silenced_head_leaves_the_projection_without_its_channels():
    model, fed = tamis.hf.sparsify(tiny.build("llama"), alpha=1.5), tiny.inputs("llama")
    before = model(**fed).logits
    projection = model.model.layers[0].self_attn.o_proj
    seen = []
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with silenced(model, "layers.0.self", 2):
        assert not torch.equal(model(**fed).logits, before)
    handle.remove()
    assert (seen[0][..., 16:24] == 0).all()
    assert not (seen[0][..., :16] == 0).all()
    assert torch.equal(model(**fed).logits, before)


def test_head_importance():
    model, fed = tamis.hf.sparsify(tiny.build("bert"), "rela"), tiny.inputs("bert")
    found = head_importance(model, lambda: model(**fed).logits.square().mean().item())
    assert {site: len(change) for site, change in found.change.items()} == {"encoder.0.self": 4, "encoder.1.self": 4}
