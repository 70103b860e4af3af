"""A model owns its config: what is installed in one is not said of another."""

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import tamis.hf
from hf import tiny


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_models_that_share_a_config_do_not_share_what_is_installed(name):
    first = tiny.build(name).eval()
    second = type(first)(first.config).eval()
    assert second.config is first.config
    fed = tiny.inputs(name)
    dense = second(**fed)[0]
    tamis.hf.sparsify(first, "entmax", alpha=1.5)
    assert not hasattr(second.config, "tamis")
    torch.testing.assert_close(second(**fed)[0], dense, rtol=0.0, atol=0.0)
    tamis.hf.sparsify(second, "rela")
    sites = first.config.tamis["sites"].values()
    assert {site["name"] for site in sites} == {"entmax"}
    assert {site["name"] for site in second.config.tamis["sites"].values()} == {"rela"}


def test_each_is_saved_and_loaded_as_itself(tmp_path):
    first = tiny.build("llama").eval()
    second = type(first)(first.config).eval()
    second.load_state_dict(first.state_dict())
    tamis.hf.sparsify(first, "entmax", alpha=2.0)
    second.save_pretrained(tmp_path / "dense")
    first.save_pretrained(tmp_path / "sparse")
    fed = tiny.inputs("llama")
    loaded = tamis.hf.from_pretrained(tmp_path / "sparse").eval()
    torch.testing.assert_close(loaded(**fed).logits, first(**fed).logits)
    with pytest.raises(ValueError, match="holds no model with sparse attention"):
        tamis.hf.from_pretrained(tmp_path / "dense")


def test_the_parts_of_a_model_go_on_sharing_one_config():
    model = tiny.build("llama")
    given = model.config
    tamis.hf.sparsify(model)
    own = {id(module.config) for module in model.modules() if hasattr(module, "config")}
    assert own == {id(model.config)}
    assert model.config is not given
    assert given._attn_implementation != "tamis"
