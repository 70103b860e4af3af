"""metrics.jsonl: every line is on the disk when it is written, and what came after a step is forgotten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tamis import Entmax, Rule
from tamis.mechanisms import MECHANISMS, Inputs, Mechanism
from tamis.models import CausalLM, CausalLMConfig
from tamis.training import GeneratedTask, TaskConfig, Trainer, TrainingConfig
from tamis.training.journal import Display, Journal, read_journal
from training import tiny


def test_every_line_is_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    synced: list[bytes] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(path.read_bytes())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    for step in (1, 2):
        journal.write({"step": step, "loss": float("nan")})
        assert synced[-1] == path.read_bytes()
        assert len(synced[-1].splitlines()) == len(synced) == step
    journal.close()


def test_the_digest_is_that_of_the_lines_that_count(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, 0)
    digests = []
    for step in (1, 2, 3):
        journal.write({"step": step})
        digests.append(journal.digest())
    journal.close()
    path.write_bytes(path.read_bytes() + b'{"step": 4, "lo')  # a killed process
    again = Journal(path, 2)
    again.close()
    assert again.digest() == digests[1]
    assert [record["step"] for record in read_journal(path)] == [1, 2]
    path.write_text(path.read_text().replace("1", "0"))
    changed = Journal(path, 2)
    changed.close()
    assert changed.digest() != digests[1]


class Own(Mechanism):
    """Learned alphas that are no `LearnedAlpha`."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.raw = num_heads, nn.Parameter(torch.zeros(num_heads))

    def rule(self, inputs: Inputs) -> Rule:
        return Entmax(self.learned_alphas())

    def learned_alphas(self) -> Tensor:
        return 1.0 + self.raw.sigmoid()


def test_alphas_of_a_mechanism_of_ones_own_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MECHANISMS, "own", lambda layer: Own(layer.num_heads))
    data = TaskConfig(name="reverse", options={"symbols": 4}, lengths=(3, 6), batch_size=4, validation_size=4)
    config = TrainingConfig(steps=2, checkpoint_every=2, log_every=1, label_smoothing=0.0)
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 16, "num_layers": 1}
    model = CausalLM(CausalLMConfig(vocab_size=data.build().vocab_size, mechanism="own", **sizes))
    Trainer(model, GeneratedTask(data, config), config, tmp_path, tiny.HERE, display=Display(quiet=True)).run()
    first, *_ = read_journal(tmp_path / "metrics.jsonl")
    ((name, alphas),) = first["alphas"].items()
    assert not name.endswith("mechanism")
    assert alphas == pytest.approx([1.5, 1.5], abs=0.1)
