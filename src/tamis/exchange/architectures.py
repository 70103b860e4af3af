"""Where the weights of other models go in ours: Marian (OPUS-MT), GPT-2 and Llama with its kin.

Each reader takes a config and weights, and gives our config and state dict, or says what of the model ours has no place
for.  Computed is the same, up to the rounding of another order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tamis.exchange.weights import Weights
from tamis.models.causal_lm import CausalLMConfig
from tamis.models.config import ModelConfig
from tamis.models.seq2seq import Seq2SeqConfig
from tamis.positions import Sinusoidal

State = dict[str, Tensor]
Reader = Callable[[Mapping[str, Any], Weights], tuple[ModelConfig, State]]

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def read_marian(config: Mapping[str, Any], weights: Weights) -> tuple[ModelConfig, State]:
    """An encoder-decoder with norms after each sublayer, sines before cosines, and a bias of the output."""
    _expect(config, static_position_embeddings=True, scale_embedding=True, normalize_before=False)
    _expect(config, normalize_embedding=False, add_final_layer_norm=False, tie_word_embeddings=True)
    shared = config.get("share_encoder_decoder_embeddings", True)
    width, heads, ffn = (_same(config, f"{{}}_{name}") for name in ("layers", "attention_heads", "ffn_dim"))
    size, embed_dim = _number(config, "vocab_size"), _number(config, "d_model")
    target = size if shared else _number(config, "decoder_vocab_size")
    made = Seq2SeqConfig(
        vocab_size=target,
        source_vocab_size=size,
        embed_dim=embed_dim,
        num_heads=heads[1],
        ffn_dim=ffn[1],
        encoder_layers=width[0],
        decoder_layers=width[1],
        encoder_mechanism="softmax",
        decoder_mechanism="softmax",
        cross_mechanism="softmax",
        position={"name": "sinusoidal", "halves": True},
        activation=_activation(config, "activation_function", "gelu"),
        arrangement="post",
        output_bias=True,
        dropout=config.get("dropout", 0.1),
        attention_dropout=config.get("attention_dropout", 0.0),
        pad_id=_number(config, "pad_token_id"),
    )
    weights.rename("model.")
    own = weights.left.get("shared.weight")
    source = weights.take_or(
        torch.empty(size, embed_dim) if own is None else own.float(), "encoder.embed_tokens.weight"
    )
    words = (
        weights.take_or(source, "decoder.embed_tokens.weight")
        if shared
        else weights.take("decoder.embed_tokens.weight", target, embed_dim)
    )
    if own is not None:
        weights.take("shared.weight", size, embed_dim)
    state = {"embedding.weight": words, "source_embedding.weight": source}
    state["output_bias"] = weights.take_or(torch.zeros(1, target), "final_logits_bias")[0]
    weights.drop(r"lm_head\.weight")  # tied, as was checked
    for side in ("encoder", "decoder"):
        _check_positions(weights, f"{side}.embed_positions.weight", embed_dim)
        for layer in range(width[side == "decoder"]):
            _marian_layer(weights, state, f"{side}.layers.{layer}", f"{side}.{layer}", embed_dim, ffn[1], side)
    return made, state


def _marian_layer(
    weights: Weights, state: State, theirs: str, ours: str, embed_dim: int, ffn_dim: int, side: str
) -> None:
    kinds = {"self_attn": ("self_attention", "self_residual")}
    if side == "decoder":
        kinds["encoder_attn"] = ("cross_attention", "cross_residual")
    for kind, (attention, residual) in kinds.items():
        for name in PROJECTIONS:
            _linear(weights, state, f"{theirs}.{kind}.{name}", f"{ours}.{attention}.{name}", embed_dim, embed_dim)
        _norm(weights, state, f"{theirs}.{kind}_layer_norm", f"{ours}.{residual}.norm", embed_dim)
    _linear(weights, state, f"{theirs}.fc1", f"{ours}.feed_forward.up", ffn_dim, embed_dim)
    _linear(weights, state, f"{theirs}.fc2", f"{ours}.feed_forward.down", embed_dim, ffn_dim)
    _norm(weights, state, f"{theirs}.final_layer_norm", f"{ours}.feed_residual.norm", embed_dim)


def read_gpt2(config: Mapping[str, Any], weights: Weights) -> tuple[ModelConfig, State]:
    """A language model with learned positions, whose layers hold queries, keys and values in one transposed matrix."""
    _expect(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    _expect(config, tie_word_embeddings=True)
    embed_dim, layers = _number(config, "n_embd"), _number(config, "n_layer")
    ffn_dim = config.get("n_inner") or 4 * embed_dim
    made = CausalLMConfig(
        vocab_size=_number(config, "vocab_size"),
        embed_dim=embed_dim,
        num_heads=_number(config, "n_head"),
        num_layers=layers,
        ffn_dim=ffn_dim,
        mechanism="softmax",
        position="learned",
        max_length=_number(config, "n_positions"),
        activation=_activation(config, "activation_function", "gelu_new"),
        norm="layernorm",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        bias=True,
        dropout=config.get("resid_pdrop", 0.1),
        attention_dropout=config.get("attn_pdrop", 0.1),
    )
    weights.rename("transformer.")
    weights.drop(r"lm_head\.weight|h\.\d+\.attn\.(bias|masked_bias)")
    state = {
        "embedding.weight": weights.take("wte.weight", made.vocab_size, embed_dim),
        "position.weight": weights.take("wpe.weight", made.max_length, embed_dim),
    }
    for layer in range(layers):
        theirs, ours = f"h.{layer}", f"layers.{layer}"
        joint = weights.take(f"{theirs}.attn.c_attn.weight", embed_dim, 3 * embed_dim).T.chunk(3)
        biases = weights.take(f"{theirs}.attn.c_attn.bias", 3 * embed_dim).chunk(3)
        for name, weight, bias in zip(PROJECTIONS, joint, biases, strict=False):
            state[f"{ours}.self_attention.{name}.weight"] = weight.contiguous()
            state[f"{ours}.self_attention.{name}.bias"] = bias.contiguous()
        for kind, place, outputs, inputs in (
            ("attn.c_proj", "self_attention.out_proj", embed_dim, embed_dim),
            ("mlp.c_fc", "feed_forward.up", ffn_dim, embed_dim),
            ("mlp.c_proj", "feed_forward.down", embed_dim, ffn_dim),
        ):
            weight = weights.take(f"{theirs}.{kind}.weight", inputs, outputs)
            state[f"{ours}.{place}.weight"] = weight.T.contiguous()
            state[f"{ours}.{place}.bias"] = weights.take(f"{theirs}.{kind}.bias", outputs)
        _norm(weights, state, f"{theirs}.ln_1", f"{ours}.self_residual.norm", embed_dim)
        _norm(weights, state, f"{theirs}.ln_2", f"{ours}.feed_residual.norm", embed_dim)
    _norm(weights, state, "ln_f", "norm", embed_dim)
    return made, state


def read_llama(config: Mapping[str, Any], weights: Weights) -> tuple[ModelConfig, State]:
    """A language model with rotary positions, RMS norms and gates; Mistral and Qwen2 have the same weights."""
    _expect(config, hidden_act="silu", use_sliding_window=False)
    embed_dim, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or embed_dim // heads
    layers, ffn_dim = _number(config, "num_hidden_layers"), _number(config, "intermediate_size")
    window, longest = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    if window is not None and not config.get("model_type") == "qwen2" and window < longest:
        raise ValueError(f"a sliding window of {window} has no place in our models")
    weights.rename("model.")
    bias = any(name.startswith("layers.") and name.endswith("_proj.bias") for name in weights.left)
    tied = bool(config.get("tie_word_embeddings", False))
    made = CausalLMConfig(
        vocab_size=_number(config, "vocab_size"),
        embed_dim=embed_dim,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_dim=head_dim,
        num_layers=layers,
        ffn_dim=ffn_dim,
        mechanism="softmax",
        position=_rope(config),
        activation="swiglu",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        bias=bias,
        attention_dropout=config.get("attention_dropout", 0.0),
        tie_embeddings=tied,
    )
    weights.drop(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq" + (r"|lm_head\.weight" if tied else ""))
    state = {"embedding.weight": weights.take("embed_tokens.weight", made.vocab_size, embed_dim)}
    if not tied:
        state["output.weight"] = weights.take("lm_head.weight", made.vocab_size, embed_dim)
    width = heads * head_dim
    for layer in range(layers):
        theirs, ours = f"layers.{layer}", f"layers.{layer}"
        for kind, place, outputs, inputs in (
            ("self_attn.q_proj", "self_attention.q_proj", width, embed_dim),
            ("self_attn.k_proj", "self_attention.k_proj", key_heads * head_dim, embed_dim),
            ("self_attn.v_proj", "self_attention.v_proj", key_heads * head_dim, embed_dim),
            ("self_attn.o_proj", "self_attention.out_proj", embed_dim, width),
            ("mlp.up_proj", "feed_forward.up", ffn_dim, embed_dim),
            ("mlp.gate_proj", "feed_forward.gate", ffn_dim, embed_dim),
            ("mlp.down_proj", "feed_forward.down", embed_dim, ffn_dim),
        ):
            state[f"{ours}.{place}.weight"] = weights.take(f"{theirs}.{kind}.weight", outputs, inputs)
            if bias:  # ours have all or none: what is missing is 0
                state[f"{ours}.{place}.bias"] = weights.take_or(torch.zeros(outputs), f"{theirs}.{kind}.bias")
        for kind, place in (("input_layernorm", "self_residual"), ("post_attention_layernorm", "feed_residual")):
            state[f"{ours}.{place}.norm.weight"] = weights.take(f"{theirs}.{kind}.weight", embed_dim)
    state["norm.weight"] = weights.take("norm.weight", embed_dim)
    return made, state


READERS: dict[str, Reader] = {
    "marian": read_marian,
    "gpt2": read_gpt2,
    "llama": read_llama,
    "mistral": read_llama,
    "qwen2": read_llama,
}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, as configs of version 5 and of before have them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    base = found.get("rope_theta", config.get("rope_theta", 10000.0))
    if kind not in ("default", "linear"):
        raise ValueError(f"rotary positions of the kind {kind!r} have no place in our models: only default and linear")
    scaling = {"scaling": float(found["factor"])} if kind == "linear" else {}
    return {"name": "rope", "base": float(base), **scaling}


def _expect(config: Mapping[str, Any], **wanted: Any) -> None:
    """Raise unless what a config says of these settings, if anything, is what ours compute."""
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} must be {value!r} to be imported, got {config[name]!r}")


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"config.json must hold a number {name}, got {value!r:.100}")
    return value


def _same(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """A number of the encoder and of the decoder; but for layers both must be one."""
    found = _number(config, name.format("encoder")), _number(config, name.format("decoder"))
    if found[0] != found[1] and "layers" not in name:
        raise ValueError(f"encoder and decoder must have the same {name.format('')[1:]}, got {found[0]} and {found[1]}")
    return found


def _activation(config: Mapping[str, Any], name: str, default: str) -> str:
    value = config.get(name, default)
    if value not in ACTIVATIONS:
        raise ValueError(f"{name} must be one of {', '.join(ACTIVATIONS)} to be imported, got {value!r}")
    return ACTIVATIONS[value]


def _linear(weights: Weights, state: State, theirs: str, ours: str, outputs: int, inputs: int) -> None:
    state[f"{ours}.weight"] = weights.take(f"{theirs}.weight", outputs, inputs)
    state[f"{ours}.bias"] = weights.take(f"{theirs}.bias", outputs)


def _norm(weights: Weights, state: State, theirs: str, ours: str, size: int) -> None:
    for name in ("weight", "bias"):
        state[f"{ours}.{name}"] = weights.take(f"{theirs}.{name}", size)


def _check_positions(weights: Weights, name: str, embed_dim: int) -> None:
    """A table of positions that came with the weights must be the one that ours computes."""
    table = weights.left.pop(name, None)
    if table is None:
        return
    ours = Sinusoidal(embed_dim, halves=True).table(torch.arange(len(table)))
    if table.shape != ours.shape or not torch.allclose(table.float(), ours, atol=1e-4):
        raise ValueError(f"{name} is not the table of sines and cosines that it should be")
