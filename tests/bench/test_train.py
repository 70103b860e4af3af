import json

import torch

from tamis.bench import train
from tamis.data.batching import Batch
from tamis.training import Process, TrainingConfig

SMALL = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}


def test_it_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "PAIRS", 200)
    train.run(tmp_path, steps=80, batch_tokens=300, size=SMALL, vocabulary=50, device="cpu")
    record = json.loads((tmp_path / "train-cpu.json").read_text())
    assert [row["arm"] for row in record["rows"]] == ["softmax, torch's choice", "1.5-entmax", "alpha-entmax", "ReLA"]
    assert record["rows"][0]["over_softmax"] == 1.0
    assert all(row["tokens_per_second"] > 0.0 for row in record["rows"])
    assert "alpha-entmax" in capsys.readouterr().out


def test_the_text_is_a_proper_task():
    config = TrainingConfig(batch_tokens=500, device_tokens=200)
    task = train.MadeUpText(config, 50, 100)
    indices = task.updates.epoch(0)[0]
    tokens, parts = task.update(indices, Process(0, 1, torch.device("cpu")))
    assert all(isinstance(part, Batch) for part in parts)
    assert sum(part.num_tokens for part in parts) == tokens == sum((p.labels > 0).sum() for p in parts)
    assert sorted(index for part in parts for index in part.indices) == sorted(indices.tolist())
