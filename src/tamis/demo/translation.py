"""Three small translation models, side by side: dense, adaptively sparse, rectified linear."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tamis.bench.timing import machine
from tamis.data.grammar import Example
from tamis.data.text import grammar_examples
from tamis.decoding import Translator
from tamis.experiments import RunFolder, Translation, analyze, evaluate, read_recipe, report, train
from tamis.report.drawing import figure_class, save, weights_legend
from tamis.report.plots import draw_heads
from tamis.training.journal import Display

RECIPE = Path(__file__).with_name("demo.toml")
ARMS = {"softmax": "softmax", "entmax": "alpha-entmax", "rela": "ReLA"}
QUICK = (
    "data.train=grammar:train:2000",
    "data.valid=grammar:valid:50",
    "data.test=grammar:test:20",
    "data.gold=grammar:test:20",
    "training.steps=20",
    "training.checkpoint_every=20",
    "training.log_every=10",
)
"""Enough to see that everything works, in seconds."""
SHOWCASE = "The old man reads a newspaper."
"""A sentence of words and combinations that the demo's models have learnt."""


def run(folder: Path, console: Console, quick: bool = False) -> None:
    began = time.monotonic()
    display = Display(console)
    place = folder / "quick" if quick else folder
    overrides = [f"data.folder={json.dumps(str(place / 'data'))}", *(QUICK if quick else ())]
    runs = {}
    for arm, name in ARMS.items():
        recipe = read_recipe(RECIPE, overrides, arm)
        console.print(f"\n[bold]{name}[/bold]")
        runs[arm] = place / "runs" / arm
        train(recipe, runs[arm], "cpu", display)
        evaluate(runs[arm], "cpu", Display(quiet=True))
        analyze(runs[arm], device="cpu", display=Display(quiet=True))
    console.print()
    rows = _results(runs)
    console.print(_table(rows))
    results = {"machine": machine(), "recipe": recipe.to_dict(), "rows": rows}
    (place / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    assert isinstance(recipe, Translation)
    assert isinstance(recipe.data.test, str)
    examples = grammar_examples(recipe.data.test)
    translators = {arm: Translator.load(run, "cpu") for arm, run in runs.items()}
    _show_sentences(console, translators, examples)
    picture = place / "attention.png"
    draw_attention(picture, translators, _telling(examples))
    written = place / "report.html"
    report(list(runs.values()), written, "Tamis demo")
    console.print(f"\n{time.monotonic() - began:.0f} seconds.  What to open next:")
    for line in (
        f"{written}  everything about the three models, every head to look into; any browser, no network",
        f"{picture}  one sentence through the heads of each model; what has no colour is exactly 0",
        f"{runs['entmax'] / 'metrics.jsonl'}  the alpha of every head over training",
        "recipes/demo.toml  the recipe, to copy and change; docs/training.md says how",
        f"echo '{SHOWCASE}' | tamis translate {runs['entmax']}",
    ):
        console.print(f"  {line}", soft_wrap=True)


def _results(runs: dict[str, Path]) -> list[dict[str, Any]]:
    """The figures of each arm, from what its stages wrote."""
    rows = []
    for arm, run in runs.items():
        found = RunFolder(run).evaluated()
        heads = found["attention"]["summary"]["all"]
        best = found["alignment"]["best"]
        last = [record for record in RunFolder(run).records() if "loss" in record][-1]
        rows.append(
            {
                "arm": arm,
                "bleu": found["translation"]["bleu"],
                "chrf": found["translation"]["chrf"],
                "aer": {"score": best["aer"], "low": best["low"], "high": best["high"]},
                "density": heads["density"],
                "diversity": heads["diversity"],
                "alphas": last["alphas"],
                "tokens_per_second": last["tokens"] / last["seconds"],
                "training_seconds": last["seconds"],
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        title="One recipe, three kinds of attention", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True
    )
    for column in ("", "BLEU", "AER %", "density", "diversity", "alpha", "tokens/s"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    bleu, aer = ([row[name] for row in rows] for name in ("bleu", "aer"))
    for number, row in enumerate(rows):
        alphas = [alpha for site in row["alphas"].values() for alpha in site]
        table.add_row(
            ARMS[row["arm"]],
            _with_interval(bleu, number, more=True),
            _with_interval([{name: 100 * x for name, x in found.items()} for found in aer], number, more=False),
            f"{row['density']:.3f}",
            f"{row['diversity']:.3f}",
            f"{min(alphas):.2f}..{max(alphas):.2f}" if alphas else "",
            f"{row['tokens_per_second']:,.0f}",
        )
    table.caption = (
        "+-: half the 95 % interval over sentences; bold: ahead of all others by more than that\n"
        "BLEU: on new combinations of words\n"
        "AER: word alignments by the best head or average of heads\n"
        "density: the share of keys that a query gives any weight\n"
        "diversity: how differently heads attend, 0 to 1"
    )
    return table


def _with_interval(found: Sequence[Mapping[str, float]], number: int, more: bool) -> str:
    """A score and half its interval, in bold where it is better than every other by more than both intervals."""
    mine, others = found[number], [other for place, other in enumerate(found) if place != number]
    ahead = all(mine["low"] > other["high"] if more else mine["high"] < other["low"] for other in others)
    text = f"{mine['score']:.1f} +-{(mine['high'] - mine['low']) / 2:.1f}"
    return f"[bold]{text}[/bold]" if ahead else text


def _show_sentences(console: Console, translators: dict[str, Translator], examples: list[Example]) -> None:
    """Three of them, from long to short."""
    by_length = sorted(examples, key=lambda example: -len(example.source))
    chosen = [by_length[len(by_length) * quarter // 4] for quarter in (1, 2, 3)]
    found = {arm: translate([example.source_text for example in chosen]) for arm, translate in translators.items()}
    for number, example in enumerate(chosen):
        shown = {"source": example.source_text, "reference": example.target_text}
        shown |= {ARMS[arm]: lines[number] for arm, lines in found.items()}
        console.print()
        for name, text in shown.items():
            console.print(f"{name:<14}{text}", soft_wrap=True)


def _telling(examples: list[Example]) -> Example:
    """One whose word order differs: crossing links show in a picture."""

    def crossings(example: Example) -> int:
        links = sorted(example.links)
        return sum(a[1] > b[1] for number, a in enumerate(links) for b in links[number + 1 :])

    short = [example for example in examples if 7 <= len(example.source) <= 11]
    return max(short or examples, key=crossings)


def draw_attention(path: Path, translators: dict[str, Translator], example: Example) -> None:
    """The cross-attention of the last layer, every head of every model, while it is told the reference."""
    try:
        made = figure_class()
    except ImportError as error:
        raise SystemExit(str(error)) from None
    heads = max(translator.model.config.num_heads for translator in translators.values())
    figure = made(figsize=(3.1 * heads + 1, 3.4 * len(translators) + 0.4), layout="constrained")
    panels = figure.subplots(len(translators), heads, squeeze=False)
    for row, (arm, translator) in zip(panels, translators.items(), strict=True):
        (shown,) = translator.attention([example.source_text], [example.target_text])
        draw_heads(row, ARMS[arm], shown.weights[-1].numpy(), shown.target, shown.source, causal=False)
    weights_legend(figure, causal=False)
    save(figure, path, dpi=130)
