"""Documents that a tiny model reads: counting in words, from anywhere.

As a script it trains: ``python tiny_language.py DATA RUN '{"steps": 40}'``, alone or under torchrun.
"""

import json
import random
import sys
from pathlib import Path

import torch

from tamis.data.prepare import PreparedText, TextConfig, VocabularyConfig, prepare_text
from tamis.models import CausalLM, CausalLMConfig
from tamis.training import LanguageTask, Process, Trainer, TrainingConfig, process

HERE = Process(0, 1, torch.device("cpu"))
WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


def text(folder: Path, **changes) -> TextConfig:
    names = {split: str(folder / f"{split}.txt") for split in ("train", "valid")}
    return TextConfig(**({**names, "documents": "blank", "length": 24, "folder": str(folder / "prepared")} | changes))


def prepared(folder: Path) -> PreparedText:
    if not (folder / "train.txt").exists():
        draw = random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 120), ("valid", 12)):
            starts = [(draw.randrange(7), draw.randint(1, 40)) for _ in range(count)]
            documents = [" ".join(WORDS[(first + k) % 7] for k in range(size)) for first, size in starts]
            (folder / f"{split}.txt").write_text("\n\n".join(documents))
    vocabulary = VocabularyConfig(size=300, kind="bpe", byte_fallback=True)
    return prepare_text(text(folder), vocabulary, folder / "prepared", lambda said: None)


def model(data: PreparedText, **settings) -> CausalLM:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "ffn_dim": 64, "num_layers": 1}
    return CausalLM(CausalLMConfig(vocab_size=len(data.vocabulary), **(sizes | settings)))


def settings(**changes) -> TrainingConfig:
    base = {"steps": 12, "batch_tokens": 100, "checkpoint_every": 4, "log_every": 1, "warmup": 4, "lr": 1e-2}
    return TrainingConfig(**(base | {"label_smoothing": 0.0} | changes))


def task(folder: Path, length=24, share=0.0, **changes) -> LanguageTask:
    data = prepared(folder)
    return LanguageTask(data, text(folder, length=length, passkey_share=share, passkey_digits=1), settings(**changes))


def trainer(
    folder: Path, run: Path, own: Process = HERE, *, length=24, share=0.0, architecture=None, **changes
) -> Trainer:
    learned = task(folder, length, share, **changes)
    return Trainer(model(prepared(folder), **(architecture or {})), learned, learned.config, run, own)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process("cpu") as own:
        trainer(Path(sys.argv[1]), Path(sys.argv[2]), own, **json.loads(sys.argv[3])).run()
