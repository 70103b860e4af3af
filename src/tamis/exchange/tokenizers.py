"""The tokenizers of imported models as vocabularies of ours."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tamis.data.imported import NONE, ImportedVocabulary, PieceVocabulary, TokenizersVocabulary
from tamis.files import read_table

UNKNOWN, END = "<unk>", "</s>"


def marian_vocabularies(folder: Path, config: Mapping[str, Any]) -> tuple[ImportedVocabulary, ImportedVocabulary]:
    """Read the vocabularies of source and target: source.spm and target.spm cut texts, vocab.json numbers pieces."""
    start = config.get("decoder_start_token_id", config.get("pad_token_id"))
    found = []
    for side, size in (("source", config["vocab_size"]), ("target", config.get("decoder_vocab_size"))):
        table = folder / "target_vocab.json" if side == "target" and _separate(folder) else folder / "vocab.json"
        pieces = _ordered(read_table(table), size or config["vocab_size"], table)
        file = folder / f"{side}.spm"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no {file.name}")
        for piece in (UNKNOWN, END):
            if piece not in pieces:
                raise ValueError(f"{table} has no piece {piece}")
        specials = {
            "pad": config["pad_token_id"],
            "bos": start,
            "eos": pieces.index(END),
            "unk": pieces.index(UNKNOWN),
        }
        model = base64.b64encode(file.read_bytes()).decode()
        found.append(PieceVocabulary({"kind": "sentencepiece", "model": model, "pieces": pieces, "specials": specials}))
    return found[0], found[1]


def tokenizers_vocabulary(folder: Path, config: Mapping[str, Any]) -> ImportedVocabulary:
    """Read the vocabulary of a language model, tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} holds no tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
        )
    eos = _first(config.get("eos_token_id"))
    if eos is None:
        raise ValueError(f"{folder / 'config.json'} must say which token ends a text: eos_token_id")
    bos, pad = (_first(config.get(f"{name}_token_id")) for name in ("bos", "pad"))
    specials = {"pad": eos if pad is None else pad, "bos": eos if bos is None else bos, "eos": eos, "unk": NONE}
    text = file.read_text(encoding="utf-8")
    size = config["vocab_size"]
    content = {"kind": "tokenizers", "tokenizer": text, "specials": specials, "size": size}
    made = TokenizersVocabulary(content)
    known = made._tokenizer.get_vocab_size(with_added_tokens=True)
    if known > size:
        raise ValueError(f"{file} has {known} pieces, and the model embeds {size}: it is another model's")
    return made


def _separate(folder: Path) -> bool:
    return (folder / "target_vocab.json").is_file()


def _ordered(table: Mapping[str, Any], size: int, path: Path) -> list[str]:
    """The pieces by number, with names for those that nobody has named."""
    if not all(isinstance(number, int) and 0 <= number < size for number in table.values()):
        raise ValueError(f"{path} must number its pieces from 0 to {size - 1}")
    pieces = [f"<unused {number}>" for number in range(size)]
    for piece, number in table.items():
        pieces[number] = piece
    return pieces


def _first(ids: Any) -> int | None:
    return ids[0] if isinstance(ids, list) and ids else ids
