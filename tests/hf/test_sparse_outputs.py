"""`output_attentions="sparse"`: the exact non-zeros of what `output_attentions=True` returns."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny
from tamis.functional import SparseWeights


def parts(out):
    """Every attention of an output, by what it is of."""
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return {name: found for name in names if (found := getattr(out, name, None))}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.parametrize("mechanism", ["entmax", "rela"])
def test_non_zeros_are_those_of_the_dense_weights(name, mechanism):
    model = tamis.hf.sparsify(tiny.build(name), mechanism, **tiny.MECHANISMS[mechanism])
    ids = torch.randint(3, tiny.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    fed = {"input_ids": ids, **({"decoder_input_ids": ids[:, :6]} if name in tiny.SEQ2SEQ else {})}
    with torch.no_grad():
        plain, dense, sparse = (model(**fed, output_attentions=wanted) for wanted in (False, True, "sparse"))
    assert torch.equal(plain.logits, sparse.logits)
    assert parts(dense).keys() == parts(sparse).keys()
    assert parts(sparse)
    for kind, layers in parts(dense).items():
        for expected, found in zip(layers, parts(sparse)[kind], strict=True):
            assert isinstance(found, SparseWeights)
            torch.testing.assert_close(found.to_dense(), expected)
            assert found.val.numel() == int((expected != 0).sum())


def test_only_what_is_asked_for_is_sparse():
    model = tamis.hf.sparsify(tiny.build("llama"), "entmax", alpha=1.5)
    ids = torch.randint(3, tiny.VOCABULARY, (1, 5))
    with torch.no_grad():
        assert isinstance(model(ids, output_attentions="sparse").attentions[0], SparseWeights)
        assert isinstance(model(ids, output_attentions=True).attentions[0], torch.Tensor)
        assert isinstance(model.model(ids, output_attentions="sparse").attentions[0], SparseWeights)
        with pytest.raises(ValueError, match="must be True, False or \"sparse\", got 'dense'"):
            model(ids, output_attentions="dense")
        with pytest.raises(IndexError):
            model(ids + 1000, output_attentions="sparse")
        assert isinstance(model(ids, output_attentions=True).attentions[0], torch.Tensor), "after an error too"


def test_densify_takes_it_out_again():
    model = tamis.hf.densify(tamis.hf.sparsify(tiny.build("llama"), "entmax"))
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
