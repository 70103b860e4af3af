"""What a sparsified model computes, on every architecture, against independent references."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the Hugging Face integration needs transformers")

import entmax as peer
import transformers
from transformers.masking_utils import eager_mask

import tamis.hf
from hf import tiny
from tamis.mechanisms import EntmaxAttention, ReLAttention

architectures = pytest.mark.parametrize("name", tiny.ARCHITECTURES)
mechanisms = pytest.mark.parametrize("mechanism", tiny.MECHANISMS)


def sparse(name, mechanism, **changes):
    torch.manual_seed(3)
    return tamis.hf.sparsify(tiny.build(name, **changes), mechanism, **tiny.MECHANISMS[mechanism])


def padded(fed, side, by=3):
    """With padding in front of or behind every sequence, and where the tokens are now."""
    front, behind = (by, 0) if side == "left" else (0, by)
    wider = {key: torch.nn.functional.pad(x, (front, behind), value=0) for key, x in fed.items()}
    if "decoder_input_ids" in fed:
        wider["decoder_input_ids"] = fed["decoder_input_ids"]
    return wider, slice(front, front + fed["input_ids"].shape[1])


def through_our_own_path(site):
    """Alphas as a tensor are solved for; the number 1 is handed to torch's softmax."""
    return EntmaxAttention(site.num_heads, torch.ones(site.num_heads))


@architectures
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mechanism", ["softmax", through_our_own_path])
def test_alpha_1_is_the_original_model(name, implementation, mechanism):
    model, fed = tiny.build(name, implementation), tiny.inputs(name)
    fed["attention_mask"][0, -2:] = 0
    before, gradients = model(**fed).logits, tiny.gradients(model, fed)
    tamis.hf.sparsify(model, mechanism)
    torch.testing.assert_close(model(**fed).logits, before, rtol=1e-4, atol=1e-5)
    after = tiny.gradients(model, fed)
    assert after.keys() == gradients.keys()
    for key in gradients:
        torch.testing.assert_close(after[key], gradients[key], rtol=1e-3, atol=1e-5, msg=key)


def entmax_of_the_peer(module, query, key, value, attention_mask, scaling=None, position_bias=None, **_):
    """Dense, with the masks of eager attention and the transform of the entmax package."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    for bias in (position_bias, attention_mask):
        scores = scores if bias is None else scores + bias
    weights = peer.entmax15(scores, dim=-1)
    return (weights @ value).transpose(1, 2), weights


@architectures
def test_alpha_15_agrees_with_a_dense_model_of_the_entmax_package(name):
    transformers.AttentionInterface.register("peer", entmax_of_the_peer)
    transformers.AttentionMaskInterface.register("peer", eager_mask)
    fed = tiny.inputs(name)
    fed["attention_mask"][0, -3:] = 0
    expected = tiny.build(name, "peer")
    model = tamis.hf.sparsify(tiny.build(name), alpha=1.5)
    torch.testing.assert_close(model(**fed).logits, expected(**fed).logits, rtol=1e-4, atol=1e-4)
    ours, theirs = tiny.gradients(model, fed), tiny.gradients(expected, fed)
    for key, gradient in theirs.items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-2, atol=1e-5, msg=key)


class ByHand:
    """ReLA and ASEntmax as their papers write them, in a dense model that is told each layer's parameters."""

    def __init__(self, model, sparse):
        attention = [module for module in model.modules() if tamis.hf.sites._uses_interface(module)]
        parts = [part for _, part in tamis.hf.sites.parts_of(sparse)]
        self.mechanisms = {module: part.mechanism for module, part in zip(attention, parts, strict=True)}
        self.hidden = {}
        for module in attention:
            module.register_forward_pre_hook(self.remember, with_kwargs=True)

    def remember(self, module, args, kwargs):
        self.hidden[module] = args[0] if args else kwargs["hidden_states"]

    def __call__(self, module, query, key, value, attention_mask, scaling=None, position_bias=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        visible = torch.ones(1, 1, 1, scores.shape[-1]) if attention_mask is None else (attention_mask > -1e30).float()
        bias = 0.0 if position_bias is None else position_bias
        mechanism = self.mechanisms[module]
        if isinstance(mechanism, ReLAttention):
            z = ((scores + bias).relu() * visible @ value).transpose(1, 2).flatten(2)
            gain, gate = mechanism.norm.gain, mechanism.norm.gate
            y = gain * z / (z.square().mean(-1, keepdim=True) + 1e-8).sqrt() * torch.sigmoid(gate * z)
            return y.unflatten(-1, (query.shape[1], -1)), None
        raw = self.hidden[module] @ mechanism.scale.weight.T + mechanism.scale.bias
        beta, gamma = raw.transpose(1, 2).unsqueeze(-1).chunk(2, 1)
        n = visible.sum(-1, keepdim=True)
        scale = 1.0 + torch.nn.functional.softplus(beta) * torch.log(n + 1.0) ** (2.0 * torch.tanh(gamma))
        hidden = torch.where(visible > 0, 0.0, -1e30)
        return (peer.entmax15(scale * scores + bias + hidden, dim=-1) @ value).transpose(1, 2), None


@architectures
@pytest.mark.parametrize("mechanism", ["rela", "asentmax"])
def test_the_papers_by_hand(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    fed["attention_mask"][0, -3:] = 0
    dense = tiny.build(name, "sdpa")
    by_hand = ByHand(dense, model)
    transformers.AttentionInterface.register("by_hand", by_hand)
    transformers.AttentionMaskInterface.register("by_hand", eager_mask)
    for module in dense.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "by_hand"
    torch.testing.assert_close(model(**fed).logits, dense(**fed).logits, rtol=1e-4, atol=1e-4)
    parameters = tamis.hf.added_parameters(model)
    ours, theirs = (torch.autograd.grad(tiny.loss(each, fed), parameters) for each in (model, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)


@architectures
def test_by_name_alone_is_alpha_15(name):
    fed = tiny.inputs(name)
    named, model = tiny.build(name, "tamis_entmax"), tamis.hf.sparsify(tiny.build(name), alpha=1.5)
    found, expected = (each(**fed, output_attentions=True) for each in (named, model))
    assert torch.equal(found.logits, expected.logits)
    weights = "decoder_attentions" if name in tiny.SEQ2SEQ else "attentions"
    for one, other in zip(found[weights], expected[weights], strict=True):
        assert torch.equal(one, other)


@architectures
@mechanisms
def test_every_parameter_gets_a_finite_gradient(name, mechanism):
    model = sparse(name, mechanism)
    gradients = tiny.gradients(model, tiny.inputs(name))
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    ours = {key for key, _ in model.named_parameters() if ".tamis." in key}
    assert ours
    assert ours <= gradients.keys()
    assert sum(gradients[key].abs().sum() for key in ours) > 0


@pytest.mark.parametrize("name", tiny.GENERATING)
@mechanisms
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_with_a_cache_is_that_without(name, mechanism, num_beams):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    fed.pop("decoder_input_ids", None)
    fed["input_ids"][0, :3] = tiny.PAD
    fed["attention_mask"][0, :3] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": num_beams, "do_sample": False}
    found = [
        model.generate(**fed, **options, use_cache=cached, output_logits=True, return_dict_in_generate=True)
        for cached in (True, False)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    for cached, plain in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(cached, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", tiny.CAUSAL)
@mechanisms
def test_generation_with_a_static_cache(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    static = model.generate(**fed, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, model.generate(**fed, **options))


@architectures
@mechanisms
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, mechanism, side):
    if name == "marian" and side == "left":
        pytest.skip("Marian counts positions from the first token, padding or not")
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    wider, tokens = padded(fed, side)
    if name in ("gpt2", "bert"):  # positions are learned, and ours to give
        wider["position_ids"] = (wider["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    expected, found = model(**fed).logits, model(**wider).logits
    found = found if name in tiny.SEQ2SEQ else found[:, tokens]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", tiny.SEQ2SEQ)
@mechanisms
def test_padded_targets_change_nothing(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    expected = model(**fed).logits
    length = fed["decoder_input_ids"].shape[1]
    fed["decoder_attention_mask"] = torch.ones_like(fed["decoder_input_ids"])
    for key in ("decoder_input_ids", "decoder_attention_mask"):
        fed[key] = torch.nn.functional.pad(fed[key], (0, 3))
    torch.testing.assert_close(model(**fed).logits[:, :length], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_sentences_see_themselves_alone(name):
    model, fed = sparse(name, "asentmax"), tiny.inputs(name, batch=1, length=10)
    ids = fed["input_ids"]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=part).logits for part in (ids[:, :4], ids[:, 4:])], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@architectures
@mechanisms
def test_weights_per_call_are_ours(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    plain = model(**fed)
    with tamis.analysis.capture(model) as captured:
        out = model(**fed, output_attentions=True)
    assert torch.equal(out.logits, plain.logits)
    if name in tiny.SEQ2SEQ:
        found = {"encoder": out.encoder_attentions, "decoder": out.decoder_attentions, "cross": out.cross_attentions}
    else:
        found = {"encoder" if name in ("bert", "modernbert") else "decoder": out.attentions}
    assert sum(len(weights) for weights in found.values()) == len(captured)
    for kind, layers in found.items():
        sites = [site for site in captured if tamis.analysis.kind_of(site) == kind]
        assert len(layers) == len(sites) == tiny.LAYERS
        for site, weights in zip(sites, layers, strict=True):
            assert torch.equal(weights, captured[site]), site
            if mechanism != "rela":
                torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    assert any((weights == 0).any() for layers in found.values() for weights in layers)


@pytest.mark.parametrize("name", tiny.GENERATING)
def test_weights_while_generating(name):
    model, fed = sparse(name, "entmax"), tiny.inputs(name)
    fed.pop("decoder_input_ids", None)
    out = model.generate(
        **fed, max_new_tokens=3, min_new_tokens=3, output_attentions=True, return_dict_in_generate=True, do_sample=False
    )
    steps = out.decoder_attentions if name in tiny.SEQ2SEQ else out.attentions
    assert [len(step) for step in steps] == [tiny.LAYERS] * 3


@architectures
@mechanisms
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(name, mechanism, reentrant):
    model, fed = sparse(name, mechanism).train(), tiny.inputs(name)
    for module in model.modules():  # what remains of dropout
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = tiny.gradients(model, fed)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = tiny.gradients(model, fed)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6, msg=key)


ONE_OF_EACH = {"llama": "entmax", "gpt2": "asentmax", "bert": "rela"}  # tracing takes seconds
COMPILED = [
    pytest.param(name, mechanism, marks=() if ONE_OF_EACH.get(name) == mechanism else pytest.mark.slow)
    for name in tiny.ARCHITECTURES
    for mechanism in tiny.MECHANISMS
]


@pytest.mark.parametrize(("name", "mechanism"), COMPILED)
def test_compiled_in_one_graph(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits = compiled(**fed).logits
    torch.testing.assert_close(logits, model(**fed).logits, rtol=1e-4, atol=1e-5)
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in tamis.hf.added_parameters(model))


def test_compiled_for_any_length_from_the_start():
    model = sparse("llama", "entmax")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for length in (9, 11, 12):
        fed = tiny.inputs("llama", length=length)
        torch.testing.assert_close(compiled(**fed).logits, model(**fed).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_by_inductor():
    model = sparse("llama", "entmax")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    for length in (9, 11, 12):  # the second has the graph compiled for any length
        fed = tiny.inputs("llama", length=length)
        torch.testing.assert_close(compiled(**fed).logits, model(**fed).logits, rtol=1e-4, atol=1e-5)


@architectures
@mechanisms
def test_bfloat16(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    expected = model(**fed).logits
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert {p.dtype for p in tamis.hf.added_parameters(half)} == {torch.float32}
    out = half(**fed).logits
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() < 0.1 * expected.norm()
    assert all(gradient.isfinite().all() for gradient in tiny.gradients(half, fed).values())


@architectures
@mechanisms
def test_autocast(name, mechanism):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    expected = model(**fed).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**fed).logits
    assert (out.float() - expected).norm() < 0.1 * expected.norm()


@architectures
@mechanisms
def test_saved_and_loaded(name, mechanism, tmp_path):
    model, fed = sparse(name, mechanism), tiny.inputs(name)
    with torch.no_grad():
        for parameter in tamis.hf.added_parameters(model):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)
    loaded = tamis.hf.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(loaded(**fed).logits, model(**fed).logits)


@architectures
@mechanisms
def test_densified_is_the_original_to_the_bit(name, mechanism):
    model, fed = tiny.build(name), tiny.inputs(name)
    fed["attention_mask"][0, -2:] = 0
    before, keys, written = model(**fed).logits, set(model.state_dict()), model.config.to_dict()
    tamis.hf.sparsify(model, mechanism)
    assert not torch.equal(model(**fed).logits, before)
    tamis.hf.densify(model)
    assert torch.equal(model(**fed).logits, before)
    assert set(model.state_dict()) == keys
    assert model.config.to_dict() == written
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_copy_is_a_model_of_its_own():
    model, fed = sparse("t5", "asentmax"), tiny.inputs("t5")
    sparse_logits, dense_logits = model(**fed).logits, tiny.build("t5")(**fed).logits
    other = tamis.hf.densify(copy.deepcopy(model))
    assert torch.equal(other(**fed).logits, dense_logits)
    assert torch.equal(model(**fed).logits, sparse_logits)


def test_sparsified_twice_and_taken_out_once():
    model, fed = tiny.build("bert"), tiny.inputs("bert")
    before = model(**fed).logits
    tamis.hf.sparsify(tamis.hf.sparsify(model, "asentmax"), "rela")
    assert len(tamis.hf.added_parameters(model)) == 2 * tiny.LAYERS  # a gain and a gate each
    assert torch.equal(tamis.hf.densify(model)(**fed).logits, before)
