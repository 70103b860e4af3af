"""Write the table of README that says what sparse attention buys, from the result files that it names.

    python benchmarks/readme.py

A test compares README with what this writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
FOLDER = "benchmarks/results"
BEGIN, END = "<!-- written by benchmarks/readme.py -->\n", "<!-- end -->\n"
HEADER = ("", "softmax", "alpha learned", "alpha 1.5", "ReLA", "file")


@cache
def result(name: str) -> Any:
    return json.loads((ROOT / FOLDER / f"{name}.json").read_text())


def one(rows: Iterable[dict[str, Any]], **values: object) -> dict[str, Any]:
    found = [row for row in rows if all(row.get(key) == value for key, value in values.items())]
    if len(found) != 1:
        raise ValueError(f"expected one row with {values}, got {len(found)}")
    return found[0]


def link(name: str) -> str:
    return f"[{name}]({FOLDER}/{name}.json)"


def row(label: str, dense: str, learned: str, fixed: str, rela: str, *names: str) -> str:
    return f"| {label} | {dense} | {learned} | {fixed} | {rela} | {', '.join(map(link, names))} |"


def times(label: str, dense: str, learned: float | None, fixed: float | None, rela: float | None, *names: str) -> str:
    return row(label, dense, *map(ratio, (learned, fixed, rela)), *names)


def ratio(value: float | None) -> str:
    """A time over the baseline's, bold where it is longer."""
    if value is None:
        return ""
    text = f"{value:.2f}"
    return f"**{text}**" if float(text) > 1.0 else text


def multi30k() -> list[str]:
    name = "multi30k-gpu"
    arms = [one(result(name)["summary"], pair="en-de", arm=arm) for arm in ("softmax", "entmax", "entmax15", "rela-g")]
    bleu = (f"{arm['bleu']['mean']:.1f} ±{arm['bleu']['spread']:.1f}" for arm in arms)
    density = (f"{arm['density']['mean']:.2f}" for arm in arms)
    return [
        row("Quality: BLEU, [Multi30k](docs/results/multi30k.md), three seeds", *bleu, name),
        row("Sparsity: share of keys with a weight, same models", *density, name),
    ]


def embedded() -> list[str]:
    name = "demo-seeds-cpu"

    def bleu(arm: str) -> str:
        scores = [run["bleu"] for run in result(name)["runs"] if run["arm"] == arm and not run["changes"]]
        return f"{fmean(scores):.1f} ±{stdev(scores):.1f}"

    label = "Quality: BLEU, [embedded corpus](docs/results/embedded-corpus.md), three seeds"
    return [row(label, bleu("softmax"), bleu("entmax"), "", bleu("rela"), name)]


def cpu() -> list[str]:
    attention, translation, transforms = "attention-cpu-v4", "decode-cpu", "transforms-cpu"

    def over(batch: int, length: int) -> tuple[float, float, None]:
        cases = (
            case for case in result(attention)["rows"] if "learned" in case["over_sdpa"] and case["head_dim"] == 64
        )
        found = one(cases, batch=batch, length=length, causal=False)["over_sdpa"]
        return found["learned"], found["alpha 1.5"], None

    sentence = result(translation)["rows"]["base-1-5-equal"]["over_ctranslate2_fp32"]
    rows = result(transforms)["builds"]["v4"]["rows"]
    fixed, learned = (
        one(rows, shape=[4096, 512], scale=1.0, alpha=1.5, kind=kind)["over_dense"]
        for kind in ("forward+backward", "learned alpha")
    )
    return [
        times("CPU: attention, 64 sentences of 32 words", "1: SDPA", *over(64, 32), attention),
        times("CPU: attention, 8 texts of 1,024 tokens", "1: SDPA", *over(8, 1024), attention),
        times(
            "CPU: translating one sentence, base model, beam 5",
            f"{sentence['softmax fp32']:.2f} (1: CTranslate2)",
            *(sentence[f"{arm} fp32"] for arm in ("entmax", "entmax15", "rela")),
            translation,
        ),
        times("CPU: weights of 4,096 rows of 512 scores", "1: `torch.softmax`", learned, fixed, None, transforms),
    ]


def training() -> list[str]:
    names = "train-cuda-graphs", "train-cuda-graphs-2"
    first, second = ({arm["arm"]: arm["over_softmax"] for arm in result(name)["rows"]} for name in names)
    speeds = first["alpha-entmax"], first["1.5-entmax"], second["ReLA"]
    return [times("H200: training step, base model", "1: fastest SDPA", *(1.0 / speed for speed in speeds), *names)]


def gpu() -> list[str]:
    short, long, decoding = "kernels-short-gpu", "kernels-long-gpu", "cache-gpu"

    def over(case: dict[str, Any], baseline: str, key: str, arms: Iterable[str]) -> list[float | None]:
        own = case["times"]
        return [own[arm][key] / own[baseline][key] if arm in own else None for arm in arms]

    arms = "learned alpha", "alpha 1.5", "relu"
    shorts = (
        (length, over(one(result(short)["rows"], length=length, shape="causal"), "sdpa flash", "both_us", arms))
        for length in (128, 512)
    )
    longs = (
        (what, one(result(long)["rows"], length=16384, dim=64, causal=True, topics=topics, alibi=False))
        for what, topics in (("1 tile in 18", 20), ("all tiles", 1))
    )
    caches = (
        (what, one(result(decoding)["rows"], context=context, batch=batch, queries=1, sharp=False))
        for what, context, batch in (("131,072, 16 sequences", 131072, 16), ("8,192, 1 sequence", 8192, 1))
    )
    return [
        *(times(f"H200: attention, {n} tokens, causal", "1: FlashAttention-2", *all_, short) for n, all_ in shorts),
        *(
            times(
                f"H200: attention, 16,384 tokens, weights in {what}",
                "1: FlashAttention-2",
                *over(case, "sdpa flash", "both_ms", arms),
                long,
            )
            for what, case in longs
        ),
        *(
            times(f"H200: one new token, keys: {what}", "1: cuDNN", *over(case, "sdpa cudnn", "us", arms), decoding)
            for what, case in caches
        ),
    ]


PARTS: tuple[Callable[[], list[str]], ...] = (multi30k, embedded, cpu, training, gpu)


def table() -> str:
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER), *(line for part in PARTS for line in part())]
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """README with its table as the result files have it now."""
    before, found, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"expected {BEGIN.strip()} and {END.strip()} in README, got {len(text)} characters without")
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
