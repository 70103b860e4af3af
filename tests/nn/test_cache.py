import pytest
import torch

from tamis.models import CausalLM, CausalLMConfig


@pytest.mark.parametrize("position", ["rope", "nape", "none"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_shortened_cache_goes_on_differently(position, padded):
    """As if the tokens that were forgotten had never been read, with padding before and without."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 16, "num_layers": 2}
    model = CausalLM(CausalLMConfig(vocab_size=20, position=position, **sizes)).eval()
    tokens = torch.randint(20, (2, 12))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = not padded
    with torch.no_grad():
        cache, fresh = model.new_cache(), model.new_cache()
        for own in (cache, fresh):
            model(tokens[:, :6], mask if padded else None, cache=own)
        model(tokens[:, 6:9], cache=cache)
        cache.shorten(6)
        assert cache.length == 6
        torch.testing.assert_close(model(tokens[:, 9:], cache=cache), model(tokens[:, 9:], cache=fresh))
    with pytest.raises(ValueError, match="holds 9 tokens, and cannot be shortened to 10"):
        cache.shorten(10)
