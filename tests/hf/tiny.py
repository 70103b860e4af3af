"""Tiny random models of every architecture that the integration is proved on, and what to feed them."""

import copy
import json

import torch
import transformers as hf
from transformers.models.t5.modeling_t5 import T5Attention

ARCHITECTURES = ("llama", "qwen3", "gpt2", "bert", "modernbert", "marian", "t5")
CAUSAL = ("llama", "qwen3", "gpt2")
SEQ2SEQ = ("marian", "t5")
GENERATING = CAUSAL + SEQ2SEQ
VOCABULARY = 40
PAD = 0
WIDTH, HEADS, LAYERS = 32, 4, 2

MECHANISMS = {
    "entmax": {"alpha": "learn", "start": 1.4},
    "rela": {},
    "asentmax": {},
}

_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_SPECIAL = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}


def config(name, **changes):
    match name:
        case "llama":
            made = hf.LlamaConfig(**_SIZES, **_SPECIAL, intermediate_size=48, num_key_value_heads=2)
        case "qwen3":
            made = hf.Qwen3Config(**_SIZES, **_SPECIAL, intermediate_size=48, num_key_value_heads=2, head_dim=12)
        case "gpt2":
            sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
            made = hf.GPT2Config(**sizes, **_SPECIAL, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        case "bert":
            drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            made = hf.BertConfig(**_SIZES, **drop, pad_token_id=PAD, intermediate_size=48, max_position_embeddings=64)
        case "modernbert":  # both kinds of layers, with a window that is shorter than the sentences
            own = {"intermediate_size": 48, "local_attention": 6, "global_attn_every_n_layers": 2}
            made = hf.ModernBertConfig(**_SIZES, **_SPECIAL, **own, cls_token_id=3, sep_token_id=4)
        case "marian":
            sizes = {"encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 48}
            sizes |= {name.replace("encoder", "decoder"): size for name, size in sizes.items()}
            sizes |= {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 64}
            own = {"decoder_start_token_id": PAD, "eos_token_id": 2, "pad_token_id": PAD, "dropout": 0.0}
            made = hf.MarianConfig(**sizes, **own, forced_eos_token_id=None)
        case "t5":
            sizes = {"d_model": WIDTH, "d_kv": 12, "d_ff": 48, "num_layers": LAYERS, "num_heads": HEADS}
            own = {"decoder_start_token_id": PAD, "pad_token_id": PAD, "eos_token_id": 2, "dropout_rate": 0.0}
            made = hf.T5Config(**sizes, **own, vocab_size=VOCABULARY, relative_attention_num_buckets=8)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "marian": "MarianMTModel",
    "t5": "T5ForConditionalGeneration",
}


def build(name, implementation="sdpa", seed=0, **changes):
    """In evaluation mode, with weights large enough for attention to have something to choose."""
    torch.manual_seed(seed)
    made = config(name, **changes)
    made._attn_implementation = implementation
    model = getattr(hf, _CLASSES[name])(made)
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.requires_grad:  # Marian's table of positions does not
            torch.nn.init.normal_(parameter, std=0.25)
    for module in model.modules():
        if isinstance(module, T5Attention):  # it does not scale its scores
            module.q.weight.data.mul_(module.key_value_proj_dim**-0.5)
    return model.eval()


def rebuilt(model, name, implementation):
    """The same weights with another attention implementation."""
    other = build(name, implementation)
    other.load_state_dict(model.state_dict())
    return other


def inputs(name, batch=2, length=9, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def ids(columns):
        return torch.randint(5, VOCABULARY, (batch, columns), generator=generator)

    fed = {"input_ids": ids(length), "attention_mask": torch.ones(batch, length, dtype=torch.long)}
    if name in SEQ2SEQ:
        fed["decoder_input_ids"] = ids(length - 2)
    return fed


def loss(model, fed):
    """Some number that depends on every output."""
    logits = model(**fed).logits
    generator = torch.Generator().manual_seed(7)
    return (logits * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)).mean()


def gradients(model, fed):
    model = copy.deepcopy(model)
    model.zero_grad()
    loss(model, fed).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def save_in_first_form(model, folder, **options):
    """As folders were before there was a `model_type` of ours."""
    model.save_pretrained(folder, **options)
    (folder / "tamis_model.py").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    config["model_type"] = config["model_type"].removeprefix("tamis_")
    (folder / "config.json").write_text(json.dumps(config))
