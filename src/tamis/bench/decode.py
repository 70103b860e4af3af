"""`tamis bench decode`: translating on the CPU, beside CTranslate2 and Hugging Face's Marian.

All have the same weights: Marian's are copied into a `Seq2Seq`, which is written as a model of CTranslate2.
Translations of softmax models are compared with CTranslate2's.  Each has 25 tokens, so the work is the same for all:

    equal   every source has 25 tokens
    mixed   sources of 5 to 45 tokens, 25 on average, with padding

A case is a model size, a batch size, a number of beams and a load: "base-1-5-equal".  Results are merged into the file
that is there, so cases can be run one by one.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tamis.bench import ctranslate, marian
from tamis.bench.timing import machine, save
from tamis.decoding.search import beam_search
from tamis.decoding.settings import DecodingConfig
from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tamis.native import status

VOCABULARY, LENGTH = 16000, 25
PAD, BOS, EOS = 0, 1, 2
MECHANISMS = ("softmax", "entmax15", "entmax", "rela")
PRECISIONS = ("fp32", "int8")
FILE = "decode-cpu.json"
MARIAN_BATCH = 16
"""The only size of batches at which Marian is timed: it takes several times as long as the others."""

Translations = list[list[int]]
Timed = tuple[float, Translations]
"""Milliseconds, and what was found."""


class Size(NamedTuple):
    layers: int
    embed_dim: int
    ffn_dim: int
    heads: int = 8


SIZES = {"base": Size(6, 512, 2048), "small": Size(4, 256, 1024)}


class Case(NamedTuple):
    """Sentences are translated `batch` at a time, four or one batch of them."""

    size: str
    batch: int
    beam: int
    load: str

    def __str__(self) -> str:
        return "-".join(map(str, self))


CASES = tuple(
    Case(size, batch, beam, load)
    for size in SIZES
    for beam in (5, 1)
    for batch in (1, 16, 64)
    for load in (("equal",) if batch == 1 or beam == 1 else ("equal", "mixed"))
)


def run(output: Path | None, *, repeats: int, threads: int, only: str | None = None) -> None:
    """Time all cases, or one by its name."""
    torch.set_num_threads(threads)
    cases = [case for case in CASES if only in (None, str(case))]
    if not cases:
        raise ValueError(f"there is no case {only!r}: they are {', '.join(map(str, CASES))}")
    path = None if output is None else output / FILE
    rows = _rows(path)
    for case in cases:
        rows[str(case)] = {**case._asdict(), **_measured(case, repeats, threads)}
        if path is not None:
            named = {"vocabulary": VOCABULARY, "length": LENGTH, "kernels": str(status())}
            save(path, {"benchmark": "decode", **named, "rows": rows})
    _show([rows[str(case)] for case in CASES if str(case) in rows])


def _rows(path: Path | None) -> dict[str, Any]:
    """Those of earlier runs."""
    if path is None or not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return found["rows"] if isinstance(found["rows"], dict) else {}


def _measured(case: Case, repeats: int, threads: int) -> dict[str, Any]:
    source = sources(case)
    parts = list(source.split(case.batch))
    models = {mechanism: build(SIZES[case.size], mechanism) for mechanism in MECHANISMS}
    peer = marian.build(models["softmax"].config, BOS, EOS) if case.batch == MARIAN_BATCH else None
    calls: dict[str, Callable[[], Timed]] = {}
    versions: dict[str, str] = {}
    if peer is not None:
        marian.copy(peer, models["softmax"])
        versions[marian.PEER] = marian.version()
        calls[marian.PEER] = lambda: _timed(lambda part: marian.translate(peer, part, case.beam, LENGTH), parts)
    for name, model in models.items():
        for precision in PRECISIONS:
            quantize = None if precision == "fp32" else precision
            calls[f"{name} {precision}"] = lambda model=model, quantize=quantize: _timed(  # type: ignore[misc]
                lambda part: search(model, part, case.beam, quantize), parts
            )
    with tempfile.TemporaryDirectory() as folder:
        running = []
        if (found := ctranslate.version()) is not None:
            versions[ctranslate.PEER] = found
            ctranslate.export(models["softmax"], Path(folder), bos_id=BOS, eos_id=EOS)
            for precision, way in itertools.product(PRECISIONS, ctranslate.WAYS):
                process = ctranslate.Process(Path(folder), precision, 1 if way else threads)
                running.append(process)
                calls[f"{ctranslate.PEER} {precision}{way}"] = lambda process=process: _of_process(  # type: ignore[misc]
                    process, parts, case.beam
                )
        try:
            times, found_by = alternate(calls, repeats)
        finally:
            for process in running:
                process.close()
    return {"machine": machine(), "versions": versions, **_compared(times, found_by)}


def alternate(calls: dict[str, Callable[[], Timed]], repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Milliseconds of every call, in turn, and what each found.  The first may be slow: minima count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    found: dict[str, Translations] = {}
    for number in range(repeats):
        for name, call in calls.items():
            if name != marian.PEER or number == 0:  # it takes longest and is far behind: once is enough
                ms, found[name] = call()
                times[name].append(ms)
    return times, found


def _compared(times: dict[str, list[float]], found: dict[str, Translations]) -> dict[str, Any]:
    """Minima, what they are over CTranslate2's, and how many translations of the softmax model are the same."""
    least = {name: round(min(ms), 1) for name, ms in times.items()}
    row: dict[str, Any] = {"min_ms": least, "all_ms": {name: [round(x, 1) for x in ms] for name, ms in times.items()}}
    reference = f"{ctranslate.PEER} fp32"
    if reference in least:
        fp32, int8 = (
            min(least[f"{ctranslate.PEER} {precision}{way}"] for way in ctranslate.WAYS) for precision in PRECISIONS
        )
        row["over_ctranslate2_fp32"] = {name: round(ms / fp32, 3) for name, ms in least.items()}
        row["over_ctranslate2_int8"] = {
            name: round(ms / int8, 3) for name, ms in least.items() if name.endswith("int8")
        }
        same = {name: [a == b for a, b in zip(own, found[reference], strict=True)] for name, own in found.items()}
        row["same_translations"] = {
            name: sum(equal) / len(equal)
            for name, equal in same.items()
            if name.startswith((*(f"softmax {p}" for p in PRECISIONS), ctranslate.PEER, marian.PEER))
        }
    return row


def sources(case: Case) -> Tensor:
    """(sentences, Ls), padded; the end is a token as any other here."""
    count = max(4, case.batch)
    generator = torch.Generator().manual_seed(1)
    spread = torch.linspace(-20, 20, count).round().long() if case.load == "mixed" else torch.zeros(count).long()
    lengths = LENGTH + spread[torch.randperm(count, generator=generator)]
    tokens = torch.randint(3, VOCABULARY, (count, int(lengths.max())), generator=generator)
    return torch.where(torch.arange(tokens.shape[1]) < lengths[:, None], tokens, PAD)


def search(model: Seq2Seq, source: Tensor, beam: int, quantize: str | None = None) -> Translations:
    """Translations of LENGTH tokens: none may end before, and the limit is there."""
    config = DecodingConfig(
        beam=beam, max_length=LENGTH, min_length=LENGTH + 1, max_ratio=0.0, max_extra=LENGTH, length_penalty=0.0
    )
    found = beam_search(model, source, bos_id=BOS, eos_id=EOS, config=config, quantize=quantize)
    return [best[0].tokens for best in found]


def build(size: Size, mechanism: str) -> Seq2Seq:
    torch.manual_seed(0)
    chosen = {f"{site}_mechanism": mechanism for site in ("encoder", "decoder", "cross")}
    config = Seq2SeqConfig(
        vocab_size=VOCABULARY,
        embed_dim=size.embed_dim,
        num_heads=size.heads,
        ffn_dim=size.ffn_dim,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        arrangement="post",
        pad_id=PAD,
        **chosen,  # type: ignore[arg-type]
    )
    return Seq2Seq(config).eval()


def _timed(translate: Callable[[Tensor], Translations], parts: list[Tensor]) -> Timed:
    start = time.perf_counter()
    found = [tokens for part in parts for tokens in translate(part)]
    return (time.perf_counter() - start) * 1e3, found


def _of_process(process: ctranslate.Process, parts: list[Tensor], beam: int) -> Timed:
    answers = [
        process.translate([[token for token in row if token != PAD] for row in part.tolist()], beam, LENGTH)
        for part in parts
    ]
    return sum(ms for ms, _ in answers), [tokens for _, found in answers for tokens in found]


def _show(rows: list[dict[str, Any]]) -> None:
    names = [f"{mechanism} {precision}" for precision in PRECISIONS for mechanism in MECHANISMS]
    table = Table(title="time over CTranslate2's: fp32 over its fp32, int8 over its int8; below 1 is faster")
    for column in ("case", "CTranslate2 fp32, ms", "int8, ms", "Marian over fp32", *names):
        table.add_column(column, justify="right")
    for row in rows:
        least = row["min_ms"]
        fp32, int8 = row.get("over_ctranslate2_fp32", {}), row.get("over_ctranslate2_int8", {})
        ratios = [
            f"{ratio[name]:.2f}" if name in ratio else "-"
            for name, ratio in ((marian.PEER, fp32), *((n, int8 if n.endswith("int8") else fp32) for n in names))
        ]
        waits = [[f"{ctranslate.PEER} {precision}{way}" for way in ctranslate.WAYS] for precision in PRECISIONS]
        peers = [f"{min(least[name] for name in ways):.0f}" if ways[0] in least else "-" for ways in waits]
        table.add_row(str(Case(*(row[field] for field in Case._fields))), *peers, *ratios)
    Console(width=170).print(table)
