"""A task that a tiny model learns in seconds: say the words backwards, in capitals.

As a script it trains: ``python tiny.py DATA RUN '{"steps": 40}'``, alone or under torchrun.
"""

import json
import random
import sys
from pathlib import Path

import torch

from tamis.data.prepare import DataConfig, Prepared, VocabularyConfig, prepare
from tamis.models import Seq2Seq, Seq2SeqConfig
from tamis.training import Process, Trainer, TrainingConfig, TranslationTask, process

HERE = Process(0, 1, torch.device("cpu"))


def write_text(folder: Path) -> DataConfig:
    draw = random.Random(0)
    words = [f"{a}{b}{c}" for a in "kmpt" for b in "aeo" for c in "lrs"]
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 600), ("valid", 40)):
        sentences = [[draw.choice(words) for _ in range(draw.randint(1, 9))] for _ in range(count)]
        (folder / f"{split}.src").write_text("".join(" ".join(s) + "\n" for s in sentences))
        (folder / f"{split}.tgt").write_text("".join(" ".join(s[::-1]).upper() + "\n" for s in sentences))
    return DataConfig(
        train=[str(folder / "train.src"), str(folder / "train.tgt")],
        valid=[str(folder / "valid.src"), str(folder / "valid.tgt")],
    )


def prepared(folder: Path) -> Prepared:
    if not (folder / "train.src").exists():
        write_text(folder)
    data = DataConfig(
        train=[str(folder / "train.src"), str(folder / "train.tgt")],
        valid=[str(folder / "valid.src"), str(folder / "valid.tgt")],
    )
    return prepare(data, VocabularyConfig(size=60), folder / "prepared", lambda text: None)


def model(data: Prepared, **settings) -> Seq2Seq:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    vocabulary = data.target_vocabulary
    return Seq2Seq(Seq2SeqConfig(vocab_size=len(vocabulary), pad_id=vocabulary.pad_id, **(sizes | settings)))


def settings(**changes) -> TrainingConfig:
    base = {"steps": 30, "batch_tokens": 400, "checkpoint_every": 10, "log_every": 1, "warmup": 10, "lr": 3e-3}
    return TrainingConfig(**(base | changes))


def trainer(
    data: Prepared, folder: Path, own: Process = HERE, *, dropout=0.1, mechanism="entmax", **changes
) -> Trainer:
    config = settings(**changes)
    sites = dict.fromkeys(("encoder_mechanism", "decoder_mechanism", "cross_mechanism"), mechanism)
    built = model(data, dropout=dropout, attention_dropout=dropout, **sites)
    return Trainer(built, TranslationTask(data, config), config, folder, own)


def losses(folder: Path) -> list[tuple]:
    """What a run noted, but for times."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "tokens_per_second", "data_wait")
    return [{key: value for key, value in record.items() if key not in timed} for record in records]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process("cpu") as own:
        trainer(prepared(Path(sys.argv[1])), Path(sys.argv[2]), own, **json.loads(sys.argv[3])).run()
