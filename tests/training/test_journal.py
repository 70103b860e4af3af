"""metrics.jsonl: every line is on the disk when it is written, and what came after a step is forgotten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tamis.training.journal import Journal, read_journal


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
