"""Seq2Seq and CausalLM: causality, padding, caches and packing never change a logit; what is saved comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tamis import functional
from tamis.mechanisms import MECHANISMS, LearnedAlpha
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.models.blocks import POSITIONS
from tamis.nn import ModelCache

VOCAB, PAD = 13, 0
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "embed_dim": 16, "num_heads": 4, "ffn_dim": 24, "max_length": 32}
CLOSE: dict[str, float] = {"atol": 1e-5, "rtol": 1e-4}
every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
every_position = pytest.mark.parametrize("position", POSITIONS)
every_arrangement = pytest.mark.parametrize("arrangement", ["pre", "post", "both"])


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def seq2seq(mechanism: Any = "entmax", seed: int = 0, **options: Any) -> Seq2Seq:
    torch.manual_seed(seed)
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    return Seq2Seq(Seq2SeqConfig(**{**SMALL, **layers, **chosen, **options})).eval()


def causal_lm(mechanism: Any = "asentmax", seed: int = 0, **options: Any) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(CausalLMConfig(**{**SMALL, "num_layers": 2, "mechanism": mechanism, **options})).eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Never the padding."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------
# Shapes and counts


def test_the_base_model_has_144_learned_alphas():
    """Six encoder layers, and six decoder layers with two attentions each, of eight heads."""
    with torch.device("meta"):
        model = Seq2Seq(Seq2SeqConfig(vocab_size=100))
    alphas = [module for module in model.modules() if isinstance(module, LearnedAlpha)]
    assert len(alphas) == 18
    assert sum(parameter.numel() for module in alphas for parameter in module.parameters()) == 144
    assert len({id(module.raw) for module in alphas}) == 18


def test_the_base_model_is_the_base_model():
    with torch.device("meta"):
        model = Seq2Seq(Seq2SeqConfig(vocab_size=1000))
    attention, ffn, norm = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder, decoder = attention + ffn + 2 * norm, 2 * attention + ffn + 3 * norm
    assert model.num_parameters() == 1000 * 512 + 6 * (encoder + decoder) + 2 * norm + 144


@pytest.mark.parametrize("tied", [True, False])
def test_seq2seq_shapes(tied: bool):
    model = seq2seq(tie_embeddings=tied, source_vocab_size=7)
    source, target = tokens(3, 5) % 7, tokens(3, 4)
    assert model(source, target).shape == (3, 4, VOCAB)
    assert model.encode(source).shape == (3, 5, 16)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"head_dim": 6}, {"head_dim": 6, "num_kv_heads": 1}])
@pytest.mark.parametrize("mechanism", ["rela", "asentmax"])
@pytest.mark.parametrize("position", ["rope", "nape"])
def test_head_sizes_and_groups(options: dict[str, int], mechanism: str, position: str):
    model, x = causal_lm(mechanism, position=position, **options), tokens(2, 6)
    full, cache = model(x), model.new_cache()
    assert full.shape == (2, 6, VOCAB)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, **CLOSE)


@every_mechanism
@every_position
def test_later_tokens_do_not_change_earlier_logits(mechanism: str, position: str):
    model, pair = causal_lm(mechanism, position=position), seq2seq(mechanism, position=position)
    x, source, cut = tokens(2, 8), tokens(2, 5, 1), 5
    changed = x.clone()
    changed[:, cut:] = x[:, cut:] % (VOCAB - 1) + 1
    for logits in (model, lambda y: pair(source, y)):
        before, after = logits(x), logits(changed)
        torch.testing.assert_close(after[:, :cut], before[:, :cut], atol=1e-6, rtol=1e-5)
        assert (after[:, cut:] - before[:, cut:]).abs().amax(-1).min() > 1e-4


def test_the_source_is_seen_both_ways():
    model, source, target = seq2seq("softmax"), tokens(1, 6), tokens(1, 3)
    for place in (0, 5):
        changed = source.clone()
        changed[:, place] = source[:, place] % (VOCAB - 1) + 1
        assert (model(changed, target) - model(source, target)).abs().amax(-1).min() > 1e-5


# ---------------------------------------------------------------------------------------------------------------
# Padding, packing


@every_mechanism
@every_position
def test_right_padding_of_the_source_changes_nothing(mechanism: str, position: str):
    model, source, target = seq2seq(mechanism, position=position), tokens(2, 5), tokens(2, 4, 1)
    padded = F.pad(source, (0, 3), value=PAD)
    torch.testing.assert_close(model(padded, target), model(source, target), **CLOSE)
    mask = torch.arange(8) < torch.full((2, 1), 5)
    filled = torch.where(mask, padded, 3)
    torch.testing.assert_close(model(filled, target, source_mask=mask), model(source, target), **CLOSE)


@every_mechanism
@every_position
def test_left_padding_of_the_prompt_changes_nothing(mechanism: str, position: str):
    model, x = causal_lm(mechanism, position=position), tokens(2, 6)
    padded = torch.stack([F.pad(x[0], (3, 0), value=5), F.pad(x[1, 2:], (5, 0), value=5)])
    mask = torch.arange(9) >= torch.tensor([[3], [5]])
    out = model(padded, mask)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[0, 3:], model(x[:1])[0], **CLOSE)
    torch.testing.assert_close(out[1, 5:], model(x[1:, 2:])[0], **CLOSE)


@every_position
@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_padded_on_either_side_continue_with_a_cache(mechanism: str, position: str, side: str):
    """A prompt of 4 and one of 6 in one batch, then five more tokens."""
    model, x = causal_lm(mechanism, position=position), tokens(2, 11)
    mask = torch.ones(2, 6, dtype=torch.bool)
    prompt = x[:, :6].clone()
    if side == "left":
        prompt[0], mask[0, :2] = torch.cat([torch.tensor([5, 5]), x[0, :4]]), False
    else:
        prompt[0, 4:], mask[0, 4:] = 5, False
    more = torch.stack([x[0, 4:9], x[1, 6:11]])
    cache = model.new_cache()
    with torch.no_grad():
        model(prompt, mask, cache=cache)
        out = torch.cat([model(part, cache=cache) for part in more.split(1, 1)], 1)
        torch.testing.assert_close(out[1], model(x[1:])[0, 6:], **CLOSE)
        torch.testing.assert_close(out[0], model(x[:1, :9])[0, 4:], **CLOSE)


@every_mechanism
@every_position
def test_packed_documents_are_separate_ones(mechanism: str, position: str):
    model, x, bounds = causal_lm(mechanism, position=position), tokens(1, 12), [0, 4, 5, 12]
    packed = model(x, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for start, stop in itertools.pairwise(bounds):
        torch.testing.assert_close(packed[:, start:stop], model(x[:, start:stop]), **CLOSE)


def test_packed_documents_may_be_longer_together_than_the_learned_positions():
    model, x = causal_lm(position="learned", max_length=4), tokens(1, 8)
    packed = model(x, cu_seqlens=torch.tensor([0, 4, 8]))
    torch.testing.assert_close(packed[:, 4:], model(x[:, 4:]), **CLOSE)


def test_left_padding_may_reach_beyond_the_learned_positions():
    model, x = causal_lm(position="learned", max_length=4), tokens(1, 4)
    mask = torch.arange(6)[None] >= 2
    torch.testing.assert_close(model(F.pad(x, (2, 0), value=5), mask)[:, 2:], model(x), **CLOSE)


def test_a_cache_that_outgrows_the_learned_positions_says_so():
    model, cache = causal_lm(position="learned", max_length=4), ModelCache(2)
    model(tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match="learned"):
        model(tokens(1, 1), cache=cache)


@every_position
def test_explicit_positions_are_the_default_ones_when_equal(position: str):
    model, x = causal_lm(position=position), tokens(2, 6)
    assert torch.equal(model(x, positions=torch.arange(6)[None]), model(x))
    assert torch.equal(model(x, positions=torch.arange(6).expand(2, -1)), model(x))
    assert torch.equal(model(x, positions=torch.arange(6)), model(x))
    square = tokens(2, 4)  # as many tokens as heads
    assert torch.equal(model(square, positions=torch.arange(4)), model(square))
    with pytest.raises(ValueError, match="positions must be"):
        model(x, positions=torch.arange(5))


# ---------------------------------------------------------------------------------------------------------------
# Step by step


@every_mechanism
@every_position
@every_arrangement
def test_steps_of_the_language_model_are_the_full_forward(mechanism: str, position: str, arrangement: str):
    model, x = causal_lm(mechanism, position=position, arrangement=arrangement), tokens(2, 6)
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in x.split([3, 1, 1, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(x), **CLOSE)
    assert cache.length == 6


@every_mechanism
@every_position
@every_arrangement
def test_steps_of_the_decoder_are_the_full_forward(mechanism: str, position: str, arrangement: str):
    model = seq2seq(mechanism, position=position, arrangement=arrangement, encoder_layers=1)
    source, target = tokens(2, 5), tokens(2, 5, 1)
    source[1, 3:] = PAD
    mask, cache = source != PAD, model.new_cache()
    with torch.no_grad():
        memory = model.encode(source)
        parts = [model.decode(part, memory, mask, cache) for part in target.split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(source, target), **CLOSE)


@pytest.mark.parametrize("index", [[1, 0, 2], [0, 0, 0], [2], [0, 0, 1, 1, 2, 2]])
def test_reordered_beams_of_a_model(index: list[int]):
    model, order = seq2seq(position="rope"), torch.tensor(index)
    source, target, more = tokens(3, 5), tokens(3, 3, 1), tokens(len(index), 2, 2)
    source[1, 3:] = PAD
    mask, cache = source != PAD, model.new_cache()
    with torch.no_grad():
        memory = model.encode(source)
        model.decode(target, memory, mask, cache)
        cache.reorder(order)
        out = model.decode(more, memory[order], mask[order], cache)
        full = model(source[order], torch.cat([target[order], more], 1))
    torch.testing.assert_close(out, full[:, 3:], **CLOSE)


def test_reordered_beams_with_left_padding():
    model, order, x = causal_lm(), torch.tensor([1, 1, 0]), tokens(2, 5)
    mask, more, cache = torch.arange(5) >= torch.tensor([[2], [0]]), tokens(3, 2, 1), ModelCache(2)
    with torch.no_grad():
        model(x, mask, cache=cache)
        cache.reorder(order)
        out = model(more, cache=cache)
        whole = torch.cat([mask[order], torch.ones(3, 2, dtype=torch.bool)], 1)
        full = model(torch.cat([x[order], more], 1), whole)
    torch.testing.assert_close(out, full[:, 5:], **CLOSE)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_another_depth_is_refused(layers: int):
    with pytest.raises(ValueError, match=r"cache|layers"):
        causal_lm()(tokens(1, 2), cache=ModelCache(layers))


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("foreign", ["width", "batch", "dtype"])
@pytest.mark.parametrize("new_mask", [True, False])
def test_a_cache_that_does_not_fit_is_refused_and_left_whole(padded: bool, foreign: str, new_mask: bool):
    """Its owner goes on with it as if nothing had happened."""
    owner, x, cache = causal_lm(embed_dim=32), tokens(2, 6), ModelCache(2)
    mask = torch.arange(3) >= torch.tensor([[0], [2]]) if padded else None
    other = {"width": causal_lm(), "batch": owner, "dtype": causal_lm(embed_dim=32).double()}[foreign]
    batch = 3 if foreign == "batch" else 2
    with torch.no_grad():
        owner(x[:, :3], mask, cache=cache)
        with pytest.raises(ValueError, match="another model"):
            other(tokens(batch, 1), torch.ones(batch, 1, dtype=torch.bool) if new_mask else None, cache=cache)
        assert cache.length == 3
        assert cache.mask is mask or torch.equal(cache.mask, mask)
        whole = None if mask is None else F.pad(mask, (0, 3), value=True)
        torch.testing.assert_close(owner(x[:, 3:], cache=cache), owner(x, whole)[:, 3:], **CLOSE)


def test_a_decoder_refuses_the_cache_of_another_and_leaves_it_whole():
    owner, other, cache = seq2seq(embed_dim=32), seq2seq(), ModelCache(2)
    source, target = tokens(2, 5), tokens(2, 4, 1)
    mask = torch.ones(2, 2, dtype=torch.bool)
    with torch.no_grad():
        memory = owner.encode(source)
        owner.decode(target[:, :2], memory, cache=cache)
        with pytest.raises(ValueError, match="another model"):
            other.decode(target[:, 2:], other.encode(source), cache=cache, target_mask=mask)
        assert cache.mask is None
        out = owner.decode(target[:, 2:], memory, cache=cache)
        torch.testing.assert_close(out, owner(source, target)[:, 2:], **CLOSE)


@pytest.mark.parametrize("shape", [(2, 3), (1, 2), (2,)])
def test_a_mask_that_does_not_cover_the_new_tokens_is_refused(shape: tuple[int, ...]):
    model, cache = causal_lm(), ModelCache(2)
    model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match=r"mask must be boolean and cover the new tokens, \(2, 2\)"):
        model(tokens(2, 2), torch.ones(shape, dtype=torch.bool), cache=cache)


def test_cached_steps_of_a_model_can_be_differentiated():
    model, x, cache = causal_lm(), tokens(2, 5), ModelCache(2)
    out = torch.cat([model(part, cache=cache) for part in x.split([2, 1, 2], 1)], 1)
    learned = list(model.parameters())
    gradients = torch.autograd.grad(out.square().sum(), learned)
    expected = torch.autograd.grad(model(x).square().sum(), learned)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------------
# Saving

SAVED: dict[str, Callable[[], Any]] = {
    "lm": causal_lm,
    "lm-untied": lambda: causal_lm(tie_embeddings=False),
    "lm-learned": lambda: causal_lm(position="learned"),
    "lm-table": lambda: causal_lm({"name": "rela", "variant": "i", "bias": -0.5}),
    "seq2seq": seq2seq,
    "seq2seq-untied": lambda: seq2seq(tie_embeddings=False),
    "seq2seq-source": lambda: seq2seq(source_vocab_size=9),
    "seq2seq-source-untied": lambda: seq2seq("rela", source_vocab_size=9, tie_embeddings=False, position="learned"),
}


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(tokens(2, 5) % 9, tokens(2, 4, 1)) if isinstance(model, Seq2Seq) else model(tokens(2, 5))


@pytest.mark.parametrize("name", SAVED)
def test_saved_models_come_back_to_the_bit(name: str, tmp_path: Path):
    model = SAVED[name]()
    model.save_pretrained(tmp_path / "new" / "folder")
    torch.manual_seed(99)
    again = type(model).from_pretrained(tmp_path / "new" / "folder")
    assert again.config == model.config
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(logits(again), logits(model))


def test_saving_twice_overwrites(tmp_path: Path):
    first, second = causal_lm(), causal_lm(seed=1)
    first.save_pretrained(tmp_path)
    second.save_pretrained(str(tmp_path))
    assert torch.equal(CausalLM.from_pretrained(str(tmp_path)).embedding.weight, second.embedding.weight)


@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax", "ssmax"])
def test_a_bf16_model_comes_back_to_the_bit(mechanism: str, tmp_path: Path):
    model = causal_lm(mechanism)
    learned = {key: x.clone() for key, x in model.named_parameters() if ".mechanism." in key}
    assert learned
    model.bfloat16().save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path)
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(ours[key].float(), theirs[key].float()) for key in ours)
    for key, x in learned.items():
        assert theirs[key].dtype == torch.float32
        assert torch.equal(theirs[key], x)
    assert torch.equal(logits(again.bfloat16()), logits(model))


def test_a_bf16_model_comes_back_as_one(tmp_path: Path):
    model = causal_lm("entmax").bfloat16()
    model.save_pretrained(tmp_path)
    again = CausalLM.from_pretrained(tmp_path)
    assert {k: x.dtype for k, x in again.named_parameters()} == {k: x.dtype for k, x in model.named_parameters()}


def test_another_class_is_refused(tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"CausalLM.*Seq2Seq"):
        Seq2Seq.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(missing: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        CausalLM.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        CausalLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "null", "\x00\xff"])
def test_a_broken_config_is_named(content: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        CausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage"])
def test_broken_weights_are_named(damage: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": b"\xff" * 64}[damage])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        CausalLM.from_pretrained(tmp_path)


def edit(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v != "REMOVE"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, "did you mean 'num_layers'"),
        ({"num_layers": 3}, "layers"),
        ({"embed_dim": 32}, "size mismatch|shape"),
        ({"mechanism": "asentmx"}, "did you mean 'asentmax'"),
        ({"vocab_size": "REMOVE"}, "vocab_size"),
        ({"vocab_size": "13"}, "vocab_size"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path):
    causal_lm().save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises((ValueError, RuntimeError), match=message):
        CausalLM.from_pretrained(tmp_path)


@every_position
@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax", "ssmax"])
def test_the_state_is_the_parameters_and_nothing_else(mechanism: str, position: str):
    """No slopes, no masks of heads, no tensor under two names."""
    for model in (causal_lm(mechanism, position=position), seq2seq(mechanism, position=position)):
        assert set(model.state_dict()) == {key for key, _ in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------------
# Configs


@pytest.mark.parametrize("kind", [CausalLM, Seq2Seq])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 10.0}, "vocab_size"),
        ({"embed_dim": -8}, "embed_dim"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 6}, "multiple of num_heads"),
        ({"embed_dim": 18}, "multiple of num_heads"),
        ({"ffn_dim": 0}, "ffn_dim"),
        ({"max_length": 0}, "max_length"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": -2}, "head_dim"),
        ({"head_dim": 5, "position": "rope"}, "even"),
        ({"position": "sinusodial"}, "did you mean 'sinusoidal'"),
        ({"position": None}, "position"),
        ({"norm": "layernrom"}, "did you mean 'layernorm'"),
        ({"arrangement": "prenorm"}, "did you mean 'pre'"),
        ({"activation": "gleu"}, "did you mean 'ge?lu'|did you mean 'geglu'"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention_dropout": 1.5}, "dropout"),
        ({"attention_dropout": -0.1}, "dropout"),
        ({"position": "nape", "num_heads": 1}, "NAPE"),
        ({"mechanism": "sparsmax"}, "did you mean 'sparsemax'"),
        ({"mechanism": None}, r"mechanism: a mechanism is given by its name .*got None"),
        ({"mechanism": {"alpha": 1.5}}, r"mechanism: a mechanism is given by its name"),
        ({"mechanism": {"name": "entmax", "alpha": 3.0}}, "alpha"),
        ({"mechanism": {"name": "rela", "activation": "rellu"}}, "relu"),
    ],
)
def test_bad_settings_are_refused_before_the_first_batch(kind: type, changes: dict[str, Any], message: str):
    make = causal_lm if kind is CausalLM else seq2seq
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder_layers": -1}, "encoder_layers"),
        ({"decoder_layers": 1.5}, "decoder_layers"),
        ({"source_vocab_size": 0}, "source_vocab_size"),
        ({"pad_id": -1}, "pad_id"),
    ],
)
def test_bad_settings_of_seq2seq(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        seq2seq(**changes)


@pytest.mark.parametrize("config", [CausalLMConfig(vocab_size=5), Seq2SeqConfig(vocab_size=5, source_vocab_size=3)])
def test_configs_are_plain_values(config: Any):
    values = json.loads(json.dumps(config.to_dict()))
    assert type(config).from_dict(values) == config
    with pytest.raises(AttributeError):
        config.vocab_size = 6
    with pytest.raises(ValueError, match="did you mean 'embed_dim'"):
        type(config).from_dict({"vocab_size": 5, "embed_dims": 8})
    with pytest.raises(TypeError):
        type(config)(5)


# ---------------------------------------------------------------------------------------------------------------
# Starts and training


@pytest.mark.parametrize("make", [causal_lm, seq2seq])
def test_a_seed_decides_the_start(make: Callable[..., nn.Module]):
    first, again, other = make(seed=3).state_dict(), make(seed=3).state_dict(), make(seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_starts_have_the_scale_of_the_papers():
    model = seq2seq(embed_dim=64, vocab_size=500, ffn_dim=256, tie_embeddings=False)
    assert model.embedding.weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    up = model.encoder[0].feed_forward.up
    assert up.weight.abs().max() <= (6.0 / (64 + 256)) ** 0.5
    assert up.weight.abs().max() > 0.98 * (6.0 / (64 + 256)) ** 0.5
    assert (up.bias == 0.0).all()
    raw = torch.cat([m.raw.flatten() for m in model.modules() if isinstance(m, LearnedAlpha)])
    assert raw.std() > 0.3  # N(0, 1), not zeroed


@pytest.mark.parametrize("spread", [1.0, 0.2, 3.0])
def test_the_spread_of_scores_at_the_start_is_that_of_the_config(spread: float):
    model = causal_lm(embed_dim=256, num_heads=4, head_dim=64, ffn_dim=8, num_layers=1, initial_spread=spread)
    attention = model.layers[0].self_attention
    x = torch.randn(2, 300, 256)
    query, key = (
        projection(x).view(2, 300, 4, 64).transpose(1, 2) for projection in (attention.q_proj, attention.k_proj)
    )
    assert (query @ key.mT / 8.0).std().item() == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("spread", [0.0, -1.0, float("nan"), "1"])
def test_a_spread_that_is_none_is_refused(spread: Any):
    with pytest.raises(ValueError, match="initial_spread"):
        causal_lm(initial_spread=spread)


def test_the_spread_changes_queries_and_keys_alone():
    usual, narrow = causal_lm().state_dict(), causal_lm(initial_spread=0.25).state_dict()
    for name, tensor in usual.items():
        factor = 0.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
        torch.testing.assert_close(narrow[name], factor * tensor)


def test_embeddings_are_scaled_and_positions_added():
    model, source = seq2seq(encoder_layers=0, arrangement="post"), tokens(1, 4)
    expected = model.encoder_position.embed(model.embedding.weight[source] * 4.0, torch.arange(4)[None])
    torch.testing.assert_close(model.encode(source), expected)


@every_mechanism
def test_gradients_reach_every_parameter(mechanism: str):
    for model in (
        causal_lm(mechanism, position="learned", arrangement="both", tie_embeddings=False, bias=True),
        seq2seq(mechanism, position="learned", source_vocab_size=VOCAB, tie_embeddings=False),
    ):
        model.train()
        x = tokens(2, 6)
        out = model(x) if isinstance(model, CausalLM) else model(x, tokens(2, 6, 1))
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela", "softpick", "asentmax"])
def test_other_dtypes_train(dtype: torch.dtype, mechanism: str):
    for model in (causal_lm(mechanism), seq2seq(mechanism)):
        exact, model = logits(model), model.to(dtype)
        out = logits(model)
        assert out.dtype == dtype
        assert (out.float() - exact).norm() < (0.1 if dtype == torch.bfloat16 else 1e-4) * exact.norm()
        model.train()
        x = tokens(2, 6)
        out = model(x) if isinstance(model, CausalLM) else model(x, x)
        F.cross_entropy(out.flatten(0, 1).float(), x.flatten()).backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@every_mechanism
def test_a_copy_task_is_learned(mechanism: str):
    model = seq2seq(mechanism, embed_dim=32, encoder_layers=1, decoder_layers=1, dropout=0.0, attention_dropout=0.0)
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(30):
        x = torch.randint(2, VOCAB, (16, 4), generator=generator)
        shifted = F.pad(x[:, :-1], (1, 0), value=1)
        loss = F.cross_entropy(model(x, shifted).flatten(0, 1), x.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@every_mechanism
def test_a_language_model_learns_to_repeat(mechanism: str):
    model = causal_lm(mechanism, embed_dim=32, num_layers=1).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(25):
        x = torch.randint(1, VOCAB, (16, 1), generator=generator).expand(-1, 6)
        loss = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "mechanism", ["entmax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rela", "asentmax"))]
)
def test_seq2seq_compiles_without_a_break(mechanism: str):
    torch._dynamo.reset()
    model, source, target = seq2seq(mechanism, encoder_layers=1, decoder_layers=1), tokens(2, 5), tokens(2, 4, 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(source, target), model(source, target), **CLOSE)


@pytest.mark.parametrize("position", ["nape", pytest.param("rope", marks=pytest.mark.slow)])
def test_causal_lm_compiles_without_a_break(position: str):
    torch._dynamo.reset()
    model, x = causal_lm(position=position, num_layers=1), tokens(2, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), **CLOSE)
    mask = torch.arange(5) >= torch.tensor([[0], [2]])
    torch.testing.assert_close(compiled(x, mask), model(x, mask), **CLOSE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "mechanism",
    [
        "asentmax",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "ssmax", "entmax")),
        pytest.param({"name": "entmax", "alpha": 1.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_language_models_are_compiled_once_for_all_lengths(mechanism: Any, backend: str, monkeypatch):
    if backend == "triton":  # in Triton's interpreter, and opaque to the compiler as on a GPU
        pytest.importorskip("triton")
        run = functional.attention._run
        monkeypatch.setattr(functional.attention, "_run", lambda *inputs: run(*inputs[:4], backend))
    torch._dynamo.reset()
    model = causal_lm(mechanism, num_layers=1, num_heads=2, arrangement="both").train()
    if backend == "reference":  # in which rounding tells nothing apart; the kernels do not take it
        model.double()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, (batch, length) in enumerate([(2, 8), (3, 12)]):
        x = tokens(batch, length, number)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(x)
            gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        expected = model(x)
        torch.testing.assert_close(out, expected, **CLOSE)
        for ours, other in zip(
            gradients, torch.autograd.grad(expected.square().sum(), list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(ours, other, **CLOSE)


def test_training_with_dropout_compiles_without_a_break():
    """The defaults of the base model, attention dropout included."""
    torch._dynamo.reset()
    model = seq2seq(encoder_layers=1, decoder_layers=1).train()
    assert model.config.attention_dropout > 0.0
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(2, 5), tokens(2, 4, 1))
    out.square().sum().backward()
    assert torch.isfinite(model.embedding.weight.grad).all()
