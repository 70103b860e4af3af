"""The benchmark's loads and, where transformers is installed, that Marian and our model are one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tamis.bench import decode

TINY = decode.Size(2, 16, 32, 2)


@pytest.fixture(autouse=True)
def small(monkeypatch: Any):
    monkeypatch.setattr(decode, "BATCH", 4)
    monkeypatch.setattr(decode, "VOCABULARY", 50)


@pytest.mark.parametrize("load", decode.LOADS)
def test_translations_are_as_long_as_their_sources(load: str):
    source = decode.sources(load)
    lengths = (source != decode.PAD).sum(1).tolist()
    assert sum(lengths) == 4 * decode.LENGTH
    assert (len(set(lengths)) > 1) == (load == "mixed")
    found = decode.search(decode.build(TINY, "entmax15"), source)
    assert [len(hypotheses[0].tokens) for hypotheses in found] == lengths


def test_marian_and_ours_are_one_model():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert transformers is not None
    marian, model = decode.build_marian(TINY), decode.build(TINY, "softmax")
    decode.copy_marian(marian, model)
    source = decode.sources("mixed")
    target = torch.randint(3, 50, (4, 6))
    mask = (source != decode.PAD).long()
    with torch.no_grad():
        theirs = marian(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        torch.testing.assert_close(model(source, target), theirs, atol=1e-4, rtol=1e-4)
    assert decode.check(marian, model)["same_translations"] == 1.0


def test_what_differs_is_not_timed(monkeypatch: Any):
    scores = SimpleNamespace(sequences_scores=torch.zeros(4), sequences=torch.zeros(4, 26, dtype=torch.long))
    monkeypatch.setattr(decode, "generate", lambda *args, **options: scores)
    with pytest.raises(RuntimeError, match="not timed"):
        decode.check(None, decode.build(TINY, "softmax"))
