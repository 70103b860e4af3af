"""The benchmark's loads and, where its peers are installed, that they and our model are one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.bench import ctranslate, decode, marian
from tamis.bench.decode import BOS, EOS, PAD, Case

TINY = decode.Size(2, 16, 32, 2)


@pytest.fixture(autouse=True)
def small(monkeypatch: Any):
    monkeypatch.setattr(decode, "VOCABULARY", 50)
    monkeypatch.setitem(decode.SIZES, "base", TINY)


@pytest.mark.parametrize("load", ["equal", "mixed"])
def test_translations_have_the_same_length(load: str):
    source = decode.sources(Case("base", 6, 5, load))
    lengths = (source != PAD).sum(1).tolist()
    assert sum(lengths) == 6 * decode.LENGTH
    assert (len(set(lengths)) > 1) == (load == "mixed")
    found = decode.search(decode.build(TINY, "entmax15"), source, 3)
    assert [len(tokens) for tokens in found] == [decode.LENGTH] * 6


def test_marian_and_ours_are_one_model():
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = decode.build(TINY, "softmax")
    peer = marian.build(model.config, BOS, EOS)
    marian.copy(peer, model)
    source = decode.sources(Case("base", 4, 5, "mixed"))
    target = torch.randint(3, 50, (4, 6))
    mask = (source != PAD).long()
    with torch.no_grad():
        theirs = peer(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        torch.testing.assert_close(model(source, target), theirs, atol=1e-4, rtol=1e-4)
    assert marian.translate(peer, source, 3, decode.LENGTH) == decode.search(model, source, 3)


@pytest.mark.skipif(ctranslate.version() is None, reason="ctranslate2 is not installed")
@pytest.mark.parametrize("beam", [1, 4])
def test_ctranslate2_and_ours_are_one_model(beam: int, tmp_path: Path):
    model = decode.build(TINY, "softmax")
    ctranslate.export(model, tmp_path / "model", bos_id=BOS, eos_id=EOS)
    process = ctranslate.Process(tmp_path / "model", "fp32", 1)
    try:
        source = decode.sources(Case("base", 4, beam, "mixed"))
        ms, found = decode._of_process(process, [source], beam)
    finally:
        process.close()
    assert ms > 0.0
    assert found == decode.search(model, source, beam)


def test_what_ctranslate2_has_not_is_not_exported(tmp_path: Path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed: it comes with the extra [bench]")
    model = decode.build(TINY, "softmax")
    model.config = type(model.config)(**{**model.config.to_dict(), "activation": "gelu"})
    with pytest.raises(ValueError, match="ReLU"):
        ctranslate.export(model, tmp_path, bos_id=BOS, eos_id=EOS)


def test_cases_are_merged(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(decode, "_measured", lambda case, repeats, threads: {"min_ms": {"softmax fp32": 1.0}})
    for name in ("base-1-5-equal", "small-16-1-equal"):
        decode.run(tmp_path, repeats=1, threads=1, only=name)
    rows = json.loads((tmp_path / decode.FILE).read_text())["rows"]
    assert list(rows) == ["base-1-5-equal", "small-16-1-equal"]
    assert rows["small-16-1-equal"]["beam"] == 1
    with pytest.raises(ValueError, match="base-1-5-equal"):
        decode.run(tmp_path, repeats=1, threads=1, only="huge")


def test_ratios_are_over_the_best_of_ctranslate2():
    times = {"softmax fp32": [6.0, 5.0], "softmax int8": [2.0]}
    times |= {f"ctranslate2 {p}{way}": [10.0 + len(way)] for p in decode.PRECISIONS for way in ctranslate.WAYS}
    found = {name: [[1], [2]] for name in times} | {"softmax int8": [[1], [3]]}
    row = decode._compared(times, found)
    assert row["over_ctranslate2_fp32"]["softmax fp32"] == 0.5
    assert row["over_ctranslate2_int8"]["softmax int8"] == 0.2
    assert row["same_translations"]["softmax int8"] == 0.5
