import pytest
import torch

from tamis.analysis import capture, normalised_entropy, support_size
from tamis.evaluation.dispersion import DispersionConfig, measure_dispersion
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn.modes import evaluating

SIZES = {"vocab_size": 20, "embed_dim": 32, "num_heads": 4, "ffn_dim": 32, "num_layers": 2}
SPARSE = ["asentmax", {"name": "entmax", "alpha": 1.5}, "entmax"]


def built(mechanism, position="nape", sharper=1.0):
    torch.manual_seed(0)
    model = CausalLM(CausalLMConfig(mechanism=mechanism, position=position, **SIZES)).double()
    for layer in model.layers:
        layer.self_attention.q_proj.weight.data *= sharper
    return model


def texts(samples=2, length=48):
    return torch.randint(20, (samples, length), generator=torch.Generator().manual_seed(1)).split(1)


@pytest.mark.parametrize("mechanism", [*SPARSE, "softmax", "ssmax", "rela", "softpick"])
def test_last_rows_of_a_cached_text_are_those_of_the_whole(mechanism):
    model = built(mechanism)
    found = measure_dispersion(model, texts(), 24, queries=8)
    assert (found.length, found.keys, found.samples) == (24, 48, 2)
    with evaluating(model), capture(model) as captured:
        model(torch.cat(texts()))
    distances = torch.arange(48)[:, None] - torch.arange(48)
    for site, weights in captured.items():
        last = weights[:, :, -8:]
        visible = captured.visible[site][:, :, -8:]
        own = found.sites[site]
        assert own.entropy == pytest.approx(normalised_entropy(last, visible).tolist())
        assert own.support == pytest.approx(support_size(last, visible).tolist())
        assert list(own.reach) == torch.where(last != 0.0, distances[-8:], 0).amax((0, 2, 3)).tolist()


@pytest.mark.parametrize("mechanism", SPARSE)
@pytest.mark.parametrize("sharper", [1.0, 20.0])
@pytest.mark.parametrize("position", ["nape", "alibi"])
def test_no_weight_lies_beyond_the_horizon(mechanism, sharper, position):
    found = measure_dispersion(built(mechanism, position, sharper), texts(), 48, queries=12)
    for site in found.sites.values():
        assert site.beyond == 0
        for slope, reach, horizon in zip(site.slopes, site.reach, site.horizon, strict=True):
            assert (horizon is None) == (slope == 0.0)
            assert horizon is None or reach <= horizon


def test_scores_of_zero_by_hand():
    """Heads without a bias are uniform; with slopes 1 and 1/2 R is 2 and 4, and entmax 1.5 gets there."""
    model = built({"name": "entmax", "alpha": 1.5}, sharper=0.0)
    for site in measure_dispersion(model, texts(), 48, queries=1).sites.values():
        assert site.slopes == (1.0, 0.5, 0.0, 0.0)
        assert site.support == (2.0, 4.0, 48.0, 48.0)
        assert site.entropy[2:] == pytest.approx((1.0, 1.0))
        assert site.reach == (1, 3, 47, 47)
        assert site.horizon == (1, 3, None, None)


def test_softmax_has_no_horizon():
    found = measure_dispersion(built("softmax"), texts(), 48, queries=4)
    assert {horizon for site in found.sites.values() for horizon in site.horizon} == {None}


@pytest.mark.parametrize("settings", [{"lengths": [0]}, {"lengths": 5}, {"samples": 0}, {"queries": 0}, {"seed": -1}])
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DispersionConfig(**settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(dtype):
    found = measure_dispersion(built("asentmax").to(dtype), texts(), 48, queries=4)
    assert sum(site.beyond for site in found.sites.values()) == 0
