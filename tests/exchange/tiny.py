"""Tiny models of others with tokenizers, in folders as their libraries write them."""

import io
import json

import sentencepiece
import torch
import transformers

from tamis.data.text import grammar_examples

WIDTH, HEADS, LAYERS, PIECES = 32, 4, 2, 120


def sentences(count=300):
    examples = list(grammar_examples(f"grammar:train:{count}"))
    return [" ".join(example.source) for example in examples], [" ".join(example.target) for example in examples]


def randomised(model, seed=0):
    """Weights and biases that all matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0))
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator))
    return model.eval()


def write_bpe(folder):
    """A byte-level tokenizer, as GPT-2 has one."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([*sentences()[0], "ßü 雪 🎈"], vocab_size=320, special_tokens=["<|endoftext|>"])
    trained.save(str(folder / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )


def write_language_model(folder, kind="gpt2", **changes):
    """A GPT-2, Llama, Mistral or Qwen2 with its tokenizer; returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_bpe(folder)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    size = len(tokenizer)
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 64}
        config = transformers.GPT2Config(vocab_size=size, **sizes, **special, **changes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
        kinds = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
        made = getattr(transformers, f"{kinds[kind]}Config")
        config = made(vocab_size=size + 8, **sizes, **special, **changes)
        model = getattr(transformers, f"{kinds[kind]}ForCausalLM")(config)
    model = randomised(model)
    model.save_pretrained(folder)
    return model, tokenizer


def write_marian(folder, same=False, **changes):
    """A Marian model with source.spm, target.spm and vocab.json, whose numbers are its own; returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    source, target = sentences()
    texts = {"source": source, "target": source if same else target}
    pieces = {"</s>": 0, "<unk>": 1}
    for side, lines in texts.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=PIECES, minloglevel=2, num_threads=1
        )
        (folder / f"{side}.spm").write_bytes(model.getvalue())
        known = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        for number in range(3, PIECES - 3):  # the last few are unknown to the model
            pieces.setdefault(known.id_to_piece(number), len(pieces))
    pieces[">>fr<<"] = len(pieces)
    pieces["<pad>"] = len(pieces)
    (folder / "vocab.json").write_text(json.dumps(pieces))
    sizes = {"encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": 48}
    sizes |= {name.replace("encoder", "decoder"): size for name, size in sizes.items()}
    own = {"d_model": WIDTH, "max_position_embeddings": 64, "activation_function": "swish", "scale_embedding": True}
    pad = pieces["<pad>"]
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "forced_eos_token_id": 0}
    config = transformers.MarianConfig(vocab_size=len(pieces), **sizes, **own, **special, **changes)
    model = randomised(transformers.MarianMTModel(config))
    model.save_pretrained(folder)
    tokenizer = transformers.MarianTokenizer(
        source_spm=str(folder / "source.spm"), target_spm=str(folder / "target.spm"), vocab=str(folder / "vocab.json")
    )
    return model, tokenizer
