"""Small runs to report on: three models that have learned nothing, and sentences that would do harm as markup."""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import Any

import numpy as np
import torch

from analysis.cases import seq2seq, tokens
from tamis.analysis import Sentences, ShownSentence, analyze
from tamis.functional import SparseWeights
from tamis.report import ReportRun

HOSTILE = (
    ["\u2581<script>window.harm=1</script>", '\u2581"', "\u2581it's", "\u2581a\u2028b", "\u2581&amp;", "</s>"],
    [
        "<s>",
        "\u2581\u05e9\u05dc\u05d5\u05dd",
        "\u2581</script><img/src=x/onerror=window.harm=1>",
        "\u2581${1}",
        "\u2581--",
    ],
)
LENGTHS = [(6, 5), *((5 + k % 23, 4 + (7 * k) % 25) for k in range(31))]
MECHANISMS = {"softmax": "softmax", "entmax": {"name": "entmax", "alpha": "learn"}, "rela": "rela"}


@cache
def three_runs() -> list[ReportRun]:
    return [report_run(name, spec) for name, spec in MECHANISMS.items()]


def report_run(name: str, mechanism: Any) -> ReportRun:
    """A model of two layers on 32 sentences, with numbers made up for what takes training to get."""
    model = seq2seq(mechanism, decoder_layers=2)
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randint(1, 11, (n,), generator=generator).tolist() for n in pair] for pair in LENGTHS]
    batch = Sentences(source=tokens([pair[0] for pair in pairs]), target=tokens([pair[1] for pair in pairs]))
    # Scores of a model that has learned nothing are too much alike for a zero.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    found = analyze(model, [batch], shown=range(len(pairs)))
    names = {str(k): {"source": _named("s", n), "target": _named("t", m)} for k, (n, m) in enumerate(LENGTHS)}
    names["0"] = dict(zip(("source", "target"), HOSTILE, strict=True))
    analysis = {**found.to_dict(), "data": "made up", "tokens": names, **_made_up(found)}
    return ReportRun(
        name=name, analysis=analysis, shown=found.shown, evaluation=EVALUATION, records=RECORDS, mechanism=name
    )


def dense(run: ReportRun, number: int, site: str) -> np.ndarray:
    """(H, Lq, Lk) as the analysis has it."""
    return next(s for s in run.sentences() if s.number == number).weights[site].to_dense()[0].numpy()


def unpack(text: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Back from what `pack` made, as the page does it: where rows begin, keys, weights."""
    data = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    width = int(data[:4].view("<u4")[0])
    counts = data[4 : 4 + width * rows].view(f"<u{width}").astype(np.int64)
    crow = np.concatenate(([0], counts.cumsum()))
    size, at = int(crow[-1]), 4 + width * rows
    gaps = data[at : at + width * size].view(f"<u{width}").astype(np.int64)
    total = gaps.cumsum()
    before = np.concatenate(([0], total))[crow[:-1]]
    value = np.zeros((size, 4), np.uint8)
    value[:, 1:] = data[at + width * size :].reshape(3, size).T
    return crow, total - np.repeat(before, counts), value.view("<f4")[:, 0]


def long_run(length: int = 512, kept: int = 24) -> ReportRun:
    """One sentence of many tokens with so many random weights in each row."""
    run = report_run("long", "entmax")
    rng = np.random.default_rng(0)
    weights = {}
    for site in run.analysis["sites"]:
        rows = 4 * length
        col = np.sort(rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :kept], axis=1)
        val = rng.dirichlet(np.ones(kept), rows).astype(np.float32)
        parts = (np.arange(rows + 1) * kept, col.ravel(), val.ravel())
        weights[site] = SparseWeights(*map(torch.from_numpy, parts), (1, 4, length, length))
    named = {"1": {"source": _named("s", length), "target": _named("t", length)}}
    ids = torch.zeros(length, dtype=torch.long)
    shown = {1: ShownSentence(source=ids, target=ids, weights=weights)}
    return ReportRun(name="long", analysis={**run.analysis, "tokens": named}, shown=shown)


def _named(side: str, length: int) -> list[str]:
    return [f"\u2581{side}{place}" for place in range(length)]


def _made_up(found: Any) -> dict[str, Any]:
    heads = {site: [0.01 * head for head in range(4)] for site in found.sites}
    steps = [0, 10, 20]
    score = {"aer": 0.4, "low": 0.35, "high": 0.45}
    layer = {"heads": [score] * 4, "best_head": 0, "average": score}
    return {
        "importance": {"baseline": 1.0, "change": heads},
        "trajectories": {"steps": steps, "sites": {site: [alphas] * 3 for site, alphas in found.alphas.items()}},
        "alignment": {"pairs": 2, "best": score, "normal": [layer] * 2, "shifted": [layer] * 2},
    }


EVALUATION = {
    "translation": {
        "bleu": {"score": 30.1, "low": 29.0, "high": 31.0},
        "chrf": {"score": 55.5, "low": 55.0, "high": 56.0},
    },
    "likelihood": {"perplexity": 4.2},
}
RECORDS = [
    *({"step": 10 * k, "loss": 5.0 / (k + 1), "tokens": 1000 * k, "seconds": 2.0 * k} for k in range(1, 9)),
    {"step": 40, "valid_loss": 3.0, "density": 0.7},
    {"step": 80, "valid_loss": 2.0, "density": 0.5},
]
