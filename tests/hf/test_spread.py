"""The start of the scores of Hugging Face models: measured, and set exactly, in every architecture that can have it."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny

NORMALISED = ("qwen3",)


@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name not in NORMALISED])
@pytest.mark.parametrize("mechanism", tiny.MECHANISMS)
def test_every_site_gets_the_spread(name, mechanism):
    model, fed = tamis.hf.sparsify(tiny.build(name), mechanism), tiny.inputs(name)
    before = tamis.hf.set_spread(model, fed, spread=0.3)
    assert before.keys() == model.config.tamis["sites"].keys()
    for found in tamis.hf.measure_spread(model, fed).values():
        torch.testing.assert_close(found, torch.full_like(found, 0.3), rtol=1e-3, atol=0.0)
    assert model(**fed)[0].isfinite().all()


@pytest.mark.parametrize("name", ["llama", "marian"])
def test_sparsify_sets_it_on_random_tokens(name):
    model = tamis.hf.sparsify(tiny.build(name), "entmax", spread=0.2)
    for found in tamis.hf.measure_spread(model).values():
        torch.testing.assert_close(found, torch.full_like(found, 0.2), rtol=1e-3, atol=0.0)


def test_without_a_spread_nothing_is_rescaled():
    dense, sparse = tiny.build("llama"), tamis.hf.sparsify(tiny.build("llama"), "entmax")
    weights = sparse.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in dense.state_dict().items())


def test_a_model_that_normalises_queries_is_refused():
    with pytest.raises(ValueError, match="such as a norm, undoes their scale"):
        tamis.hf.sparsify(tiny.build("qwen3"), "entmax", spread=0.2)


def test_a_dense_model_is_refused():
    with pytest.raises(ValueError, match="no attention layer of tamis"):
        tamis.hf.measure_spread(tiny.build("llama"))
